"""What the framework needs of a language model beyond training: a tokenizer, generation, an identity."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from partita_trainers.base import LanguageModel
from partita_trainers.batch_size.probe import Purpose, Timing

if TYPE_CHECKING:
    import torch


SHORTEST_PREFIX = 8
"""Tokens that prompts begin with alike from which on they are read apart."""


class BatchWay(NamedTuple):
    """Which rows a model can answer together in one batch, so that each is answered as it would be alone."""

    rows: Literal["padded", "equal lengths", "one row"] = "padded"
    """Rows of any lengths, with padding; rows of equal length; or one row at a time."""
    reason: str | None = None
    """Why not rows of any lengths."""

    def describe(self, reason: str) -> str:
        """Say how rows are answered that cannot be in slots for this reason."""
        how = {
            "padded": "in sorted batches",
            "equal lengths": "in batches of prompts of equal length",
            "one row": "one row at a time",
        }
        return f"{how[self.rows]}, not in slots: {'; '.join(filter(None, (reason, self.reason)))}"


PADDED = BatchWay()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One row to generate for."""

    input_ids: Sequence[int]
    """The prompt, at least one token."""
    max_new_tokens: int
    """Tokens generated at most; the prompt and they fit the context."""
    key: bytes = field(default=b"", kw_only=True)
    """What its random numbers follow from, next to the seed."""


@dataclass(frozen=True, slots=True)
class SlotRequest(GenerationRequest):
    """One row to generate for among others that come and go."""

    row: int
    """Names the row."""
    keep: bool = False
    """Whether its keys and values stay when it has ended, for a row of the same name that goes on from there."""


@dataclass(frozen=True, slots=True)
class Label:
    """An answer to choose."""

    text: str
    """What it says."""
    ids: tuple[int, ...]
    """Its tokens as they stand behind a prompt, without the token that ends it."""


@dataclass(frozen=True)
class GenerationOptions:
    """How a batch is generated, resolved from the file: nothing in it depends on rows."""

    arguments: dict[str, Any]
    """Keyword arguments of transformers' GenerationConfig, without lengths and stop strings."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end an answer, next to the model's own."""
    logprobs: bool = False
    """Whether answers come with their log probability."""
    slots: bool = True
    """Whether rows may be answered in slots."""
    grammar: str | None = None
    """What answers are held to, in the words of llguidance."""
    labels: tuple[Label, ...] = ()
    """Answers of which the most probable is chosen; where there are any, nothing is generated."""

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn."""
        return bool(self.arguments.get("do_sample"))

    @property
    def beams(self) -> int:
        """Beams of beam search; 1 for none."""
        return int(self.arguments.get("num_beams") or 1)

    @property
    def form(self) -> str:
        """A hash of what answers are held to; empty where that is nothing."""
        held = repr((self.grammar, self.labels))
        return hashlib.sha256(held.encode()).hexdigest()[:16] if self.grammar or self.labels else ""

    @property
    def free(self) -> "GenerationOptions":
        """The same for texts that are held to nothing."""
        return replace(self, grammar=None, labels=())


@dataclass(frozen=True)
class Generated:
    """What was generated for one row."""

    ids: tuple[int, ...]
    """New tokens, without the end-of-text token and without padding; tokens of a stop text may be among them."""
    text: str
    """The new tokens as text, special tokens left out, cut before a stop text."""
    finish_reason: Literal["stop", "length"]
    """stop: the model ended it or a stop text did; length: the limit was reached."""
    logprob: float | None = None
    """Natural logarithm of the probability of all its tokens, the one that ended it included; None if not asked."""
    reported_num_tokens: int | None = None
    """Number of new tokens where a server tells only that, and `ids` is empty; None where those are known."""
    scores: Mapping[str, float] | None = None
    """The log probability of each label, where one was chosen by it."""

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        return len(self.ids) if self.reported_num_tokens is None else self.reported_num_tokens


@dataclass(frozen=True)
class SlotAnswer:
    """What became of a row: an answer, or an error."""

    request: SlotRequest
    generated: Generated | None
    error: str | None = None


class AnsweringSlots(Protocol):
    """Rows that are answered at the same time, and come and go one by one."""

    @property
    def live(self) -> Sequence[Any]:
        """Rows that are being answered, each with its `request` and its `new` tokens so far."""

    def readable(self, tokens: int, most: int) -> int:
        """How many prompts of up to so many tokens after the prefix are best read in one pass, 1 to `most`."""

    def read_length(self, tokens: int) -> int:
        """Tokens that are read of each prompt, with its padding, where the longest has so many after the prefix."""

    def admit(self, requests: Sequence[SlotRequest]) -> list[SlotAnswer]:
        """Read prompts in one pass and choose the first token of each; answers that have ended with it."""

    def step(self) -> list[SlotAnswer]:
        """Another token of every live row; answers that have ended with it."""

    def unread(self, request: SlotRequest) -> int:
        """Tokens of a prompt that are to be read: those behind the prefix, and behind what its row has kept of it."""

    def forget(self, row: int) -> None:
        """What a row has kept is needed no longer."""

    def close(self) -> None:
        """Leave the model as it was."""


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

    @property
    def checkpoint_generation(self) -> Mapping[str, Any]:
        """What the checkpoint's generation_config.json says; empty where there is none."""

    def check_loss(self) -> None:
        """Raises ModelError where the loss of a row would depend on padding, or on the tokens that it predicts."""

    def check_packing(self) -> None:
        """Raises ModelError where rows packed in one line would see each other."""

    def reachable_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        """New tokens that any row of a batch reaches beside a prompt of that length: fewer where positions end."""

    def generate_worst_case(
        self, rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions, shared_tokens: int = 0
    ) -> Timing:
        """Read `rows` prompts of that length, which begin alike, and generate up to the last token, for measuring.

        Raises what it meets.
        """

    def estimated_bytes(self, purpose: Purpose, rows: int, *, tokens: int, new_tokens: int, learned: int) -> int:
        """What a batch should take by a formula, of rows of `tokens` with `learned` labels or `new_tokens` to come."""

    def time_decode_step(self, rows: int, *, length: int, options: GenerationOptions, shared_tokens: int = 0) -> float:
        """Seconds of a decode step with `length` tokens behind it, which begin alike; raises what it meets."""

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes outputs: base, revision, dtype, quantization, adapter, trained weights."""

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        """Answers in order, in one left-padded batch, no gradients, evaluation mode.

        What is sampled follows from `seed` and the key of each request, not from the batch.

        The rows are such as `batch_way` allows together. The module's mode and the global random state are as before
        afterwards.
        """

    def batch_way(self, options: GenerationOptions, *, tokens: int) -> BatchWay:
        """Which rows of up to `tokens`, new ones included, `generate` can be given together.

        Raises ModelError where the model cannot keep to these options.
        """

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Why rows of up to so many tokens cannot be answered in slots by these options; None where they can."""

    def open_slots(
        self, options: GenerationOptions, *, slots: int, tokens: int, prefix: Sequence[int], seed: int
    ) -> AnsweringSlots:
        """Slots for rows of up to `tokens` each, which all begin with `prefix` and go on after it.

        Not where there is a reason against them. The model is in evaluation mode while they are used.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Evaluation mode inside, the mode before it afterwards."""
