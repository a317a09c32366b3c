"""Probes for generation and evaluation: completions of the longest prompt, and the loss of the longest row.

Training is probed by its trainer.

Shapes: B rows, S tokens of the longest prompt, N new tokens.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from partita.generation.engine import Engine
from partita.lm.base import PADDED, SHORTEST_PREFIX, BatchSupport, GenerationOptions, GenerativeModel
from partita_trainers.batch_size.clock import now
from partita_trainers.batch_size.probe import Purpose, Timing, Volume
from partita_trainers.objective import CROSS_ENTROPY, Objective, ObjectiveContext, has_branches, loss_of, prepare
from partita_trainers.training_probe import worst_batch

MAX_ELEMENTS = 2**31 - 1
"""Maximum number of elements of a tensor for kernels with 32-bit indices."""


@dataclass(frozen=True)
class GenerationProbe:
    """Generation for B prompts of S tokens, N new tokens each."""

    lm: GenerativeModel
    options: GenerationOptions
    lengths: np.ndarray
    """Length of each prompt in tokens, never 0."""
    wanted_tokens: int
    """Maximum number of new tokens."""
    shared_tokens: int = 0
    """Number of tokens shared by all prompts."""

    purpose: Purpose = "generation"

    @property
    def engine(self) -> Engine:
        """The generation engine."""
        reason = self.lm.why_no_slots(self.options, tokens=self.prompt_tokens + self.new_tokens)
        return "slots" if reason is None else "static"

    @cached_property
    def support(self) -> BatchSupport:
        """Which rows can share a sorted batch."""
        return self.lm.batch_support(self.options, tokens=self.prompt_tokens + self.new_tokens)

    @property
    def max_rows(self) -> int:
        """Rows of the data that can be generated together, limited by the size of a logits tensor."""
        wide = self.lm.vocabulary_size * self.options.beams
        most = max_batch_rows(self.lengths, self.support) if self.engine == "static" else len(self.lengths)
        return max(1, min(most, MAX_ELEMENTS // wide))

    @property
    def prompt_tokens(self) -> int:
        """S: tokens of the longest prompt."""
        return int(self.lengths.max())

    @property
    def new_tokens(self) -> int:
        """N: maximum new tokens of a row; fewer if the model has fewer positions left after the longest prompt."""
        return self.lm.reachable_tokens(self.prompt_tokens, self.wanted_tokens)

    def warm_up(self) -> None:
        """Generate a few tokens for a short prompt."""
        self.decode_step(1)

    def run(self, rows: int) -> Timing:
        """Prefill prompts and generate the last tokens."""
        return self.lm.generate_worst_case(
            rows,
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens,
            options=self.options,
            shared_tokens=self.prefilled_once,
        )

    @property
    def prefilled_once(self) -> int:
        """Number of shared prompt tokens that are prefilled once; the last token of a prompt is always prefilled."""
        return min(self.shared_tokens, int(self.lengths.min()) - 1)

    def estimated_bytes(self, rows: int) -> int:
        """Estimate the memory of a batch in bytes, each beam as a row."""
        wide = rows * self.options.beams
        return self.lm.estimated_bytes(
            "generation", wide, tokens=self.prompt_tokens, new_tokens=self.new_tokens, loss_tokens=0
        )

    def decode_step(self, rows: int) -> float:
        """Return the seconds of a decode step in the middle of a completion, at the average padded length."""
        length = round(self.usual_tokens(rows)) + self.new_tokens // 2
        return self.lm.time_decode_step(
            rows, length=max(4, length), shared_tokens=self.prefilled_once, options=self.options
        )

    def usual_tokens(self, rows: int) -> float:
        """Return the average tokens of a prompt in a batch, with padding."""
        if self.engine == "slots":
            return float(self.lengths.mean())
        return sorted_volume(self.lengths, rows, support=self.support).tokens / len(self.lengths)

    def volume(self, rows: int) -> Volume:
        """Return batches and tokens of all prompts, the longest first; slots need no padding."""
        if self.engine == "static":
            return sorted_volume(self.lengths, rows, support=self.support)
        shared = self.prefilled_once if self.prefilled_once >= SHORTEST_PREFIX else 0
        tokens = int(self.lengths.sum()) - (len(self.lengths) - 1) * shared
        return Volume(batches=-(-len(self.lengths) // rows), tokens=max(len(self.lengths), tokens))


@dataclass(frozen=True)
class EvaluationProbe:
    """The objective on B rows of maximum length, without gradients."""

    lm: GenerativeModel
    lengths: np.ndarray
    """Length of each row in tokens."""
    max_loss_tokens: int
    """Maximum number of loss tokens of a row."""
    objective: Objective = CROSS_ENTROPY
    """What is computed."""

    purpose: Purpose = "evaluation"
    new_tokens: int = 0

    @property
    def max_rows(self) -> int:
        """Rows of the data, limited by the size of a logits tensor."""
        return countable_rows(
            len(self.lengths), vocabulary_size=self.lm.vocabulary_size, loss_tokens=self.max_loss_tokens
        )

    @property
    def prompt_tokens(self) -> int:
        """Length of the longest row in tokens."""
        return int(self.lengths.max())

    def warm_up(self) -> None:
        """Compute the loss of one row."""
        self.run(1)

    def run(self, rows: int) -> Timing:
        """Run one forward pass."""
        batch = worst_batch(
            rows,
            tokens=self.prompt_tokens,
            loss_tokens=self.max_loss_tokens,
            token_ids=self.lm.token_ids,
            branched=has_branches(self.objective),
        )
        self.lm.module.eval()
        started = now(self.lm.device)
        context = ObjectiveContext(self.lm, self.lm.module)
        with torch.no_grad():
            prepare(self.objective, context, [batch])
            loss_of(self.objective, context, batch)
        return Timing(prefill_seconds=now(self.lm.device) - started)

    def estimated_bytes(self, rows: int) -> int:
        """Estimate the memory of a batch in bytes."""
        return self.lm.estimated_bytes(
            "evaluation", rows, tokens=self.prompt_tokens, new_tokens=0, loss_tokens=self.max_loss_tokens
        )

    def decode_step(self, rows: int) -> float:
        """Return 0: nothing is generated."""
        return 0.0

    def volume(self, rows: int) -> Volume:
        """Return batches and tokens of all rows, the longest first."""
        return sorted_volume(self.lengths, rows)


def countable_rows(rows: int, *, vocabulary_size: int, loss_tokens: int) -> int:
    """Return `rows`, limited so that kernels with 32-bit indices can address the logits."""
    return max(1, min(rows, MAX_ELEMENTS // (vocabulary_size * max(1, loss_tokens))))


def sorted_volume(lengths: np.ndarray, rows: int, *, support: BatchSupport = PADDED) -> Volume:
    """Return batches and padded tokens of rows sorted by descending length, batched as `support` allows."""
    ordered = np.sort(lengths.astype(np.int64))[::-1]
    if support.rows != "padded":
        _, counts = np.unique(ordered, return_counts=True)
        most = 1 if support.rows == "one row" else rows
        return Volume(batches=int((-(-counts // most)).sum()), tokens=int(ordered.sum()))
    heads = ordered[::rows]
    counts = np.full(len(heads), rows)
    counts[-1] = len(ordered) - rows * (len(heads) - 1)
    return Volume(batches=len(heads), tokens=int((heads * counts).sum()))


def max_batch_rows(lengths: np.ndarray, support: BatchSupport) -> int:
    """Return the number of rows of the largest batch that `support` allows."""
    if support.rows == "equal lengths":
        return int(np.unique(lengths, return_counts=True)[1].max())
    return 1 if support.rows == "one row" else len(lengths)
