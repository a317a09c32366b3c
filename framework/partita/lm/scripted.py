"""A language model with scripted answers, for tests without files, network or waiting.

It implements `GenerativeModel`. It learns token frequencies: one bias per token.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from partita.lm.base import PADDED, AnsweringSlots, BatchSupport, Generated, GenerationOptions, GenerationRequest
from partita.tokenizers.load import byte_tokenizer
from partita_schema.errors import ResumeError
from partita_trainers.base import Batch
from partita_trainers.batch_size.probe import Purpose, Timing

Answer = str | Exception
"""The answer to a prompt, or an error to raise."""


class TokenFrequencies(nn.Module):
    """Logits independent of the prefix: [B, T] ids to [B, T, V]."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.bias_V = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, input_ids_BT: torch.Tensor) -> torch.Tensor:
        return self.bias_V.expand(*input_ids_BT.shape, -1)


class ScriptedModel:
    """Answers prompts by a function or a table from prompt text to answer.

    An exception in the table, or raised by the function, fails the whole batch. A prompt that is not in the table
    raises LookupError. `calls` and `rows` count generate calls and the rows in them.
    """

    def __init__(
        self, answer: Callable[[str], str] | Mapping[str, Answer], *, context_length: int | None = None
    ) -> None:
        self.answer = answer
        self.context_length = context_length
        self.answer_context = None
        self.tokenizer = byte_tokenizer(max_length=context_length)
        self.module: nn.Module = TokenFrequencies(len(self.tokenizer))
        self.device = torch.device("cpu")
        self.calls = 0
        self.rows = 0

    @property
    def fingerprint(self) -> str:
        """Hash of the biases."""
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in self.module.parameters())
        return f"scripted-{hashlib.sha256(weights).hexdigest()[:16]}"

    def loss(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the sum of the cross-entropy over the batch's loss tokens."""
        return self.cross_entropy(module, batch, reduction="sum")

    def token_log_probs(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each of the batch's loss tokens."""
        return -self.cross_entropy(module, batch, reduction="none")[batch.labels_BT[:, 1:].reshape(-1) != -100]

    def cross_entropy(self, module: nn.Module, batch: Batch, *, reduction: Literal["sum", "none"]) -> torch.Tensor:
        """Return the cross-entropy of the tokens after the first of each sequence, 0 without a label, summed or not."""
        logits = module(batch.input_ids_BT)[:, :-1].reshape(-1, len(self.tokenizer))
        labels = batch.labels_BT[:, 1:].reshape(-1)
        return nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction=reduction)

    def auxiliary_loss(self) -> torch.Tensor | None:
        """Return None: there is no auxiliary loss."""
        return None

    def check_loss(self) -> None:
        """Do nothing: there is no padding."""

    def check_packing(self) -> None:
        """Do nothing: tokens do not attend to each other."""

    def prepare_training(self, total_steps: int) -> None:
        """Do nothing: the number of steps has no effect."""

    def after_step(self, step: int) -> None:
        """Do nothing after an optimizer step."""

    @contextmanager
    def training(self) -> Iterator[None]:
        """Switch to training mode, and restore the mode on exit."""
        before = self.module.training
        self.module.train()
        try:
            yield
        finally:
            self.module.train(before)

    def save_checkpoint(self, folder: Path) -> None:
        """Write the biases."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: value.detach() for name, value in self.module.named_parameters()}, folder / "model.safetensors"
        )

    def load_checkpoint(self, folder: Path) -> None:
        """Load the biases. Raise ResumeError if they are missing."""
        from safetensors.torch import load_file

        file = folder / "model.safetensors"
        if not file.exists():
            raise ResumeError(f"{file} is missing; the checkpoint is not complete")
        self.module.load_state_dict(load_file(file))

    def save(self, folder: Path) -> None:
        """Write the biases, a small config and the tokenizer."""
        self.save_checkpoint(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "scripted"}), encoding="utf-8")
        self.tokenizer.save_pretrained(folder)

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        """Return the scripted answers, cut as a real model would cut them."""
        self.calls += 1
        self.rows += len(requests)
        return [self.generate_row(request, options) for request in requests]

    def batch_support(self, options: GenerationOptions, *, tokens: int) -> BatchSupport:
        """Return that rows of any length can share a batch."""
        return PADDED

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Return that slots are not supported."""
        return "the answers are scripted"

    def open_slots(
        self, options: GenerationOptions, *, slots: int, tokens: int, prefix: Sequence[int], seed: int
    ) -> AnsweringSlots:
        """Raise NotImplementedError: slots are not supported; see `GenerativeModel.open_slots`."""
        raise NotImplementedError("the answers are scripted")

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context manager without effect: there is no mode."""
        return nullcontext()

    @property
    def checkpoint_generation(self) -> Mapping[str, Any]:
        """Empty: there is no checkpoint."""
        return {}

    @property
    def token_ids(self) -> Sequence[int]:
        """Token ids that are not special."""
        special = set(self.tokenizer.all_special_ids)
        return [token for token in range(len(self.tokenizer)) if token not in special]

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, including special ones."""
        return len(self.tokenizer)

    def reachable_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return the new tokens that fit the context."""
        return (
            new_tokens if self.context_length is None else max(1, min(new_tokens, self.context_length - prompt_tokens))
        )

    def generate_worst_case(
        self, rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions, shared_tokens: int = 0
    ) -> Timing:
        """Return a constant time per row; see `GenerativeModel.generate_worst_case`."""
        return Timing(prefill_seconds=1e-6 * rows, decode_seconds=1e-6)

    def estimated_bytes(self, purpose: Purpose, rows: int, *, tokens: int, new_tokens: int, loss_tokens: int) -> int:
        """Return one byte per token; see `GenerativeModel.estimated_bytes`."""
        return rows * (tokens + new_tokens)

    def time_decode_step(self, rows: int, *, length: int, options: GenerationOptions, shared_tokens: int = 0) -> float:
        """Return a constant time; see `GenerativeModel.time_decode_step`."""
        return 1e-6

    def generate_row(self, request: GenerationRequest, options: GenerationOptions) -> Generated:
        """Return the completion of one row. Raise ValueError if it does not fit the context."""
        needed = len(request.input_ids) + request.max_new_tokens
        if self.context_length is not None and needed > self.context_length:
            raise ValueError(f"{needed} tokens do not fit the context of {self.context_length}")
        answer = self.answer_to(self.tokenizer.decode(list(request.input_ids), skip_special_tokens=True))
        ids: list[int] = self.tokenizer.encode(answer, add_special_tokens=False)
        finished = len(ids) < request.max_new_tokens
        ids = ids[: request.max_new_tokens]
        text = self.tokenizer.decode(ids)
        cut = min((start for stop in options.stop if (start := text.find(stop)) >= 0), default=None)
        reason: Any = "stop" if finished or cut is not None else "length"
        return Generated(ids=tuple(ids), text=text if cut is None else text[:cut], finish_reason=reason)

    def answer_to(self, prompt: str) -> str:
        """Return the scripted answer to a prompt, or raise the scripted error."""
        if not isinstance(self.answer, Mapping):
            return self.answer(prompt)
        if prompt not in self.answer:
            raise LookupError(f"no answer is scripted for the prompt {prompt!r}")
        answer = self.answer[prompt]
        if isinstance(answer, Exception):
            raise answer
        return answer
