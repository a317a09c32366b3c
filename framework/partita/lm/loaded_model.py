"""A loaded model with what every part of `partita.lm` reads of it: module, tokenizer, device, limits.

The parts (generation, slots, checks, export) take a `LoadedModel`, or a `TextModel` if they need what only models that
write text have. `HuggingFaceModel` and `HeadModel` extend them by the methods of `partita.lm.base.GenerativeModel`,
which call these parts.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from partita.lm.base import GenerationRequest
from partita.lm.decoding.batch_prompts import BatchPrompts
from partita.lm.decoding.grammar import Grammar
from partita.lm.heads.base import Head, fit_labels, lists_labels, other_labels, saved_labels
from partita.lm.losses.loss import AnswerPositions
from partita.lm.model_config.context_length import context_length, described_answer_context, read_config
from partita.lm.products.fast_linear import choose_products
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_trainers.batch_size.device_memory import device_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MOST_GRAMMARS = 64
"""Compiled grammars that are kept; a server compiles one for each schema that its clients send."""
EMBEDDED = ("PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT")
"""Adapters whose virtual tokens are input embeddings; other prompt learning methods fill the KV cache."""


@dataclass(eq=False, repr=False)
class LoadedModel:
    """A transformers model with its adapter, on its device."""

    module: nn.Module
    """The transformers model, or the peft model around it."""
    _: KW_ONLY
    config: Config
    tokenizer: "PreTrainedTokenizerFast"
    device: torch.device
    """Device of the weights."""
    source: str | None
    """Folder or Hub id of the base model; None for random weights."""
    adapter_source: str | None
    """Folder or Hub id of the adapter; None for a new one or none."""
    initial_adapter_tensors: dict[str, torch.Tensor]
    """Initial values of the adapter, if its init moved base weights."""
    original_generation_config: Any
    """The checkpoint's generation config; None for a model with a head."""
    saved_by_run: bool
    """Whether the base weights were saved by a run."""
    trainable: bool
    """Whether parameters require gradients."""
    head: Head | None = None
    """The head, with its labels; None for a model that writes text."""

    def __post_init__(self) -> None:
        """Derive what the parts of `partita.lm` need from the module."""
        module: Any = self.module
        self.adapted: Any = module if hasattr(module, "peft_config") else None
        self.base: PreTrainedModel = module.get_base_model() if self.adapted is not None else module
        settings = self.adapted.active_peft_config if self.adapted is not None else None
        self.virtual_tokens = 0
        self.virtual_tokens_are_embeddings = False
        if settings is not None and settings.is_prompt_learning:
            self.virtual_tokens = int(settings.num_virtual_tokens)
            self.virtual_tokens_are_embeddings = settings.peft_type.value in EMBEDDED
        self.context_length = context_length(self.base, virtual_tokens=self.virtual_tokens)
        self.answer_context = described_answer_context(self.base.config)
        free_bytes = 0 if self.trainable else self.free_bytes()
        self.has_fast_products, self.few_kernels = choose_products(
            self.module, trainable=self.trainable, free_bytes=free_bytes
        )

    def free_bytes(self) -> int:
        """Return the host memory that is free beside the weights of a model on a CPU; 0 elsewhere."""
        if self.device.type != "cpu":
            return 0
        memory = device_memory(self.device, memory_budget=self.config.trainer.memory_budget)
        # Weights that are mapped from a file take no memory before they are read. Others are counted twice.
        return memory.budget() - sum(tensor.nbytes for tensor in self.module.parameters())

    @property
    def has_new_head(self) -> bool:
        """Whether the head has random weights, because the checkpoint has none for the same labels."""
        if self.head is None or self.head.is_bare or self.adapter_source is not None:
            return False
        if self.source is None:
            return True
        try:
            described = read_config(self.config, self.source)
            listed = lists_labels(self.config)
            fit_labels(self.head, described, source=self.source, listed=listed, may_be_new=False)
        except ModelError:
            return True
        return False

    @property
    def replaced_head(self) -> str | None:
        """The sentence that the head of the checkpoint is not used, because its labels differ; None otherwise."""
        if not self.has_new_head or self.head is None or self.source is None:
            return None
        saved = saved_labels(self.head, read_config(self.config, self.source))
        return None if saved is None else other_labels(self.head, saved, source=self.source)

    @property
    def checkpoint_generation(self) -> Mapping[str, Any]:
        """Content of the checkpoint's generation_config.json; empty without one."""
        if self.original_generation_config is None:
            return {}
        settings: dict[str, Any] = self.original_generation_config.to_dict()
        return {key: value for key, value in settings.items() if value is not None}

    @property
    def adapter_method(self) -> str:
        """peft's name of the adapter's method, in lower case; "" without an adapter."""
        return self.adapted.active_peft_config.peft_type.value.lower() if self.adapted is not None else ""

    @cached_property
    def token_ids(self) -> Sequence[int]:
        """Token ids inside the embedding that are not special."""
        embedded = self.base.get_input_embeddings().weight.shape[0]
        special = set(self.tokenizer.all_special_ids)
        tokens = [token for token in range(min(len(self.tokenizer), embedded)) if token not in special]
        return tokens or list(range(embedded))

    @property
    def vocabulary_size(self) -> int:
        """Number of logits per position."""
        layer = self.base.get_output_embeddings()
        if layer is None:
            return int(self.base.config.get_text_config().vocab_size)
        # Not of its weight first: an int8 weight is computed at each access.
        return int(getattr(layer, "out_features", None) or layer.weight.shape[0])

    def without_gradients(self) -> AbstractContextManager[None]:
        """Return a context for computing answers. Where no weights are trained, it skips all work of autograd.

        Quantized weights are prepared in their first pass, and could not be trained afterwards if it were this one.
        """
        may_train = self.trainable or getattr(self.base.config, "quantization_config", None) is not None
        context: AbstractContextManager[None] = torch.no_grad() if may_train else torch.inference_mode()
        return context

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to evaluation mode, and restore the mode on exit."""
        before = self.module.training
        if any(part.training for part in self.module.modules()):  # switching sets an attribute of every part
            self.module.eval()
        try:
            yield
        finally:
            if self.module.training != before:
                self.module.train(before)


class TextModel(LoadedModel, ABC):
    """A loaded model that writes text."""

    def __post_init__(self) -> None:
        """Prepare the computation of logits only where they are needed, and the cache of grammars."""
        super().__post_init__()
        self.positions = AnswerPositions(self.base.get_output_embeddings())
        self._grammar_lock = threading.Lock()
        self._grammars: dict[tuple[str, tuple[int, ...]], Grammar] = {}

    @abstractmethod
    def batch_prompts(self, requests: Sequence[GenerationRequest], *, beams: int) -> BatchPrompts:
        """Return prompts of any lengths as one batch for `generate` of the base model."""

    def grammar(self, text: str, *, ends: Sequence[int]) -> Grammar:
        """Return the compiled grammar for this tokenizer, where `ends` are the end tokens. Raise ModelError."""
        key = (text, tuple(ends))
        with self._grammar_lock:  # the threads of a server compile grammars too
            if key not in self._grammars:
                if len(self._grammars) >= MOST_GRAMMARS:
                    del self._grammars[next(iter(self._grammars))]
                size = self.vocabulary_size
                self._grammars[key] = Grammar(text, tokenizer=self.tokenizer, ends=ends, size=size)
            return self._grammars[key]

    def forget_rows(self) -> None:
        """Clear the state that RecurrentGemma keeps between batches; a one-token prompt would continue from it."""
        for module in self.base.modules():
            if hasattr(module, "conv1d_state"):
                module.conv1d_state = None
