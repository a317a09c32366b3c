"""An encoder-decoder loaded with transformers: T5, BART and the like.

The encoder reads the prompt and the decoder writes the answer, so a row has two sides of independent length. A batch
holds each row as one sequence, as for other models, and the loss splits it where the labels start (see
`partita_trainers.sides`). Everything that is not about the two sides is inherited.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from partita.lm.base import BatchSupport, Generated, GenerationOptions, GenerationRequest
from partita.lm.batch_generation.worst_case import TIMED_STEPS, ForwardClock, run, worst_requests
from partita.lm.decoding.batch_prompts import BatchPrompts, right_padded
from partita.lm.decoding.continuation import decode_text
from partita.lm.devices import seeded
from partita.lm.encoder_decoder.check import check_sides
from partita.lm.encoder_decoder.label_scoring import choose_labels
from partita.lm.huggingface import HuggingFaceModel
from partita.lm.losses.loss import connected_empty
from partita.lm.transformers_internals import padding_known
from partita_schema.errors import ModelError
from partita_schema.rules.encoder_decoders import GUIDANCE
from partita_trainers.base import Batch
from partita_trainers.batch_size.probe import Timing
from partita_trainers.device_copies import to_device
from partita_trainers.sides import split_sides

logger = logging.getLogger(__name__)

SHORT_PROMPT = 2
"""Tokens of a prompt that are enough to start decoding."""


@dataclass(frozen=True)
class SideInputs:
    """Both sides of a batch on the device of the model."""

    input_ids_BS: torch.Tensor
    attention_mask_BS: torch.Tensor
    decoder_input_ids_BT: torch.Tensor
    indices_K: torch.Tensor
    """Indices of the labels in the flattened answers."""
    labels_K: torch.Tensor
    padded: bool
    """Whether the mask of the encoder masks padding."""


class EncoderDecoderModel(HuggingFaceModel):
    """Implements `partita.lm.base.GenerativeModel`; created by `load_model`.

    Shapes: B rows, S tokens of the longest prompt, T tokens of the longest answer, K tokens with a label, V vocabulary.
    """

    def __post_init__(self) -> None:
        """Find the token that starts the decoder's sequence."""
        super().__post_init__()
        start = self.original_generation_config.decoder_start_token_id
        start = getattr(self.base.config, "decoder_start_token_id", None) if start is None else start
        start = getattr(self.base.config, "bos_token_id", None) if start is None else start
        if start is None:
            raise ModelError(
                f"base_model: {self.source} names no decoder_start_token_id, the token that an answer starts with; "
                "write it in its config.json"
            )
        self.start_token_id = int(start)
        self.base.generation_config.decoder_start_token_id = self.start_token_id
        half = self.base.dtype == torch.float16 or getattr(self.config.trainer, "mixed_precision", "") == "fp16"
        if half and "t5" in self.base.config.model_type:
            logger.warning("T5 overflows in float16, and its loss becomes NaN; write bfloat16 or float32")

    # Training

    def cross_entropy(self, module: nn.Module, batch: Batch, *, reduction: Literal["sum", "none"]) -> torch.Tensor:
        """Return the cross-entropy of the batch's loss tokens, summed or not, in float32."""
        if not batch.loss_tokens:
            nothing_K = connected_empty(module, device=self.device)
            return nothing_K.sum() if reduction == "sum" else nothing_K
        inputs: SideInputs = self._prefetch.take(batch, self.copy_sides)
        with self.positions.only(inputs.indices_K), padding_known(padded=inputs.padded):
            logits = module(
                input_ids=inputs.input_ids_BS,
                attention_mask=inputs.attention_mask_BS,
                decoder_input_ids=inputs.decoder_input_ids_BT,
                use_cache=False,
            ).logits
        logits_KV = logits[0] if self.positions.attached else logits.flatten(0, 1)[inputs.indices_K]
        return cross_entropy(logits_KV.float(), inputs.labels_K, reduction=reduction)

    def prefetch(self, batch: Batch) -> None:
        """Begin to copy both sides of a batch to the device, while it computes with another one."""
        self._prefetch.begin(batch, self.copy_sides)

    def copy_sides(self, batch: Batch) -> SideInputs:
        """Return both sides of a batch on the device."""
        sides = split_sides(batch)
        labels_N = sides.labels_BT.flatten()
        indices_K = (labels_N != -100).nonzero()[:, 0]
        return SideInputs(
            input_ids_BS=to_device(sides.input_ids_BS, self.device),
            attention_mask_BS=to_device(sides.attention_mask_BS, self.device),
            decoder_input_ids_BT=to_device(self.decoder_inputs(sides.labels_BT), self.device),
            indices_K=to_device(indices_K, self.device),
            labels_K=to_device(labels_N[indices_K], self.device),
            padded=not bool(sides.attention_mask_BS.all()),
        )

    def decoder_inputs(self, labels_BT: torch.Tensor) -> torch.Tensor:
        """Return the decoder's inputs: the labels shifted to the right, as this architecture does."""
        shift = getattr(self.base, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None:
            shifted_BT: torch.Tensor = shift(labels_BT)
            return shifted_BT
        start_B1 = labels_BT.new_full((len(labels_BT), 1), self.start_token_id)
        inputs_BT = torch.cat([start_B1, labels_BT[:, :-1]], dim=1)
        return inputs_BT.masked_fill(inputs_BT == -100, self.tokenizer.pad_token_id)

    @cached_property
    def is_causal(self) -> bool:
        """True; raises ModelError if a label's logits depend on later labels or on padding."""
        check_sides(self)
        return True

    def check_packing(self) -> None:
        """Raise ModelError: rows cannot be packed."""
        raise ModelError(
            "data.batching.type: rows cannot be packed for an encoder-decoder, whose rows have two sides; write "
            "data.batching: {type: bucket}"
        )

    # Inference

    def batch_prompts(self, requests: Sequence[GenerationRequest], *, beams: int) -> BatchPrompts:
        """Return the prompts for the encoder, padded on the right; each decoder sequence is one token."""
        ids_BS, lengths_B = right_padded(requests, pad_token_id=self.tokenizer.pad_token_id)
        mask_BS = (torch.arange(ids_BS.shape[1]) < lengths_B[:, None]).long()
        inputs = {"input_ids": ids_BS.to(self.device), "attention_mask": mask_BS.to(self.device)}
        decoded = [
            GenerationRequest(
                [self.start_token_id], request.max_new_tokens, key=request.key, encoder_ids=request.input_ids
            )
            for request in requests
        ]
        return BatchPrompts(inputs, decoded, 1, self.decode)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of an answer's tokens: the beginning of a text, not its continuation."""
        return decode_text(self.tokenizer, ids)

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        """Generate for each request, or choose a label, independently of the others; keep the order."""
        if options.labels and requests:
            with self.evaluating():
                return choose_labels(self, requests, options)
        with self.without_gradients():
            return super().generate(requests, options, seed=seed)

    def runs_past_context(self, requests: Sequence[GenerationRequest]) -> bool:
        """Return False: all rows start at the same position, and none has a limit beyond the decoder's context."""
        return False

    def reachable_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return the new tokens that every row can reach: those of the decoder's context."""
        limit = self.answer_context.length if self.answer_context is not None else None
        return new_tokens if limit is None else min(new_tokens, limit)

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Return why slots cannot be used: there is an encoder."""
        return "an encoder next to the decoder"

    def batch_support(self, options: GenerationOptions, *, tokens: int) -> BatchSupport:
        """Return which rows can share a batch.

        Raises:
            ModelError: guidance_scale is configured, or beam search, and the model does not support it.
        """
        if options.arguments.get("guidance_scale") not in (None, 1, 1.0) and not options.labels:
            raise ModelError(f"generation.guidance_scale: {GUIDANCE}")
        return super().batch_support(options, tokens=tokens)._replace(scores_labels=not options.constraints)

    def generate_worst_case(
        self, rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions, shared_tokens: int = 0
    ) -> Timing:
        """Encode prompts and generate all new tokens; restore the random state.

        See `GenerativeModel.generate_worst_case` for the arguments.
        """
        support = self.batch_support(options, tokens=prompt_tokens)
        with seeded(0, device=self.device), self.evaluating():
            requests = worst_requests(self, rows, prompt_tokens=prompt_tokens, new_tokens=new_tokens, support=support)
            if options.labels:
                clock = ForwardClock(self.device)
                choose_labels(self, requests, options)
                clock.tick()
                return Timing(prefill_seconds=clock.seconds[0])
            first, *others = self.timed_steps(requests, options, new_tokens=new_tokens)
            return Timing(prefill_seconds=first, decode_seconds=median(others or [0.0]))

    def time_decode_step(self, rows: int, *, length: int, options: GenerationOptions, shared_tokens: int = 0) -> float:
        """Return the seconds of one decode step, the fastest of a few; restore the random state.

        See `GenerativeModel.time_decode_step` for the arguments. The encoder's side is as long as the whole cache.
        """
        if options.labels:
            return 0.0
        limit = self.context_length
        length = max(SHORT_PROMPT, length if limit is None else min(length, limit))
        support = self.batch_support(options, tokens=length)
        with seeded(0, device=self.device), self.evaluating():
            requests = worst_requests(self, rows, prompt_tokens=length, new_tokens=TIMED_STEPS, support=support)
            return min(self.timed_steps(requests, options, new_tokens=TIMED_STEPS)[1:])

    def timed_steps(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, new_tokens: int
    ) -> list[float]:
        """Return the seconds of encoding with the first token, then of each further token."""
        clock = ForwardClock(self.device)
        prompts = self.batch_prompts(requests, beams=options.beams)
        run(self, prompts, options, new_tokens=new_tokens, clock=clock)
        return clock.seconds
