"""A language model loaded with transformers, peft and bitsandbytes."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from partita.lm.adapters.adalora import AdaloraBudget
from partita.lm.adapters.build import add_adapter, check_type, read_adapter
from partita.lm.adapters.inits import initial_adapter
from partita.lm.adapters.lora_linear import fuse_lora
from partita.lm.base import BatchWay, Generated, GenerationOptions, GenerationRequest
from partita.lm.batch_check import check_causal, find_batch_way, padding_limit
from partita.lm.exporting import export
from partita.lm.freezing import freeze, recompute_activations, trained_parameters
from partita.lm.generation import end_token_ids, generate_batch, may_run_past_context, prompt_inputs, quiet_settings
from partita.lm.grammar import Grammar
from partita.lm.identity import changed_tensors, identity
from partita.lm.loading import context_length, find_device, load_base
from partita.lm.loss import AnswerPositions, label_cross_entropy, padding_mask
from partita.lm.memory_estimate import forward_bytes, generation_bytes, training_bytes
from partita.lm.neftune import EmbeddingNoise
from partita.lm.onednn_linear import use_onednn
from partita.lm.packing_check import Isolation, find_isolation, packed_inputs
from partita.lm.quantization import choose_kernels
from partita.lm.randomness import seeded
from partita.lm.sampler import Sampler, row_seed
from partita.lm.saving import (
    INITIAL,
    check_initial,
    read_checkpoint,
    restore_parameters,
    write_checkpoint,
)
from partita.lm.scoring import ScoringSlots
from partita.lm.slot_check import find_way, unsupported
from partita.lm.slots import Slots, SlotWay
from partita.lm.worst_case import generate_worst_case, ordinary_tokens, reachable_tokens, time_decode_step
from partita.tokenizers.hub import digest, find_sources, quiet_libraries, tensors_digest
from partita_schema.adapter import AdaloraAdapter, Adapter
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.trainer import FinetuneTrainer
from partita_trainers.base import Batch
from partita_trainers.batch_size.probe import Purpose, Timing

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

EMBEDDED = ("PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT")
"""Adapters whose virtual tokens are input embeddings; other prompt learning methods fill the KV cache."""


def load_model(
    config: Config,
    *,
    folder: Path,
    tokenizer: "PreTrainedTokenizerFast",
    saved: Path | None = None,
    batches: Callable[[], Iterable[Batch]] | None = None,
    trainable: bool,
) -> "HuggingFaceModel":
    """Load the model of the config, or the one that `save` wrote.

    Args:
        config: The config.
        folder: Folder that relative names refer to.
        tokenizer: Tokenizer of the model.
        saved: Folder of a saved model.
        batches: Returns training batches, for adapter inits that depend on data.
        trainable: Whether parameters require gradients. If False, an adapter without weights in `saved` or
            `pretrained_adapter_weights` is skipped: untrained, it has no effect.

    Raises:
        ModelError: The model cannot be loaded.
    """
    quiet_libraries()
    device = find_device(config.model_parameters)
    source, adapter_source, plain = find_sources(config, folder=folder, saved=saved)
    base = load_base(config, source=source, tokenizer=tokenizer, device=device, plain=plain)
    own_settings = quiet_settings(base)
    # Before any forward pass, which would repack the weights. A trained model predicts with the kernels it was
    # evaluated with.
    choose_kernels(base, may_pack=not trainable and config.trainer.type == "none")
    base.requires_grad_(config.adapter is None and trainable)
    module: Any = base
    initial: dict[str, torch.Tensor] = {}
    if adapter_source is not None:
        pickles = config.model_parameters.pickled_weights
        module = read_adapter(base, adapter_source, trainable=trainable, pickles=pickles)
        if config.adapter is not None:
            check_type(module, config.adapter, source=adapter_source)
    elif config.adapter is not None and trainable:
        module = new_adapter(base, config.adapter, config, source=source, tokenizer=tokenizer, batches=batches)
        initial = initial_adapter(module, config.adapter)
    if trainable:
        freeze(module, config)
        if isinstance(config.trainer, FinetuneTrainer) and config.trainer.gradient_checkpointing:
            recompute_activations(base, config)
        fuse_lora(module)
    else:
        module.requires_grad_(False)
    module.eval()
    return HuggingFaceModel(
        module,
        config=config,
        tokenizer=tokenizer,
        device=device,
        source=source,
        adapter_source=adapter_source,
        initial=initial,
        own_settings=own_settings,
        plain=plain,
        trainable=trainable,
    )


def new_adapter(
    base: "PreTrainedModel",
    adapter: Adapter,
    config: Config,
    *,
    source: str | None,
    tokenizer: "PreTrainedTokenizerFast",
    batches: Callable[[], Iterable[Batch]] | None,
) -> Any:
    """Add a new adapter to the base model, initialized from the seed of the config.

    Args:
        base: The base model.
        adapter: The adapter section.
        config: The config.
        source: Folder or Hub id of the base model; None for random weights.
        tokenizer: Tokenizer of the model.
        batches: Returns training batches, for adapter inits that depend on data.
    """

    def original_weights() -> dict[str, torch.Tensor]:
        cpu = torch.device("cpu")
        return dict(load_base(config, source=source, tokenizer=tokenizer, device=cpu, plain=True).state_dict())

    with seeded(config.seed, device=base.device):
        return add_adapter(base, adapter, batches=batches, original_weights=original_weights, tokenizer=tokenizer)


class HuggingFaceModel:
    """Implements `partita.lm.base.GenerativeModel`; created by `load_model`."""

    def __init__(
        self,
        module: Any,
        *,
        config: Config,
        tokenizer: "PreTrainedTokenizerFast",
        device: torch.device,
        source: str | None,
        adapter_source: str | None,
        initial: dict[str, torch.Tensor],
        own_settings: Any,
        plain: bool,
        trainable: bool,
    ) -> None:
        """Wrap a loaded module.

        Args:
            module: The transformers or peft model, on its device.
            config: The config.
            tokenizer: Tokenizer of the model.
            device: Device of the weights.
            source: Folder or Hub id of the base model; None for random weights.
            adapter_source: Folder or Hub id of the adapter; None for a new one or none.
            initial: Initial values of the adapter, if its init moved base weights.
            own_settings: The checkpoint's generation config.
            plain: Whether the base weights were saved by a run.
            trainable: Whether parameters require gradients.
        """
        self.module: nn.Module = module
        self.tokenizer = tokenizer
        self.device = device
        self.config = config
        self.source = source
        self.adapter_source = adapter_source
        self.initial = initial
        self.own_settings = own_settings
        self.plain = plain
        self.trainable = trainable
        self.adapted: Any = module if hasattr(module, "peft_config") else None
        self.base: PreTrainedModel = module.get_base_model() if self.adapted is not None else module
        settings = self.adapted.active_peft_config if self.adapted is not None else None
        self.virtual_tokens, self.embedded = 0, False
        if settings is not None and settings.is_prompt_learning:
            self.virtual_tokens = int(settings.num_virtual_tokens)
            self.embedded = settings.peft_type.value in EMBEDDED
        self.context_length = context_length(self.base, virtual_tokens=self.virtual_tokens)
        self.wide = use_onednn(module) > 0
        self.positions = AnswerPositions(self.base.get_output_embeddings())
        noise_alpha = config.model_parameters.neftune_noise_alpha
        self.noise = EmbeddingNoise(self.base.get_input_embeddings(), alpha=noise_alpha) if noise_alpha else None
        trains_ranks = isinstance(config.adapter, AdaloraAdapter) and bool(trained_parameters(module))
        self.budget = AdaloraBudget(self.adapted, config.adapter) if trains_ranks else None  # type: ignore[arg-type]
        self._grammars: dict[tuple[str, tuple[int, ...]], Grammar] = {}
        self._identity: str | None = None
        self._fingerprint: str | None = None

    # Training

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the sum of the cross-entropy over the batch's loss tokens, in float32."""
        return self.cross_entropy(module, batch, reduction="sum")

    def token_log_probs(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each of the batch's loss tokens, in float32."""
        return -self.cross_entropy(module, batch, reduction="none")

    def cross_entropy(self, module: nn.Module, batch: Batch, *, reduction: Literal["sum", "none"]) -> torch.Tensor:
        """Return the cross-entropy of the batch's loss tokens, summed or not, in float32."""
        noise = self.noise.for_rows(batch) if self.noise is not None else nullcontext()
        with noise:
            return label_cross_entropy(
                module,
                batch,
                reduction=reduction,
                positions=self.positions,
                device=self.device,
                virtual_tokens=self.virtual_tokens if self.embedded else 0,
                more_inputs=self.more_inputs(batch),
            )

    def more_inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return model inputs in addition to the ids. Raise ModelError if packed rows attend to each other."""
        if batch.position_ids_BT is not None:
            positions_BT = batch.position_ids_BT.to(self.device)
            return packed_inputs(positions_BT, isolation=self.isolation, model=self.base)
        return {"attention_mask": padding_mask(batch).to(self.device)} if self.config.trust_remote_code else {}

    @cached_property
    def isolation(self) -> Isolation:
        """How attention between packed rows is prevented."""
        return find_isolation(self)

    @cached_property
    def is_causal(self) -> bool:
        """True; raises ModelError if a token's logits depend on later tokens."""
        check_causal(self)
        return True

    def check_loss(self) -> None:
        """Raise ModelError if a row's loss depends on padding or on the tokens that it predicts."""
        logger.debug("the loss depends on nothing that follows: %s", self.is_causal)

    def check_packing(self) -> None:
        """Raise ModelError if packed rows attend to each other."""
        logger.debug("packed rows are kept apart by %s", self.isolation)

    def prepare_training(self, total_steps: int) -> None:
        """Set up what depends on the number of optimizer steps."""
        if self.budget is not None:
            self.budget.plan(total_steps)

    def auxiliary_loss(self) -> torch.Tensor | None:
        """Return AdaLoRA's weighted regularization loss; None for other adapters."""
        return self.budget.penalty() if self.budget is not None else None

    def after_step(self, step: int) -> None:
        """Update AdaLoRA's rank budget. Call it before gradients are cleared."""
        if self.budget is not None:
            self.budget.after_step(step)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Switch to training mode, with NEFTune noise if configured; restore the mode on exit."""
        before = self.module.training
        self.module.train()
        try:
            with self.noise.switched_on() if self.noise is not None else nullcontext():
                yield
        finally:
            self.module.train(before)

    # Files

    def save_checkpoint(self, folder: Path) -> None:
        """Write the trained state, bit for bit."""
        extra = self.budget.tensors() if self.budget is not None else {}
        ranks = self.budget.ranks() if self.budget is not None else None
        write_checkpoint(folder, module=self.module, initial=self.initial, extra=extra, ranks=ranks)

    def load_checkpoint(self, folder: Path) -> None:
        """Load the trained state in place.

        Raises:
            ResumeError: The checkpoint does not match the model.
        """
        tensors, notes = read_checkpoint(folder)
        first = {name.removeprefix(INITIAL): value for name, value in tensors.items() if name.startswith(INITIAL)}
        check_initial(first, self.initial, folder=folder)
        budget = {name: value for name, value in tensors.items() if name.startswith("rank_budget.")}
        trained = {name: value for name, value in tensors.items() if not name.startswith((INITIAL, "rank_budget."))}
        restore_parameters(self.module, trained, folder=folder)
        self.initial = first
        if self.budget is not None:
            self.budget.restore(budget, ranks=notes["ranks"])

    def save(self, folder: Path) -> None:
        """Write the model and its tokenizer in the layout of transformers or peft."""
        export(self, folder)

    # Inference

    @property
    def checkpoint_generation(self) -> Mapping[str, Any]:
        """Content of the checkpoint's generation_config.json."""
        settings: dict[str, Any] = self.own_settings.to_dict()
        return {key: value for key, value in settings.items() if value is not None}

    @property
    def fingerprint(self) -> str:
        """Hash of what affects outputs; equal for a trained model in memory and its saved files, unless merged.

        Trained weights are hashed by content, an unchanged base model by its files or its Hub commit.
        """
        if self._fingerprint is not None and not self.trainable:
            return self._fingerprint
        if self._identity is None:
            self._identity = identity(self)
        self._fingerprint = digest(self._identity, tensors_digest(sorted(changed_tensors(self).items())))
        return self._fingerprint

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        """Generate for each request independently of the others; keep the order."""
        if not requests:
            return []
        if options.beams > 1 and options.samples and len(requests) > 1:
            # transformers samples jointly for all rows of a batch, so a row is independent only in a batch by itself.
            return [self.generate([request], options, seed=seed)[0] for request in requests]
        groups = [list(range(len(requests)))]
        longest = max(len(request.input_ids) for request in requests)
        end = longest + max(request.max_new_tokens for request in requests)
        past = self.context_length is not None and end > self.context_length and not may_run_past_context(self.base)
        if past or options.beams > 1:
            # Rows at their limit continue until the batch ends: beams would keep growing, and learned positions run
            # out.
            limits = sorted({request.max_new_tokens for request in requests})
            groups = [[i for i, r in enumerate(requests) if r.max_new_tokens == limit] for limit in limits]
        answers: dict[int, Generated] = {}
        with ExitStack() as stack:
            stack.enter_context(seeded(row_seed(seed, requests[0].key) % 2**63, device=self.device))
            stack.enter_context(self.evaluating())
            ends = {*end_token_ids(self.base, tokenizer=self.tokenizer), *options.stop_token_ids}
            sampler = Sampler(options, ends=tuple(ends), seed=seed, device=self.device)
            for group in groups:
                self.forget_rows()
                chosen = [requests[index] for index in group]
                completions = generate_batch(
                    self.base,
                    chosen,
                    options,
                    inputs=prompt_inputs(self, chosen, beams=options.beams),
                    sampler=sampler,
                    tokenizer=self.tokenizer,
                )
                answers.update(zip(group, completions, strict=True))
        return [answers[index] for index in range(len(requests))]

    @cached_property
    def token_ids(self) -> Sequence[int]:
        """Token ids inside the embedding that are not special."""
        return ordinary_tokens(self)

    @property
    def vocabulary_size(self) -> int:
        """Number of logits per position."""
        layer = self.base.get_output_embeddings()
        return int(layer.weight.shape[0]) if layer is not None else int(self.base.config.get_text_config().vocab_size)

    def reachable_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return the new tokens that every row of a batch can reach after a prompt of this length."""
        return reachable_tokens(self, prompt_tokens=prompt_tokens, new_tokens=new_tokens)

    def generate_worst_case(
        self, rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions, shared_tokens: int = 0
    ) -> Timing:
        """Prefill prompts and generate all new tokens; restore the random state.

        See `GenerativeModel.generate_worst_case` for the arguments.
        """
        with seeded(0, device=self.device), self.evaluating():
            return generate_worst_case(
                self,
                rows,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                options=options,
                shared_tokens=shared_tokens,
            )

    def estimated_bytes(self, purpose: Purpose, rows: int, *, tokens: int, new_tokens: int, learned: int) -> int:
        """Estimate the memory of a batch in bytes from the shape of the model.

        See `GenerativeModel.estimated_bytes` for the arguments.
        """
        if purpose == "generation":
            return generation_bytes(self.base, rows, prompt_tokens=tokens, new_tokens=new_tokens)
        if purpose == "evaluation":
            return forward_bytes(self.base, rows, tokens=tokens, learned=learned)
        recomputed = isinstance(self.config.trainer, FinetuneTrainer) and self.config.trainer.gradient_checkpointing
        return training_bytes(self.base, rows, tokens=tokens, learned=learned, recomputed=recomputed)

    def time_decode_step(self, rows: int, *, length: int, options: GenerationOptions, shared_tokens: int = 0) -> float:
        """Return the seconds of one decode step; restore the random state.

        See `GenerativeModel.time_decode_step` for the arguments.
        """
        with seeded(0, device=self.device), self.evaluating():
            return time_decode_step(self, rows, length=length, options=options, shared_tokens=shared_tokens)

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Return why rows of up to `tokens` tokens cannot use slots; None if they can."""
        return unsupported(self, options, tokens=tokens) or self.slot_way.reason

    def batch_way(self, options: GenerationOptions, *, tokens: int) -> BatchWay:
        """Return which rows of up to `tokens` tokens, including new ones, can share a batch.

        Raises:
            ModelError: Beam search is configured, and the model does not support it.
        """
        way = self.short_batch_way
        if way.rows == "one row" and options.beams > 1:
            raise ModelError(f"generation.num_beams: beams go through the model together, and {way.reason}; remove it")
        if way.rows == "padded" and (limit := padding_limit(self)) is not None and tokens > limit[0]:
            return BatchWay("equal lengths", f"beyond {limit[0]:,} tokens {limit[1]}, and there are rows of {tokens:,}")
        return way

    @cached_property
    def short_batch_way(self) -> BatchWay:
        """The same, tested on short rows."""
        return find_batch_way(self)

    def forget_rows(self) -> None:
        """Clear the state that RecurrentGemma keeps between batches; a one-token prompt would continue from it."""
        for module in self.base.modules():
            if hasattr(module, "conv1d_state"):
                module.conv1d_state = None

    @cached_property
    def slot_way(self) -> SlotWay:
        """How the model supports slots, or why it does not."""
        return find_way(self)

    def grammar(self, text: str, *, ends: Sequence[int]) -> Grammar:
        """Return the compiled grammar for this tokenizer, where `ends` are the end tokens. Raise ModelError."""
        key = (text, tuple(ends))
        if key not in self._grammars:
            size = self.vocabulary_size
            self._grammars[key] = Grammar(text, tokenizer=self.tokenizer, ends=ends, size=size)
        return self._grammars[key]

    def open_slots(
        self, options: GenerationOptions, *, slots: int, tokens: int, prefix: Sequence[int], seed: int
    ) -> Slots | ScoringSlots:
        """Start continuous batching, by scoring if there are labels.

        See `GenerativeModel.open_slots` for the arguments.
        """
        if options.labels:
            return ScoringSlots(self, options, slots=slots, tokens=tokens, prefix=prefix, way=self.slot_way)
        return self.generating_slots(options, slots=slots, tokens=tokens, prefix=prefix, seed=seed)

    def generating_slots(
        self, options: GenerationOptions, *, slots: int, tokens: int, prefix: Sequence[int], seed: int
    ) -> Slots:
        """Start continuous batching that generates, even if there are labels.

        See `GenerativeModel.open_slots` for the arguments.
        """
        return Slots(self, options, slots=slots, tokens=tokens, prefix=prefix, seed=seed, way=self.slot_way)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to evaluation mode, and restore the mode on exit."""
        before = self.module.training
        self.module.eval()
        try:
            yield
        finally:
            self.module.train(before)
