"""Batching of the training rows of a run for any candidate size: policy, volume, steps.

A batch size counts rows; with packing, sequences; with a token budget, the longest rows that fit into it. It is probed
with rows of the maximum length, or full sequences.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from partita.data.batching.auto_batching import choose_batching
from partita.data.batching.indexed import IndexedPlanner, Order
from partita.data.batching.policies import FIXED_WINDOW, Policy, build_policy
from partita.data.tokenized import TokenizedDataset
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.sections.batching import (
    AutoBatching,
    Batching,
    ChunkBatching,
    FixedBatching,
    PackBatching,
    TokenBudgetBatching,
    separates_rows,
)
from partita_schema.sections.trainer import DEFAULT_STEP_ROWS, FinetuneTrainer, HogwildTrainer
from partita_trainers.batch_size.probe import BatchSize, Volume

MAX_SAMPLED_ROWS = 20_000
"""Maximum number of rows whose lengths are sampled."""
TRIED_ROWS = 8
"""The size used to find the maximum number of loss tokens of a batch."""


@dataclass(frozen=True)
class TrainingShape:
    """Lengths of the training rows, and how they are batched."""

    batching: Batching
    """The resolved batching, not auto."""
    reason: str
    """Why auto resolved to it; else empty."""
    lengths: np.ndarray
    """Length of each row in tokens."""
    loss_tokens: np.ndarray
    """Loss tokens of each row."""
    seed: int
    order: Order | None = None
    length_limit: int | None = None
    """Maximum row length in tokens, if configured."""
    more_rows: bool = False
    """Whether these are only the first rows of a stream."""
    ranks: int = 1
    """Number of processes that share the batches of a step."""
    recorded_batches: int | None = None
    """Batches per step with which the run started, possibly on another number of processes."""
    sampled_rows: int = MAX_SAMPLED_ROWS

    @property
    def counts_tokens(self) -> bool:
        """Whether a batch is filled up to a number of tokens, so that its number of rows varies."""
        return isinstance(self.batching, TokenBudgetBatching | PackBatching)

    @property
    def chunks(self) -> ChunkBatching | None:
        """How documents are joined and cut; None if rows are not."""
        return self.batching if isinstance(self.batching, ChunkBatching) else None

    @property
    def separates_rows(self) -> bool:
        """Whether a sequence holds several rows or documents that do not attend to each other."""
        return separates_rows(self.batching)

    @property
    def longest(self) -> int:
        """Length of the longest row in tokens, or of a sequence if rows are packed."""
        longest = int(self.lengths.max())
        if self.more_rows:
            longest = self.length_limit or longest
        if isinstance(self.batching, ChunkBatching):
            return self.batching.context_length or longest
        if not isinstance(self.batching, PackBatching):
            return longest
        return self.batching.max_tokens or self.length_limit or longest

    @cached_property
    def max_loss_tokens(self) -> int:
        """Maximum loss tokens of a row; per sequence if packed, per longest row in the batch with a token budget."""
        single = int(self.loss_tokens.max(initial=0))
        if not self.counts_tokens:
            return single
        rows, most = self.sample, float(single)
        lengths, loss_tokens = self.lengths[rows], self.loss_tokens[rows]
        policy = self.policy(TRIED_ROWS)
        for step in IndexedPlanner(lengths, policy=policy, batches_per_step=1, seed=self.seed).steps(0):
            [batch] = step.batches
            if isinstance(self.batching, PackBatching):
                most = max(most, float(np.bincount(batch.sequences, weights=loss_tokens[batch.rows]).max()))
            else:
                most = max(most, int(loss_tokens[batch.rows].sum()) / TRIED_ROWS)
        return min(int(np.ceil(most)), self.longest)

    @property
    def max_rows(self) -> int:
        """The size at which all rows, or for a stream those of a window, are in one batch."""
        if self.more_rows:
            return int(getattr(self.batching, "window", FIXED_WINDOW))
        if not self.counts_tokens:
            return len(self.lengths)
        return min(len(self.lengths), -(-int(self.lengths.sum()) // self.longest))

    @property
    def user_set(self) -> int | None:
        """The size given by a token budget of the config; None without one."""
        if not isinstance(self.batching, TokenBudgetBatching) or self.batching.max_tokens == "auto":
            return None
        return max(1, self.batching.max_tokens // self.longest)

    def max_tokens(self, size: int) -> int | None:
        """Return the tokens of a batch with a token budget, or of a sequence if packed; else None."""
        if isinstance(self.batching, TokenBudgetBatching):
            return size * self.longest if self.batching.max_tokens == "auto" else self.batching.max_tokens
        return self.longest if isinstance(self.batching, PackBatching) else None

    def with_tokens(self, size: BatchSize) -> BatchSize:
        """Return the size with its number of tokens, unless that is set."""
        return size if size.max_tokens is not None else replace(size, max_tokens=self.max_tokens(size.rows))

    def policy(self, size: int, *, max_tokens: int | None = None) -> Policy:
        """Return the batching policy for a size; `max_tokens` is the recorded value of a run."""
        return build_policy(self.batching, batch_size=size, max_tokens=max_tokens or self.max_tokens(size))

    def max_rows_for(self, step_rows: int) -> int:
        """Return the largest size whose batches have on average no more rows than a step."""
        if not self.counts_tokens:
            return step_rows
        return max(1, int(step_rows * float(self.lengths.mean()) / self.longest))

    def batches_per_step(self, trainer: object, size: BatchSize) -> int:
        """Return the batches per step over all ranks.

        A recorded value of the run comes first, then the config, then the number with which a step has on average the
        configured rows.
        """
        if self.recorded_batches is not None:
            return self.recorded_batches
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

    def accumulates(self, trainer: object) -> bool:
        """Return whether a process takes several batches per step at size 1, the size with the most of them."""
        one_row = self.with_tokens(BatchSize(rows=1, origin="default", device="none"))
        return self.batches_per_step(trainer, one_row) > self.ranks

    def rows_of_a_rank(self, step_rows: int) -> int:
        """Return the rows of a step per process. Raise DataError if they cannot be shared evenly."""
        if self.counts_tokens or step_rows % self.ranks == 0:
            return step_rows // self.ranks or 1
        below = step_rows // self.ranks * self.ranks
        near = f"{below} or {below + self.ranks}" if below else str(self.ranks)
        raise DataError(
            f"{step_rows} rows of a step cannot be shared by {self.ranks} processes evenly; write "
            f"trainer.effective_batch_size: {near}"
        )

    @cached_property
    def epoch_lengths(self) -> np.ndarray:
        """Return the length of each row of the first epoch, in which a mix may repeat or skip rows."""
        if self.order is None:
            return self.lengths
        rows_of_epoch: np.ndarray = self.lengths[self.order(0, np.random.default_rng(self.seed))]
        return rows_of_epoch

    @cached_property
    def sample(self) -> np.ndarray:
        """Rows that represent larger data."""
        return evenly_spaced(self.lengths, self.sampled_rows)

    def volume(self, size: int) -> Volume:
        """Return batches and padded tokens of an epoch as planned; extrapolated from a sample for large data."""
        epoch = self.epoch_lengths
        lengths = epoch[evenly_spaced(epoch, self.sampled_rows)]
        # Dropped batches cost little at any size, but at some sizes they would be all.
        batching = self.batching.model_copy(update={"drop_last": False} if hasattr(self.batching, "drop_last") else {})
        policy = build_policy(batching, batch_size=size, max_tokens=self.max_tokens(size))
        planner = IndexedPlanner(lengths, policy=policy, batches_per_step=1, seed=self.seed)
        batches, tokens = 0, 0
        for step in planner.steps(0):
            for batch in step.batches:
                sequence_tokens = np.bincount(batch.sequences, weights=lengths[batch.rows])
                tokens += len(sequence_tokens) * int(sequence_tokens.max())
                batches += 1
        rows, share = len(epoch), len(epoch) / len(lengths)
        counted = policy.count(rows)
        batches = max(1, round(batches * share)) if counted is None else counted
        return Volume(batches=batches, tokens=round(tokens * share), rows=rows)


def evenly_spaced(lengths: np.ndarray, most: int) -> np.ndarray:
    """Return the indices of at most `most` evenly spaced rows, including a longest one."""
    count, sampled = len(lengths), min(len(lengths), most)
    rows: np.ndarray = np.arange(sampled) * count // max(1, sampled)
    if count > sampled:
        rows[-1] = int(lengths.argmax())
    return rows


def training_shape(
    config: Config,
    encoded: TokenizedDataset,
    *,
    order: Order | None = None,
    more_rows: bool = False,
    ranks: int = 1,
    recorded_batches: int | None = None,
    chunk_length: int | None = None,
) -> TrainingShape:
    """Return how the rows of a run are batched; auto is resolved by the row lengths.

    The rows of a stream are at most global_max_sequence_length long, and sizes are probed with that if it is set. Rows
    longer than data.batching.max_tokens are skipped, as in training.

    Args:
        config: The config.
        encoded: The tokenized rows.
        order: Order of rows in an epoch, for mixed data.
        more_rows: Whether these are only the first rows of a stream.
        ranks: Number of processes that share the batches of a step.
        recorded_batches: Recorded number of batches per step.
        chunk_length: Tokens of a chunk, if documents are cut into chunks.

    Raises:
        DataError: No row is left.
    """
    batching, reason, lengths, loss_tokens = config.data.batching, "", encoded.lengths, encoded.loss_tokens
    max_tokens = getattr(batching, "max_tokens", None)
    if more_rows and isinstance(max_tokens, int):
        fitting = lengths <= max_tokens
        lengths, loss_tokens = lengths[fitting], loss_tokens[fitting]
        if not len(lengths):
            raise DataError(
                f"none of the stream's first {len(fitting):,} rows has at most the {max_tokens:,} tokens of "
                f"data.batching.max_tokens; write at least {int(encoded.lengths.min()):,} there"
            )
    seen = lengths if order is None else lengths[order(0, np.random.default_rng(config.seed))]
    if isinstance(config.trainer, HogwildTrainer):
        batching = FixedBatching(type="fixed", shuffle=False)  # its workers draw rows at random
    if isinstance(batching, ChunkBatching):
        batching = batching.model_copy(update={"context_length": chunk_length})
    if isinstance(batching, AutoBatching):
        trainer = config.trainer
        step_rows = trainer.step_rows if isinstance(trainer, FinetuneTrainer) else None
        user_set = trainer.batch_size if isinstance(trainer.batch_size, int) else None
        batching, reason = choose_batching(
            seen, batch_size=user_set or step_rows or DEFAULT_STEP_ROWS, more_rows=more_rows
        )
    return TrainingShape(
        batching=batching,
        reason=reason,
        lengths=lengths,
        loss_tokens=loss_tokens,
        seed=config.seed,
        order=order,
        length_limit=config.preprocessing.global_max_sequence_length,
        more_rows=more_rows,
        ranks=ranks,
        recorded_batches=recorded_batches,
    )
