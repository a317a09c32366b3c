"""The model interface of the framework beyond training: tokenizer, generation, fingerprint."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from partita_trainers.base import LanguageModel
from partita_trainers.batch_size.probe import Purpose, Timing

if TYPE_CHECKING:
    import torch


SHORTEST_PREFIX = 8
"""Smallest number of tokens that several prompts begin with and that are prefilled once."""
LEAST_TEMPERATURE = 1e-5
"""Decoding is greedy below this temperature, as in vLLM: scores that are divided by less are infinite."""


class BatchSupport(NamedTuple):
    """Which rows a model can generate for in one batch without changing the output of any row."""

    rows: Literal["padded", "equal lengths", "one row"] = "padded"
    """padded: rows of any length, with padding; equal lengths: rows of one length; one row: batch size 1."""
    reason: str | None = None
    """Why rows of different lengths cannot share a batch."""
    scores_labels: bool = False
    """Whether `generate` scores labels."""

    def describe(self, reason: str) -> str:
        """Describe how rows are batched, given the reason why slots cannot be used."""
        how = {
            "padded": "in sorted batches",
            "equal lengths": "in batches of prompts of equal length",
            "one row": "one row at a time",
        }
        return f"{how[self.rows]}, not in slots: {'; '.join(filter(None, (reason, self.reason)))}"


PADDED = BatchSupport()


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """The context of answers where prompts are not part of it: the decoder's of an encoder-decoder."""

    length: int | None = None
    """Maximum tokens of an answer; None without limit."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One row to generate for."""

    input_ids: Sequence[int]
    """The prompt, at least one token."""
    max_new_tokens: int
    """Maximum number of new tokens; prompt and new tokens fit the context."""
    key: bytes = field(default=b"", kw_only=True)
    """Seeds the random numbers of this row, together with the global seed."""
    encoder_ids: Sequence[int] | None = field(default=None, kw_only=True)
    """What the encoder reads, where `input_ids` is the beginning of the decoder's sequence; None without an encoder."""
    constraint_index: int = field(default=0, kw_only=True)
    """Index of its constraints in `GenerationOptions.constraints`, if there are any."""


@dataclass(frozen=True, slots=True)
class SlotRequest(GenerationRequest):
    """One row of continuous batching."""

    row: int
    """Identifies the row."""
    keep: bool = False
    """Whether its KV cache is kept when it ends, for a later request with the same `row`."""
    shared: int | None = None
    """Names its prompt if other requests have the same one, which may then be computed once for all of them."""
    options: "GenerationOptions | None" = None
    """Its own settings; None for those of the slots."""
    prefix_group: int | None = None
    """Number of its prefix group, whose prompts may begin like its own: what is cached of them, or of earlier requests
    of the row, is copied or taken over. None without one."""

    @property
    def reuses_cache(self) -> bool:
        """Whether a part of its KV cache may come from an earlier pass, in which sums can have other last digits."""
        return self.keep or self.prefix_group is not None


@dataclass(frozen=True, slots=True)
class Label:
    """An answer to choose from."""

    text: str
    """The text of the answer."""
    ids: tuple[int, ...]
    """Its tokens as they follow a prompt, without the end token."""


@dataclass(frozen=True)
class Constraint:
    """Constraints of one of several answers that follow one another."""

    grammar: str | None = None
    """Grammar that constrains the answer, in the syntax of llguidance."""
    labels: tuple[Label, ...] = ()
    """Answers of which the most probable is chosen."""


