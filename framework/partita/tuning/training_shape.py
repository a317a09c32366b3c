"""How the training rows of a run are batched, for any size that may be found: policies, volumes, steps.

R is the size that is looked for: rows of a batch, lines where rows are packed, and with a token budget the longest rows
that it holds. A row of the greatest length, or a full line, is what a size is tried with.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from partita.data.planning.choice import choose_batching
from partita.data.planning.indexed import IndexedPlanner, Order
from partita.data.planning.policies import FIXED_WINDOW, Policy, build_policy
from partita.data.tokenized import TokenizedDataset
from partita_schema.batching import AutoBatching, Batching, FixedBatching, PackBatching, TokenBudgetBatching
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.trainer import DEFAULT_STEP_ROWS, FinetuneTrainer, HogwildTrainer
from partita_trainers.batch_size.probe import BatchSize, Volume

SAMPLED_ROWS = 20_000
"""Rows whose lengths stand for those of larger data."""
TRIED_ROWS = 8
"""The size at which the most learned tokens of a batch are looked for."""


@dataclass(frozen=True)
class TrainingShape:
    """Training rows by their lengths, and the batching that they get."""

    batching: Batching
    """Not auto."""
    reason: str
    """Why it was chosen, where the file says auto; else empty."""
    lengths: np.ndarray
    """Tokens of each row."""
    learned: np.ndarray
    """Learned tokens of each row."""
    seed: int
    order: Order | None = None
    length_limit: int | None = None
    """Tokens of a row at most, where the file says so."""
    more_rows: bool = False
    """Whether these are the first rows of a stream only."""
    ranks: int = 1
    """Processes that share the batches of a step."""
    begun: int | None = None
    """Batches of a step that the run has begun with, by another number of processes perhaps."""
    sampled_rows: int = SAMPLED_ROWS

    @property
    def counts_tokens(self) -> bool:
        """Whether a batch is filled up to a number of tokens, so that its rows vary."""
        return isinstance(self.batching, TokenBudgetBatching | PackBatching)

    @property
    def longest(self) -> int:
        """Tokens of the longest row, or of a line where rows are packed."""
        longest = int(self.lengths.max())
        if self.more_rows:
            longest = self.length_limit or longest
        if not isinstance(self.batching, PackBatching):
            return longest
        return self.batching.max_tokens or self.length_limit or longest

    @cached_property
    def most_learned(self) -> int:
        """Most learned tokens of a row; with packed rows of a line, with a token budget for each longest row in it."""
        single = int(self.learned.max(initial=0))
        if not self.counts_tokens:
            return single
        rows, most = self.sample, float(single)
        lengths, learned = self.lengths[rows], self.learned[rows]
        policy = self.policy(TRIED_ROWS)
        for step in IndexedPlanner(lengths, policy=policy, batches_per_step=1, seed=self.seed).steps(0):
            [batch] = step.batches
            if isinstance(self.batching, PackBatching):
                most = max(most, float(np.bincount(batch.lines, weights=learned[batch.rows]).max()))
            else:
                most = max(most, int(learned[batch.rows].sum()) / TRIED_ROWS)
        return min(int(np.ceil(most)), self.longest)

    @property
    def most_rows(self) -> int:
        """The size beyond which all rows would be in one batch, of a stream those of a window."""
        if self.more_rows:
            return int(getattr(self.batching, "window", FIXED_WINDOW))
        if not self.counts_tokens:
            return len(self.lengths)
        return min(len(self.lengths), -(-int(self.lengths.sum()) // self.longest))

    @property
    def written(self) -> int | None:
        """The size that a token budget of the file comes to; None where it gives none."""
        if not isinstance(self.batching, TokenBudgetBatching) or self.batching.max_tokens == "auto":
            return None
        return max(1, self.batching.max_tokens // self.longest)

    def max_tokens(self, size: int) -> int | None:
        """Tokens of a batch with a token budget, of a line where rows are packed; None for other batchings."""
        if isinstance(self.batching, TokenBudgetBatching):
            return size * self.longest if self.batching.max_tokens == "auto" else self.batching.max_tokens
        return self.longest if isinstance(self.batching, PackBatching) else None

    def with_tokens(self, size: BatchSize) -> BatchSize:
        """The size with the tokens that it comes to, unless it says so already."""
        return size if size.max_tokens is not None else replace(size, max_tokens=self.max_tokens(size.rows))

    def policy(self, size: int, *, max_tokens: int | None = None) -> Policy:
        """The policy at a size; `max_tokens` is what a run was begun with."""
        return build_policy(self.batching, batch_size=size, max_tokens=max_tokens or self.max_tokens(size))

    def most_for(self, step_rows: int) -> int:
        """The largest size whose batches hold no more rows than a step should, on average."""
        if not self.counts_tokens:
            return step_rows
        return max(1, int(step_rows * float(self.lengths.mean()) / self.longest))

    def batches_per_step(self, trainer: object, size: BatchSize) -> int:
        """M, on all ranks together: as the run was begun; else as the file says, or so many that a step holds the rows
        that the file says, on average.
        """
        if self.begun is not None:
            return self.begun
        if not isinstance(trainer, FinetuneTrainer):
            return self.ranks
        if trainer.gradient_accumulation_steps is not None:
            return self.ranks * trainer.gradient_accumulation_steps
        if not self.counts_tokens:
            batches = trainer.accumulation(size.rows)
            return batches if trainer.effective_batch_size is not None else max(self.ranks, batches)
        planner = IndexedPlanner(
            self.lengths,
            policy=self.policy(size.rows, max_tokens=size.max_tokens),
            batches_per_step=1,
            seed=self.seed,
            order=self.order,
        )
        mean_rows = planner.num_rows / planner.count_batches(0)
        wanted = (trainer.effective_batch_size or DEFAULT_STEP_ROWS) / mean_rows
        return self.ranks * max(1, round(wanted / self.ranks))

    def rows_of_a_rank(self, step_rows: int) -> int:
        """Rows of a step that each process takes. Raises DataError where they cannot be shared evenly."""
        if self.counts_tokens or step_rows % self.ranks == 0:
            return step_rows // self.ranks or 1
        below = step_rows // self.ranks * self.ranks
        near = f"{below} or {below + self.ranks}" if below else str(self.ranks)
        raise DataError(
            f"{step_rows} rows of a step cannot be shared by {self.ranks} processes evenly; write "
            f"trainer.effective_batch_size: {near}"
        )

    def lengths_of_epoch(self) -> np.ndarray:
        """Tokens of each row of the first epoch: of a mix, some rows may be in it more than once, or not at all."""
        if self.order is None:
            return self.lengths
        rows_of_epoch: np.ndarray = self.lengths[self.order(0, np.random.default_rng(self.seed))]
        return rows_of_epoch

    @cached_property
    def sample(self) -> np.ndarray:
        """Rows at even distances that stand for larger data, the longest one among them."""
        count = len(self.lengths)
        sampled = min(count, self.sampled_rows)
        rows: np.ndarray = np.arange(sampled) * count // max(1, sampled)
        if count > sampled:
            rows[-1] = int(self.lengths.argmax())
        return rows

    def volume(self, size: int) -> Volume:
        """Batches and padded tokens of an epoch, as the planner makes them; of large data, foretold from a part."""
        lengths = self.lengths[self.sample]
        # What is left out costs little at any size, and would be all at some.
        batching = self.batching.model_copy(update={"drop_last": False} if hasattr(self.batching, "drop_last") else {})
        policy = build_policy(batching, batch_size=size, max_tokens=self.max_tokens(size))
        planner = IndexedPlanner(lengths, policy=policy, batches_per_step=1, seed=self.seed)
        batches, tokens = 0, 0
        for step in planner.steps(0):
            for batch in step.batches:
                line_tokens = np.bincount(batch.lines, weights=lengths[batch.rows])
                tokens += len(line_tokens) * int(line_tokens.max())
                batches += 1
        rows, share = len(self.lengths), len(self.lengths) / len(lengths)
        counted = policy.count(rows)
        batches = max(1, round(batches * share)) if counted is None else counted
        return Volume(batches=batches, tokens=round(tokens * share), rows=rows)


def training_shape(
    config: Config,
    encoded: TokenizedDataset,
    *,
    order: Order | None = None,
    more_rows: bool = False,
    ranks: int = 1,
    begun: int | None = None,
) -> TrainingShape:
    """How the rows of a run are batched; auto is resolved by lengths.

    With `more_rows` these are the first ones of a stream; none of it is longer than global_max_sequence_length, where
    that is written, and sizes are looked for with it. Those that are longer than data.batching.max_tokens are passed
    over, as they will be. Raises DataError where none is left.
    """
    batching, reason, lengths, learned = config.data.batching, "", encoded.lengths, encoded.loss_tokens
    most_tokens = getattr(batching, "max_tokens", None)
    if more_rows and isinstance(most_tokens, int):
        fitting = lengths <= most_tokens
        lengths, learned = lengths[fitting], learned[fitting]
        if not len(lengths):
            raise DataError(
                f"none of the stream's first {len(fitting):,} rows has at most the {most_tokens:,} tokens of "
                f"data.batching.max_tokens; write at least {int(encoded.lengths.min()):,} there"
            )
    seen = lengths if order is None else lengths[order(0, np.random.default_rng(config.seed))]
    if isinstance(config.trainer, HogwildTrainer):
        batching = FixedBatching(type="fixed", shuffle=False)  # its workers take them by chance
    if isinstance(batching, AutoBatching):
        trainer = config.trainer
        step_rows = trainer.step_rows if isinstance(trainer, FinetuneTrainer) else None
        written = trainer.batch_size if isinstance(trainer.batch_size, int) else None
        batching, reason = choose_batching(
            batching, seen, batch_size=written or step_rows or DEFAULT_STEP_ROWS, more_rows=more_rows
        )
    return TrainingShape(
        batching=batching,
        reason=reason,
        lengths=lengths,
        learned=learned,
        seed=config.seed,
        order=order,
        length_limit=config.preprocessing.global_max_sequence_length,
        more_rows=more_rows,
        ranks=ranks,
        begun=begun,
    )
