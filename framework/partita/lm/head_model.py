"""A transformers model with a head, which predicts a value with one forward pass.

It implements `partita.lm.base.GenerativeModel`, so that configs, rows, journals, metrics and saved models work as for
models that write text: an answer is the text of the predicted value.

Shapes: B rows of a batch, T tokens of the longest.
"""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn

from partita.lm.base import (
    PADDED,
    AnsweringSlots,
    BatchSupport,
    Generated,
    GenerationOptions,
    GenerationRequest,
)
from partita.lm.decoding.batch_prompts import right_padded
from partita.lm.devices import seeded
from partita.lm.heads.base import Head
from partita.lm.heads.embedding import EmbeddingHead, split_texts
from partita.lm.marks import without_marks
from partita.lm.model_config.memory_estimate import forward_bytes, training_bytes
from partita.lm.trained_model import TrainedModel
from partita.lm.transformers_internals import padding_known
from partita_schema.errors import ModelError
from partita_schema.sections.trainer import FinetuneTrainer
from partita_trainers.base import Batch
from partita_trainers.batch_size.clock import now
from partita_trainers.batch_size.probe import Purpose, Timing
from partita_trainers.device_copies import to_device
from partita_trainers.training_probe import worst_batch

NO_SLOTS = "the model has a head"


def token_types(batch: Batch) -> torch.Tensor:
    """Return 1 for the tokens from the loss token of a row to its end, and 0 for others, int64 [B, T]."""
    is_loss_BT = batch.labels_BT != -100
    return is_loss_BT.long().cumsum(1).clamp(max=1) * batch.attention_mask()


class HeadModel(TrainedModel):
    """Implements `partita.lm.base.GenerativeModel` for a model with a head; created by `load_model`."""

    @property
    def own_head(self) -> Head:
        """The head."""
        assert self.head is not None, "load_model gives a HeadModel its head"
        return self.head

    # Training

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the sum of the head's losses over the batch's loss tokens, in float32."""
        return self.losses(module, batch).sum()

    def token_log_probs(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the negative loss of each of the batch's loss tokens, in float32."""
        return -self.losses(module, batch)

    def losses(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of each of the batch's loss tokens, in float32."""
        noise = self.noise.for_rows(batch) if self.noise is not None else nullcontext()
        with noise:
            return self.own_head.losses(self.forward(module, batch), batch)

    def embeddings(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the vectors of the texts of a batch, row by row, of length 1, float32 [N, D]."""
        head, texts = self.own_head, split_texts(batch)
        assert isinstance(head, EmbeddingHead), "an output of type embedding has this head"
        noise = self.noise.for_rows(texts) if self.noise is not None else nullcontext()
        with noise:
            return head.vectors(self.forward(module, texts), texts)

    def forward(self, module: nn.Module, batch: Batch) -> Any:
        """Run the model and return its output."""
        options = {"use_cache": False} if self.accepts_use_cache else {}
        with padding_known(padded=bool((batch.lengths_B < batch.input_ids_BT.shape[1]).any())):
            return module(**self.inputs(batch), **options)

    def inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the arguments of the model, on its device."""
        inputs = {"input_ids": batch.input_ids_BT, "attention_mask": batch.attention_mask()}
        if self.reads_token_types:
            inputs["token_type_ids"] = token_types(batch)
        return {name: to_device(tensor, self.device) for name, tensor in inputs.items()}

    @cached_property
    def accepts_use_cache(self) -> bool:
        """Whether `forward` has the argument `use_cache`; decoders would fill a cache by default."""
        return "use_cache" in inspect.signature(self.base.forward).parameters

    @cached_property
    def reads_token_types(self) -> bool:
        """Whether rows are two texts that the model distinguishes by token type ids, as its tokenizer does."""
        named = "token_type_ids" in self.tokenizer.model_input_names
        if not self.own_head.reads_pairs or not named or getattr(self.base.config, "type_vocab_size", 0) < 2:
            return False
        return any(self.tokenizer.backend_tokenizer.encode("a", "a").type_ids)

    def check_loss(self) -> None:
        """Do nothing: padding is masked, and no token is predicted."""

    def check_packing(self) -> None:
        """Raise ModelError: a head reads one row per sequence."""
        raise ModelError("a model with a head reads one row per sequence; write data.batching: {type: bucket}")

    # Inference

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        """Predict the value of each request in one batch, padded on the right; keep the order."""
        if not requests:
            return []
        batch = self.prompts(requests)
        with self.evaluating(), torch.inference_mode():
            return self.own_head.answers(self.forward(self.module, batch), batch)

    def prompts(self, requests: Sequence[GenerationRequest]) -> Batch:
        """Return requests as a batch whose loss tokens are the marked ones, or else the last ones of the rows."""
        input_ids_BT, lengths_B = right_padded(requests, pad_token_id=self.tokenizer.pad_token_id)
        input_ids_BT, is_loss_BT = without_marks(input_ids_BT)
        is_loss_BT[torch.arange(len(requests)), lengths_B - 1] |= ~is_loss_BT.any(1)
        labels_BT = torch.where(is_loss_BT, 0, -100)
        targets_NK = torch.zeros(int(is_loss_BT.sum()), self.own_head.target_size)
        keys = tuple(map(str, range(len(requests))))
        return Batch(input_ids_BT, labels_BT, lengths_B, keys, targets_NK=targets_NK)

    def batch_support(self, options: GenerationOptions, *, tokens: int) -> BatchSupport:
        """Return that rows of any length can share a batch: padding is masked."""
        return PADDED

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Return that a head needs no slots: a row is finished after one forward pass."""
        return NO_SLOTS

    def open_slots(
        self, options: GenerationOptions, *, slots: int, tokens: int, prefix: Sequence[int], seed: int
    ) -> AnsweringSlots:
        """Raise AssertionError: `why_no_slots` gives a reason.

        See `GenerativeModel.open_slots` for the arguments.
        """
        raise AssertionError(NO_SLOTS)

    @property
    def vocabulary_size(self) -> int:
        """Number of outputs of the head."""
        return self.own_head.size

    # Measurements for batch sizes

    def reachable_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return 0: no token is generated."""
        return 0

    def generate_worst_case(
        self, rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions, shared_tokens: int = 0
    ) -> Timing:
        """Run one forward pass over prompts of this length, for measuring; there is no decode step.

        See `GenerativeModel.generate_worst_case` for the arguments.
        """
        batch = worst_batch(rows, tokens=prompt_tokens, loss_tokens=1, token_ids=self.token_ids)
        started = now(self.device)
        with seeded(0, device=self.device), self.evaluating(), torch.inference_mode():
            self.forward(self.module, batch)
        return Timing(prefill_seconds=now(self.device) - started)

    def estimated_bytes(self, purpose: Purpose, rows: int, *, tokens: int, new_tokens: int, loss_tokens: int) -> int:
        """Estimate the memory of a batch in bytes from the shape of the model; there are no logits over a vocabulary.

        See `GenerativeModel.estimated_bytes` for the arguments.
        """
        if purpose != "training":
            return forward_bytes(self.base, rows, tokens=tokens, loss_tokens=0)
        recomputed = isinstance(self.config.trainer, FinetuneTrainer) and self.config.trainer.gradient_checkpointing
        return training_bytes(self.base, rows, tokens=tokens, loss_tokens=0, recomputed=recomputed)

    def time_decode_step(self, rows: int, *, length: int, options: GenerationOptions, shared_tokens: int = 0) -> float:
        """Return 0: there is no decode step.

        See `GenerativeModel.time_decode_step` for the arguments.
        """
        return 0.0
