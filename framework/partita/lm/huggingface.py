"""A language model loaded with transformers, peft and bitsandbytes: `load_model` creates it."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import nn

from partita.lm.base import BatchSupport, Generated, GenerationOptions, GenerationRequest
from partita.lm.batch_generation.batch_check import check_causal, find_batch_support, padding_limit
from partita.lm.batch_generation.generation import (
    answer_ends,
    generate_batch,
    left_padded_prompts,
    may_run_past_context,
)
from partita.lm.batch_generation.worst_case import (
    TIMED_STEPS,
    batch_decode_step,
    batch_worst_case,
    reachable_tokens,
    timed_length,
)
from partita.lm.branches.masks import (
    BranchSupport,
    branch_inputs,
    ends_of_sight,
    find_branch_support,
    separate_rows,
)
from partita.lm.checks.loss_token_check import find_loss_token_layer
from partita.lm.checks.packing_check import Isolation, find_isolation, packed_inputs
from partita.lm.decoding.batch_prompts import BatchPrompts
from partita.lm.decoding.sampler import Sampler, row_seed
from partita.lm.devices import seeded
from partita.lm.loaded_model import TextModel
from partita.lm.losses.loss import LabelInputs, copy_labels, label_cross_entropy
from partita.lm.losses.loss_token_layer import LossTokenHook
from partita.lm.model_config.attention_windows import smallest_span
from partita.lm.model_config.memory_estimate import forward_bytes, generation_bytes, training_bytes
from partita.lm.paged.check import check_paged, open_attention, wants_pages, why_not_paged, why_unsupported_options
from partita.lm.paged.slots import PagedSlots
from partita.lm.paged.worst import worst_paged_rows
from partita.lm.slots.check import find_slot_support, why_not_beyond_window, why_unsupported, window_reason
from partita.lm.slots.label_scoring import ScoringSlots
from partita.lm.slots.slots import Slots, SlotSupport
from partita.lm.slots.worst import OpenTimedRows, slots_decode_step, slots_worst_case, worst_slots
from partita.lm.trained_model import TrainedModel
from partita.lm.transformers_internals import are_packed, packing_known
from partita_schema.errors import ModelError
from partita_schema.sections.trainer import FinetuneTrainer
from partita_trainers.base import Batch
from partita_trainers.batch_size.probe import Purpose, Timing
from partita_trainers.device_copies import Prefetch, to_device

logger = logging.getLogger(__name__)


class HuggingFaceModel(TrainedModel, TextModel):
    """Implements `partita.lm.base.GenerativeModel`; created by `load_model`."""

    loss_token_layer: LossTokenHook | None = None
    """Computes the rest of the last layer for the tokens that predict a label only; see `check_loss`."""

    # Training

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the sum of the cross-entropy over the batch's loss tokens, in float32."""
        return self.cross_entropy(module, batch, reduction="sum")

    def token_log_probs(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each of the batch's loss tokens, in float32."""
        return -self.cross_entropy(module, batch, reduction="none")

    def cross_entropy(self, module: nn.Module, batch: Batch, *, reduction: Literal["sum", "none"]) -> torch.Tensor:
        """Return the cross-entropy of the batch's loss tokens, summed or not, in float32."""
        inputs = self._prefetch.take(batch, self.copy_inputs)
        # Evaluations are equal bit for bit in any batches, which the selection of tokens is not; nor are references
        # and policy if only one of them is selected.
        last_layer = self.loss_token_layer if reduction == "sum" and torch.is_grad_enabled() else None
        noise = self.noise.for_rows(inputs.batch) if self.noise is not None else nullcontext()
        with noise, packing_known(packed=are_packed(inputs.batch)):
            return label_cross_entropy(
                module,
                inputs,
                reduction=reduction,
                positions=self.positions,
                more_inputs=self.more_inputs(inputs),
                last_layer=last_layer,
            )

    def prefetch(self, batch: Batch) -> None:
        """Begin to copy what the loss needs of a batch to the device, while it computes with another one."""
        self._prefetch.begin(batch, self.copy_inputs)

    @cached_property
    def _prefetch(self) -> Prefetch[Any]:
        """The inputs of the next batch."""
        return Prefetch(self.device)

    def copy_inputs(self, batch: Batch) -> LabelInputs:
        """Return what the loss needs of a batch, on the device."""
        has_branches = batch.has_branches
        if has_branches and self.branch_support.reason is not None:
            batch, has_branches = separate_rows(batch), False
        virtual_tokens = self.virtual_tokens if self.virtual_tokens_are_embeddings else 0
        inputs = copy_labels(batch, virtual_tokens=virtual_tokens, device=self.device)
        if batch.position_ids_BT is not None and has_branches:
            return replace(inputs, ends_BT=to_device(ends_of_sight(batch.position_ids_BT), self.device))
        if batch.position_ids_BT is None and self.config.trust_remote_code:
            return replace(inputs, attention_mask_BT=to_device(batch.attention_mask(), self.device))
        return inputs

    def more_inputs(self, inputs: LabelInputs) -> dict[str, Any]:
        """Return model inputs in addition to the ids. Raise ModelError if packed rows attend to each other."""
        if inputs.position_ids_BT is not None:
            if inputs.ends_BT is not None:
                return branch_inputs(inputs.position_ids_BT, inputs.ends_BT, model=self.base)
            return packed_inputs(inputs.position_ids_BT, isolation=self.isolation, model=self.base)
        return {} if inputs.attention_mask_BT is None else {"attention_mask": inputs.attention_mask_BT}

    @cached_property
    def isolation(self) -> Isolation:
        """How attention between packed rows is prevented."""
        return find_isolation(self)

    @cached_property
    def branch_support(self) -> BranchSupport:
        """How rows with branches are computed."""
        return find_branch_support(self)

    @cached_property
    def is_causal(self) -> bool:
        """True; raises ModelError if a token's logits depend on later tokens."""
        check_causal(self)
        return True

    def check_loss(self) -> None:
        """Raise ModelError if a row's loss depends on padding or on the tokens that it predicts.

        From then on, `loss` with gradients computes the last layer for the tokens that predict a label only, if the
        model supports it.
        """
        _ = self.is_causal  # the first access checks it, and may raise
        if self.loss_token_layer is None:
            self.loss_token_layer = find_loss_token_layer(self)

    def check_packing(self) -> None:
        """Raise ModelError if packed rows attend to each other."""
        isolation = self.isolation  # the first access checks it, and may raise
        logger.debug("packed rows are kept apart by %s", isolation)

    # Inference

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        """Generate for each request independently of the others; keep the order."""
        if not requests:
            return []
        if options.beams > 1 and options.do_sample and len(requests) > 1:
            # transformers samples jointly for all rows of a batch, so a row is independent only in a batch by itself.
            return [self.generate([request], options, seed=seed)[0] for request in requests]
        groups = [list(range(len(requests)))]
        if options.beams > 1 or self.runs_past_context(requests):
            # Rows at their limit continue until the batch ends: beams would keep growing, and learned positions run
            # out.
            limits = sorted({request.max_new_tokens for request in requests})
            groups = [[i for i, r in enumerate(requests) if r.max_new_tokens == limit] for limit in limits]
        answers: dict[int, Generated] = {}
        with ExitStack() as stack:
            stack.enter_context(seeded(row_seed(seed, requests[0].key) % 2**63, device=self.device))
            stack.enter_context(self.evaluating())
            ends = answer_ends(self, options)
            sampler = Sampler(options, ends=tuple(ends), seed=seed, device=self.device)
            for group in groups:
                self.forget_rows()
                prompts = self.batch_prompts([requests[index] for index in group], beams=options.beams)
                completions = generate_batch(self.base, prompts, options, sampler=sampler, tokenizer=self.tokenizer)
                answers.update(zip(group, completions, strict=True))
        return [answers[index] for index in range(len(requests))]

    def batch_prompts(self, requests: Sequence[GenerationRequest], *, beams: int) -> BatchPrompts:
        """Return the prompts, padded on the left."""
        return left_padded_prompts(self, requests, beams=beams)

    def runs_past_context(self, requests: Sequence[GenerationRequest]) -> bool:
        """Return whether a row at its limit would leave the context before the batch ends."""
        longest = max(len(request.input_ids) for request in requests)
        end = longest + max(request.max_new_tokens for request in requests)
        return self.context_length is not None and end > self.context_length and not may_run_past_context(self.base)

    def reachable_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return the new tokens that every row of a batch can reach after a prompt of this length."""
        return reachable_tokens(self, prompt_tokens=prompt_tokens, new_tokens=new_tokens)

    def generate_worst_case(
        self, rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions, shared_tokens: int = 0
    ) -> Timing:
        """Prefill prompts and generate all new tokens; restore the random state.

        See `GenerativeModel.generate_worst_case` for the arguments.
        """
        tokens = prompt_tokens + new_tokens
        with seeded(0, device=self.device), self.evaluating():
            if self.why_no_slots(options, tokens=tokens) is None:
                return slots_worst_case(
                    self.timed_rows(rows, options),
                    prompt_tokens=prompt_tokens,
                    new_tokens=new_tokens,
                    shared_tokens=shared_tokens,
                )
            support = self.batch_support(options, tokens=tokens)
            return batch_worst_case(
                self, rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens, options=options, support=support
            )

    def estimated_bytes(self, purpose: Purpose, rows: int, *, tokens: int, new_tokens: int, loss_tokens: int) -> int:
        """Estimate the memory of a batch in bytes from the shape of the model.

        See `GenerativeModel.estimated_bytes` for the arguments.
        """
        if purpose == "generation":
            return generation_bytes(self.base, rows, prompt_tokens=tokens, new_tokens=new_tokens)
        if purpose == "evaluation":
            return forward_bytes(self.base, rows, tokens=tokens, loss_tokens=loss_tokens)
        recomputed = isinstance(self.config.trainer, FinetuneTrainer) and self.config.trainer.gradient_checkpointing
        return training_bytes(self.base, rows, tokens=tokens, loss_tokens=loss_tokens, recomputed=recomputed)

    def time_decode_step(self, rows: int, *, length: int, options: GenerationOptions, shared_tokens: int = 0) -> float:
        """Return the seconds of one decode step; restore the random state.

        See `GenerativeModel.time_decode_step` for the arguments.
        """
        with seeded(0, device=self.device), self.evaluating():
            length = timed_length(self, length)
            tokens = length + TIMED_STEPS
            if self.why_no_slots(options, tokens=tokens) is None:
                return slots_decode_step(self.timed_rows(rows, options), length=length, shared_tokens=shared_tokens)
            support = self.batch_support(options, tokens=tokens)
            return batch_decode_step(self, rows, length=length, options=options, support=support)

    def timed_rows(self, rows: int, options: GenerationOptions) -> OpenTimedRows:
        """Return what allocates the KV cache of a job in the worst case, for a model that supports slots."""
        if self.uses_paged_cache(options):
            return partial(worst_paged_rows, self, rows, options=options, attention=open_attention(self))
        return partial(worst_slots, self, rows, options=options, support=self.slot_support)

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Return why rows of up to `tokens` tokens cannot use slots; None if they can.

        Raises:
            ModelError: The options ask for a paged KV cache, and it is not supported.
        """
        reason = self.why_no_slot_cache(options, tokens=tokens)
        if options.kv_cache == "paged":
            check_paged(reason or self.why_no_paged_cache(options))
        return reason

    def why_no_slot_cache(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Return why rows of up to `tokens` tokens cannot use slots, whatever the options say of a paged KV cache."""
        reason = why_unsupported(self, options, tokens=tokens) or self.slot_support.reason
        window = smallest_span(self.base.config.get_text_config())
        if reason is None and window is not None and tokens > window and self.why_not_beyond_window is not None:
            return window_reason(window, tokens)
        return reason

    def batch_support(self, options: GenerationOptions, *, tokens: int) -> BatchSupport:
        """Return which rows of up to `tokens` tokens, including new ones, can share a batch.

        Raises:
            ModelError: Beam search is configured, and the model does not support it.
        """
        support = self.short_batch_support
        if support.rows == "one row" and options.beams > 1:
            raise ModelError(
                f"generation.num_beams: beams go through the model together, and {support.reason}; remove it"
            )
        if support.rows == "padded" and (limit := padding_limit(self)) is not None and tokens > limit[0]:
            return BatchSupport(
                "equal lengths", f"beyond {limit[0]:,} tokens {limit[1]}, and there are rows of {tokens:,}"
            )
        return support

    @cached_property
    def short_batch_support(self) -> BatchSupport:
        """The same, tested on short rows."""
        return find_batch_support(self)

    @cached_property
    def slot_support(self) -> SlotSupport:
        """How the model supports slots, or why it does not."""
        return find_slot_support(self)

    @cached_property
    def why_not_beyond_window(self) -> str | None:
        """Why slots do not support rows longer than a sliding window; None if they do."""
        reason = why_not_beyond_window(self, self.slot_support)
        if reason is not None:
            logger.debug("rows longer than a sliding window: %s", reason)
        return reason

    def why_no_paged_cache(self, options: GenerationOptions) -> str | None:
        """Return why a model that supports slots has no paged KV cache with these options; None if it has."""
        return why_unsupported_options(self, options) or self.why_not_paged

    @cached_property
    def why_not_paged(self) -> str | None:
        """Why the model does not support a paged KV cache; None if it does."""
        return why_not_paged(self)

    def uses_paged_cache(self, options: GenerationOptions) -> bool:
        """Return whether the KV cache is paged, for a model that supports slots."""
        return wants_pages(self, options) and self.why_no_paged_cache(options) is None

    def open_slots(
        self, options: GenerationOptions, *, slots: int, tokens: int, prefix: Sequence[int], seed: int
    ) -> Slots | PagedSlots:
        """Start continuous batching, by scoring if there are labels.

        See `GenerativeModel.open_slots` for the arguments.
        """
        if self.uses_paged_cache(options):
            logger.info("answers are generated with a paged KV cache")
            attention = open_attention(self)
            return PagedSlots(self, options, slots=slots, tokens=tokens, prefix=prefix, seed=seed, attention=attention)
        if options.scores_labels:
            return ScoringSlots(
                self, options, slots=slots, tokens=tokens, prefix=prefix, seed=seed, support=self.slot_support
            )
        return Slots(self, options, slots=slots, tokens=tokens, prefix=prefix, seed=seed, support=self.slot_support)
