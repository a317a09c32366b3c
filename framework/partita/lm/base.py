"""What the framework needs of a language model beyond training: a tokenizer, generation, an identity."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from partita_trainers.base import LanguageModel
from partita_trainers.batch_size.trial import Purpose, Timing

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GenerationRequest:
    """One row to generate for."""

    input_ids: Sequence[int]
    """The prompt, at least one token."""
    max_new_tokens: int
    """Tokens generated at most; the prompt and they fit the context."""


@dataclass(frozen=True)
class GenerationOptions:
    """How a batch is generated, resolved from the file: nothing in it depends on rows."""

    arguments: dict[str, Any]
    """Keyword arguments of transformers' GenerationConfig, without lengths and stop strings."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an answer, next to the model's own."""


@dataclass(frozen=True)
class Generated:
    """What was generated for one row."""

    ids: tuple[int, ...]
    """New tokens, without the end-of-text token and without padding; tokens of a stop text may be among them."""
    text: str
    """The new tokens as text, special tokens left out, cut before a stop text."""
    finish_reason: Literal["stop", "length"]
    """stop: the model ended it or a stop text did; length: the limit was reached."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the framework uses."""

    eos_token_id: int | None
    pad_token_id: int | None
    chat_template: Any


class GenerativeModel(LanguageModel, Protocol):
    """A language model as the framework holds it."""

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer (fast), with a pad token."""

    @property
    def device(self) -> "torch.device":
        """Where the weights are."""

    @property
    def context_length(self) -> int | None:
        """Longest sequence in tokens, virtual tokens of an adapter already taken off; None for no limit."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Tokens that mean text: within the embedding, and not special."""

    @property
    def vocabulary_size(self) -> int:
        """Logits of a position."""

    def check_packing(self) -> None:
        """Raises ModelError where rows packed in one line would see each other."""

    def reachable_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        """New tokens that any row of a batch reaches beside a prompt of that length: fewer where positions end."""

    def generate_worst_case(
        self, rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions
    ) -> Timing:
        """Read `rows` prompts of that length and generate up to the last token, for measuring; raises what it meets."""

    def estimated_bytes(self, purpose: Purpose, rows: int, *, tokens: int, new_tokens: int, learned: int) -> int:
        """What a batch should take by a formula, of rows of `tokens` with `learned` labels or `new_tokens` to come."""

    def time_decode_step(self, rows: int, *, length: int, options: GenerationOptions) -> float:
        """Seconds of one decode step with `length` tokens behind it; raises what it meets."""

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes outputs: base, revision, dtype, quantization, adapter, trained weights."""

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        """Answers in order, in one left-padded batch, no gradients, evaluation mode; sampling seeded by `seed` alone.

        The module's mode and the global random state are as before afterwards.
        """