@dataclass(frozen=True)
class GenerationOptions:
    """Generation settings of a run, resolved from the config; independent of rows."""

    arguments: dict[str, Any]
    """Keyword arguments of transformers' GenerationConfig, without lengths and stop strings."""
    stop: tuple[str, ...] = ()
    """Stop strings."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop token ids, in addition to those of the model."""
    logprobs: bool = False
    """Whether completions include their log probability."""
    top_logprobs: int | None = None
    """How many of the most probable tokens are reported at each position; None to report no position."""
    slots: bool = True
    """Whether continuous batching may be used."""
    kv_cache: Literal["auto", "slots", "paged"] = "auto"
    """Layout of the KV cache in continuous batching."""
    grammar: str | None = None
    """Grammar that constrains the output, in the syntax of llguidance."""
    labels: tuple[Label, ...] = ()
    """Answers of which the most probable is chosen. If there are any, nothing is generated."""
    constraints: tuple[Constraint, ...] = ()
    """Constraints of requests, each of which names its own, in place of `grammar` and `labels`."""

    @property
    def do_sample(self) -> bool:
        """Whether tokens are sampled; below `LEAST_TEMPERATURE`, they are not."""
        temperature = self.arguments.get("temperature")
        return bool(self.arguments.get("do_sample")) and (temperature is None or temperature >= LEAST_TEMPERATURE)

    @property
    def beams(self) -> int:
        """Number of beams; 1 without beam search."""
        return int(self.arguments.get("num_beams") or 1)

    @property
    def constraint_hash(self) -> str:
        """Hash of the output constraints (grammars and labels); empty without constraints."""
        held = repr((self.grammar, self.labels, *self.constraints))
        return hashlib.sha256(held.encode()).hexdigest()[:16] if self.is_constrained or self.scores_labels else ""

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar constrains answers."""
        return self.grammar is not None or any(one.grammar is not None for one in self.constraints)

    @property
    def scores_labels(self) -> bool:
        """Whether answers are chosen among labels."""
        return bool(self.labels) or any(one.labels for one in self.constraints)

    def with_constraint(self, index: int) -> "GenerationOptions":
        """Return the options of requests with this constraint, which becomes `grammar` and `labels`."""
        if not self.constraints:
            return self
        constraint = self.constraints[index]
        return replace(self, grammar=constraint.grammar, labels=constraint.labels, constraints=())

    @property
    def unconstrained(self) -> "GenerationOptions":
        """The same options without grammars and labels."""
        return replace(self, grammar=None, labels=(), constraints=())


class TokenLogprob(NamedTuple):
    """A new token with its log probability, and the most probable tokens at its position."""

    token: int
    logprob: float
    """Natural logarithm of its probability before sampling settings."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with their log probabilities, the most probable first."""


@dataclass(frozen=True)
class Generated:
    """The completion of one row."""

    ids: tuple[int, ...]
    """New tokens without end token and padding; may include tokens of a stop string."""
    text: str
    """New tokens decoded without special tokens, cut before a stop string."""
    finish_reason: Literal["stop", "length"]
    """stop: an end token or a stop string; length: the token limit."""
    logprob: float | None = None
    """Natural log probability of all its tokens, including the end token; None if not requested."""
    reported_num_tokens: int | None = None
    """Number of new tokens where a server reports only that and `ids` is empty; otherwise None."""
    scores: Mapping[str, Any] | None = None
    """Log probability of each label, if labels were scored; for several answers, by output."""
    token_logprobs: tuple[TokenLogprob, ...] = ()
    """Each token of `ids` with its log probability, if `top_logprobs` is set."""

    @classmethod
    def most_probable(cls, labels: Sequence[str], scores: Sequence[float], *, logprobs: bool = False) -> "Generated":
        """Return the most probable label, the first one of a tie, with the scores of all.

        Args:
            labels: The labels.
            scores: Log probability of each label.
            logprobs: Whether the log probability of the answer was requested.
        """
        best = max(range(len(scores)), key=lambda index: scores[index])
        by_label = dict(zip(labels, scores, strict=True))
        return cls((), labels[best], "stop", scores[best] if logprobs else None, scores=by_label)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        return len(self.ids) if self.reported_num_tokens is None else self.reported_num_tokens


@dataclass(frozen=True)
class SlotAnswer:
    """The result for a row: a completion or an error."""

    request: SlotRequest
    generated: Generated | None
    error: str | None = None


class AnsweringSlots(Protocol):
    """Continuous batching: rows share the batch, and each joins and leaves on its own."""

    @property
    def live(self) -> Sequence[Any]:
        """Active rows, each with its `request` and its `new` tokens so far."""

    def prompts_per_pass(self, tokens: int, most: int) -> int:
        """Return how many prompts to prefill in one pass, from 1 to `most`.

        Args:
            tokens: Length of the longest prompt after the prefix.
            most: Upper limit of the result.
        """

    def padded_length(self, tokens: int) -> int:
        """Return the padded prefill length per prompt if the longest has `tokens` after the prefix."""

    def admit(self, requests: Sequence[SlotRequest]) -> list[SlotAnswer]:
        """Prefill prompts in one pass and choose the first token of each; return rows that ended with it."""

    def step(self) -> list[SlotAnswer]:
        """Generate one token for every active row; return rows that ended with it."""

    def uncached_tokens(self, request: SlotRequest) -> int:
        """Return the number of prompt tokens to prefill, without the prefix and the row's cached tokens."""

    def forget(self, row: int) -> None:
        """Release the KV cache that is kept for a row."""

    def cancel(self, rows: Collection[int]) -> None:
        """Stop active rows and free their slots; rows that are not active are ignored."""

    def close(self) -> None:
        """Restore the model to its previous state."""


