"""Requests, settings and results of generation, the same for all engines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.generation.oom_backoff import BatchBudget
from partita.generation.prompts import PromptSource
from partita.generation.spent import Spent
from partita.lm.base import SHORTEST_PREFIX, AnswerContext, Generated, GenerationOptions
from partita_schema.cells import compact_json
from partita_schema.errors import JobError, ModelError
from partita_trainers.batch_size.device_errors import is_broken_device
from partita_trainers.interrupt import never
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup


def first_constraint(row: int) -> int:
    """Return 0, the index of the only constraints where a row has one answer."""
    return 0


def no_options(row: int) -> None:
    """Return None: the row has the settings of the job."""


@dataclass(frozen=True)
class AnswerSequence:
    """The answers that follow one another in a turn: one for each output."""

    names: tuple[str, ...]
    """Names of the outputs, in their order."""
    new_tokens: tuple[int, ...]
    """Limit of generated tokens of each output."""
    question_tokens: tuple[int, ...]
    """Maximum number of prompt tokens between the end of the answer before each output and its own start."""

    def max_tokens(self, first: int = 0) -> int:
        """Return the most tokens after the prompt of output number `first` up to the end of the turn."""
        return sum(self.new_tokens[first:]) + sum(self.question_tokens[first + 1 :])

    def combined(self, answers: Sequence[Generated]) -> Generated:
        """Return the answers of a turn as one completion, whose text is a JSON object with the texts by name."""
        scores = {name: one.scores for name, one in zip(self.names, answers, strict=True) if one.scores is not None}
        logprobs = [answer.logprob for answer in answers if answer.logprob is not None]
        return Generated(
            ids=tuple(token for answer in answers for token in answer.ids),
            text=compact_json({name: answer.text for name, answer in zip(self.names, answers, strict=True)}),
            finish_reason="length" if any(answer.finish_reason == "length" for answer in answers) else "stop",
            logprob=sum(logprobs) if len(logprobs) == len(answers) else None,
            scores=scores or None,
        )


@dataclass(frozen=True)
class RowRequests:
    """The rows to answer, with their prompts."""

    lengths: npt.NDArray[np.integer]
    """Tokens of each prompt; 0 for rows to skip."""
    new_tokens: npt.NDArray[np.integer]
    """Limit of generated tokens of each row."""
    fetch: Callable[[Sequence[int]], list[list[int]]]
    """Returns the prompt tokens of rows."""
    key: Callable[[int], bytes]
    """Returns the sampling key of a row."""
    prefix: Sequence[int] = ()
    """Tokens that all prompts begin with."""
    digests: npt.NDArray[np.void] | None = None
    """Equal for rows with equal prompts; None to generate each row separately."""
    constraint_index: Callable[[int], int] = first_constraint
    """Returns the index of a row's constraints in `GenerationOptions.constraints`."""
    num_samples: int = 1
    """How many consecutive rows have the same prompt; such rows are answered by the same process."""
    options: Callable[[int], GenerationOptions | None] = no_options
    """Returns the settings of a row; None for those of the job."""
    prefix_groups: npt.NDArray[np.int32] | None = None
    """Number of the prefix group of each row, [rows], -1 without one; None if there are none. The prompts of a prefix
    group begin alike beyond `prefix`."""

    def prefix_group(self, row: int) -> int | None:
        """Return the prefix group of a row; None without one."""
        prefix_group = -1 if self.prefix_groups is None else int(self.prefix_groups[row])
        return None if prefix_group < 0 else prefix_group

    def longest(self, rows: Sequence[int] | npt.NDArray[np.integer]) -> int:
        """Return the most tokens, prompt and answer, that one of these rows may have."""
        indices = np.asarray(rows)
        return int((self.lengths[indices] + self.new_tokens[indices]).max())


@dataclass(frozen=True)
class GenerationSettings:
    """How rows are generated."""

    options: GenerationOptions
    budget: BatchBudget
    seed: int
    """Seed for sampling."""
    stopping: Callable[[], bool] = never
    """Once it returns True, only the started rows are finished. Not used with a server."""
    process_group: ProcessGroup = SINGLE_PROCESS
    """The ranks that share the rows."""


@dataclass(frozen=True)
class GenerationJob:
    """The rows of a dataset, and how they are generated."""

    prompts: PromptSource
    settings: GenerationSettings
    engine: str
    """The engine of `Generator.choose_engine`."""
    max_new_tokens: int
    """Limit of generated tokens per row; less where the context leaves less."""
    sequence: AnswerSequence | None = None
    """The answers to each row that follow one another; None if there is one."""
    num_samples: int = 1
    """How many consecutive rows of `prompts` have the same prompt."""

    def requests(self, *, context_length: int | None, answers: AnswerContext | None = None) -> RowRequests:
        """Return the rows with a prompt; those whose prompt fills the context are skipped."""
        lengths, new_tokens = usable_lengths(
            self.prompts.lengths, self.max_new_tokens, context_length=context_length, answers=answers
        )
        options = self.settings.options
        do_sample = options.do_sample
        # A copied beginning can change the last digits of what follows, which near ties of greedy answers allow for.
        shows_digits = do_sample or options.logprobs or options.scores_labels
        return RowRequests(
            lengths,
            new_tokens,
            fetch=self.prompts.prompts,
            key=self.prompts.sampling_key if do_sample else unused_key,
            prefix=self.prompts.prefix,
            digests=None if do_sample else self.prompts.digests,
            num_samples=self.num_samples,
            prefix_groups=None if shows_digits else self.prompts.prefix_groups,
        )