class GenerativeModel(LanguageModel, Protocol):
    """The interface of a language model in the framework."""

    @property
    def tokenizer(self) -> Any:
        """A fast transformers tokenizer with a pad token."""

    @property
    def device(self) -> "torch.device":
        """Device of the weights."""

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of a prompt and its answer, without virtual tokens of an adapter; None without limit.

        With an `answer_context`, the maximum tokens of a prompt alone.
        """

    @property
    def answer_context(self) -> AnswerContext | None:
        """The context of answers; None if prompt and answer share `context_length`."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Token ids inside the embedding that are not special."""

    @property
    def vocabulary_size(self) -> int:
        """Number of logits per position."""

    @property
    def checkpoint_generation(self) -> Mapping[str, Any]:
        """Content of the checkpoint's generation_config.json; empty without one."""

    def check_loss(self) -> None:
        """Raise ModelError if a row's loss depends on padding or on the tokens that it predicts."""

    def check_packing(self) -> None:
        """Raise ModelError if packed rows attend to each other."""

    def reachable_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        """Return the new tokens that every row of a batch can reach after a prompt of this length."""

    def generate_worst_case(
        self, rows: int, *, prompt_tokens: int, new_tokens: int, options: GenerationOptions, shared_tokens: int = 0
    ) -> Timing:
        """Prefill prompts with a shared beginning and generate all new tokens, for measuring.

        Exceptions, such as out of memory, are passed on.

        Args:
            rows: Batch size.
            prompt_tokens: Length of each prompt in tokens.
            new_tokens: New tokens per row.
            options: Generation settings.
            shared_tokens: Number of prompt tokens shared by all rows.
        """

    def estimated_bytes(self, purpose: Purpose, rows: int, *, tokens: int, new_tokens: int, loss_tokens: int) -> int:
        """Estimate the memory of a batch in bytes.

        Args:
            purpose: What the batch is for.
            rows: Batch size.
            tokens: Length of each row in tokens.
            new_tokens: New tokens per row.
            loss_tokens: Loss tokens per row.
        """

    def time_decode_step(self, rows: int, *, length: int, options: GenerationOptions, shared_tokens: int = 0) -> float:
        """Return the seconds of one decode step; exceptions are passed on.

        Args:
            rows: Batch size.
            length: Tokens in the KV cache of each row.
            options: Generation settings.
            shared_tokens: Number of cached tokens shared by all rows.
        """

    @property
    def fingerprint(self) -> str:
        """Hash of all that affects outputs: base, revision, dtype, quantization, adapter, trained weights."""

    def generate(
        self, requests: Sequence[GenerationRequest], options: GenerationOptions, *, seed: int
    ) -> list[Generated]:
        """Generate in one left-padded batch, without gradients, in evaluation mode; keep the order of requests.

        Sampling depends on `seed` and on the key of each request, not on the batch. `batch_support` says which rows
        may be in one call. The training mode and the global random state are restored.
        """

    def batch_support(self, options: GenerationOptions, *, tokens: int) -> BatchSupport:
        """Return which rows of up to `tokens` tokens, including new ones, `generate` accepts in one batch.

        Raises:
            ModelError: The model does not support these options.
        """

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Return why rows of up to `tokens` tokens cannot use slots; None if they can.

        Raises:
            ModelError: The options ask for a paged KV cache, and it is not supported.
        """

    def open_slots(
        self, options: GenerationOptions, *, slots: int, tokens: int, prefix: Sequence[int], seed: int
    ) -> AnsweringSlots:
        """Start continuous batching. Call it only if `why_no_slots` returns None.

        The model must be in evaluation mode while the slots are used.

        Args:
            options: Generation settings.
            slots: Number of slots.
            tokens: Maximum length of a row, prompt and new tokens.
            prefix: Tokens that all prompts start with.
            seed: Seed of sampling.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context manager that switches to evaluation mode and restores the mode."""


def request_limit(lm: GenerativeModel) -> int | None:
    """Return the maximum tokens of a request; None without limit.

    The requests of a reward model may hold two answers to a prompt; their lengths are checked when they are tokenized.
    """
    return None if getattr(lm, "scores_answers", False) else lm.context_length


def common_tokens(prompt: Sequence[int], ids: Sequence[int]) -> int:
    """Return how many tokens a prompt and `ids` begin with in common; the last one of the prompt is not counted."""
    low, high = 0, min(len(ids), len(prompt) - 1)
    if list(prompt[:1]) != list(ids[:1]):
        return 0
    while low < high:  # the first `low` tokens are equal, and at most `high` are
        middle = (low + high + 1) // 2
        if list(prompt[low:middle]) == list(ids[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