def usable_lengths(
    lengths: npt.NDArray[np.integer],
    max_new_tokens: int,
    *,
    context_length: int | None,
    answers: AnswerContext | None = None,
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """Return the tokens of each prompt, 0 for those that do not fit, and each row's limit of generated tokens.

    If no token is generated, a prompt may fill the context.

    Args:
        lengths: Tokens of each prompt.
        max_new_tokens: Limit of generated tokens per row.
        context_length: Context of the model in tokens.
        answers: The context of answers, if prompts are not part of it.
    """
    if answers is not None:
        usable = lengths if context_length is None else np.where(lengths > context_length, 0, lengths)
        return usable, np.full(len(lengths), min(max_new_tokens, answers.length or max_new_tokens))
    if context_length is None:
        return lengths, np.full(len(lengths), max_new_tokens)
    usable = np.where(lengths + min(1, max_new_tokens) > context_length, 0, lengths)
    return usable, np.minimum(max_new_tokens, context_length - usable)


def unused_key(row: int) -> bytes:
    """Return an empty sampling key, for greedy decoding."""
    return b""


def common_prefix(work: RowRequests, rows: Sequence[int]) -> Sequence[int]:
    """Return the common prefix of these rows' prompts if it is long enough; every prompt has tokens after it."""
    shortest = int(work.lengths[rows].min()) if len(rows) > 1 else 0
    prefix = work.prefix[: max(0, shortest - 1)]
    return prefix if len(prefix) >= SHORTEST_PREFIX else ()


def plan(work: RowRequests, left: npt.NDArray[np.bool_]) -> tuple[list[int], dict[int, list[int]]]:
    """Return the rows to answer, the longest prompt first, and for each the other rows with the same prompt.

    The rows of a prefix group follow its longest one.
    """
    rows = np.flatnonzero(left & (work.lengths > 0))
    copies: dict[int, list[int]] = {}
    if work.digests is not None and len(rows):
        _, first, inverse = np.unique(work.digests[rows], return_index=True, return_inverse=True)
        for index in np.flatnonzero(first[inverse] != np.arange(len(rows))):
            copies.setdefault(int(rows[first[inverse[index]]]), []).append(int(rows[index]))
        rows = rows[np.sort(first)]
    lengths = work.lengths[rows].astype(np.int64)
    if work.prefix_groups is None:
        order = np.argsort(-lengths, kind="stable")
    else:
        prefix_groups = work.prefix_groups[rows]
        longest = np.zeros(int(prefix_groups.max(initial=0)) + 1, dtype=np.int64)
        np.maximum.at(longest, prefix_groups, np.where(prefix_groups < 0, 0, lengths))
        order = np.lexsort((-lengths, prefix_groups, -np.where(prefix_groups < 0, lengths, longest[prefix_groups])))
    return rows[order].tolist(), copies


Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowResult:
    """The result of one row: an answer, or an error."""

    row: int
    """Index of the row in the dataset."""
    generated: Generated | None
    """The answer."""
    error: str | None = None
    """Why there is no answer."""
    reward: float | None = None
    """Its reward, if it was chosen among several answers."""
    samples: tuple[Mapping[str, Any], ...] | None = None
    """All answers that it was chosen from, in the order of their numbers, with text and reward, if they are kept."""

    def generated_or_raise(self) -> Generated:
        """Return the answer. Raise ModelError if there is none."""
        if self.generated is None:
            raise ModelError(self.error or "no answer")
        return self.generated


@dataclass(frozen=True)
class BatchResult:
    """The results of requested rows, and the work they took."""

    results: tuple[RowResult, ...]
    """Results in the order of completion."""
    spent: Spent
    """What was spent since the last results."""
    batch_size: int
    """Most rows of this length at a time from now on."""


def unanswerable(
    prompts: PromptSource, *, max_new_tokens: int, context_length: int | None, answers: AnswerContext | None = None
) -> dict[int, str]:
    """Return the rows that fail before any forward pass, with the reason: no prompt, or one that does not fit.

    Args:
        prompts: The prompts.
        max_new_tokens: Limit of generated tokens per row.
        context_length: Context of the model in tokens.
        answers: The context of answers, if prompts are not part of it.
    """
    errors = dict(prompts.errors)
    if context_length is not None:
        usable, _ = usable_lengths(prompts.lengths, max_new_tokens, context_length=context_length, answers=answers)
        for row in np.flatnonzero((usable == 0) & (prompts.lengths > 0)).tolist():
            errors[row] = (
                f"the prompt has {prompts.lengths[row]:,} tokens and the context holds {context_length:,}; "
                "nothing can be answered"
            )
    return errors


def too_large(prompt_tokens: int, new_tokens: int) -> str:
    """Return the error of a row that does not fit on the device alone."""
    return (
        f"does not fit in memory even alone: {prompt_tokens:,} prompt tokens and up to {new_tokens:,} new tokens; "
        "shorten the prompt, or write a smaller generation.max_new_tokens, quantization or a smaller model"
    )


def stop_if_broken(error: Exception) -> None:
    """Raise JobError if an error leaves the device unusable, so that all later rows would fail."""
    if is_broken_device(error):
        raise JobError(
            f"the device failed and cannot continue: {error}. The answers so far are saved; start again, with "
            "CUDA_LAUNCH_BLOCKING=1 to see where it fails"
        ) from error
