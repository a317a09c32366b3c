"""Streamed training rows as optimizer steps: data of any size, resumable at any step.

The batches of a step come from shard groups in turn: batch s from group s modulo their number. Each group has its own
shards, so a process that takes every n-th batch reads only every n-th group.

Memory holds one window for each group that a process reads and, with workers, `prefetch` windows read ahead in all
groups together. Rows of a window that were yielded make room for the next ones.
"""

import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from partita.data.batching.collate import Collate
from partita.data.batching.data_position import DataPosition, Resume, continued, shortened_inputs
from partita.data.batching.plan import NOTHING, PlannedBatch
from partita.data.chunks import ChunkTokenizer, EncodedChunk, RawChunk
from partita.data.formats.text_files import is_mostly_broken
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.indexed_loader import StepWaits, check_ranks
from partita.data.ledger import LOSS_TOKENS_FOR_A_SHARE, NOTHING_COUNTED, Ledger, UsedRows
from partita.data.splits import TRAINING
from partita.data.streams.shard_group import CHUNK, ShardGroup, ShardPlan
from partita.data.streams.windows import SeenRows
from partita.data.tokenized import NO_ROWS, TokenizedDataset
from partita.data.workers import EncodingWorkers
from partita_schema.errors import DataError, ResumeError
from partita_schema.sections.data import LoaderOptions
from partita_trainers.base import Batch, GlobalBatch
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

SHARD_GROUP_VERSION = 4
"""Increased whenever a change puts rows of a stream into other batches, or counts them at another position."""
MAX_SHARD_GROUPS = 16
"""Maximum number of shard groups; the position of each is saved with every checkpoint."""
MAX_READERS = 48
"""Maximum number of readers of all sources in all groups, since each has a position."""


def count_shard_groups(batches_per_step: int, *, sources: int = 1) -> int:
    """Return the largest number of shard groups that divides the batches of a step.

    It is at most MAX_SHARD_GROUPS, and lower if there are many sources.
    """
    most = max(1, min(MAX_SHARD_GROUPS, MAX_READERS // sources, batches_per_step))
    return max(number for number in range(1, most + 1) if batches_per_step % number == 0)


class LeftOut(NamedTuple):
    """An example that is left out, or a row that could not be read."""

    key: str
    """Key of the example, or of the row."""
    reasons: Sequence[str]
    file: str
    number: int
    raw: Mapping[str, Any] | str | None


@dataclass(frozen=True)
class WindowReport:
    """Outcome of consecutive rows of a window."""

    left_out: Sequence[LeftOut]
    used: UsedRows


class StreamLoader:
    """Yield optimizer steps over streams, epoch after epoch; implements `partita_trainers.base.Batches`."""

    steps_per_epoch = None
    num_rows = None

    def __init__(
        self,
        plan: ShardPlan,
        row_tokenizer: RowTokenizer,
        *,
        options: LoaderOptions,
        batches_per_step: int,
        more_inputs: Mapping[str, str],
        ledger: Ledger,
        collate_batch: Collate,
        resume: Resume = "strict",
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Read streams as planned.

        Each rank of `process_group` reads only its own shard groups. Before each step the ranks exchange whether they
        have rows left, since an epoch ends on all ranks at once, and the outcome of rows, so that every ledger covers
        the whole run.

        Args:
            plan: The streams, their shard groups and the policy.
            row_tokenizer: Tokenizes the rows.
            options: Worker processes and prefetching.
            batches_per_step: Batches in one optimizer step, summed over all ranks.
            more_inputs: What decides the batches besides the streams, by readable names.
            ledger: Records used and bad rows.
            collate_batch: Builds the tensors of a batch.
            resume: What to do if data or plan have changed: see `continued`.
            process_group: The ranks that share the batches of a step.

        Raises:
            DataError: If the batches of a step cannot be divided evenly among the ranks.
        """
        check_ranks(process_group.world_size, batches_per_step)
        self.plan = plan
        """The streams, their shard groups and the policy."""
        self._row_tokenizer = row_tokenizer
        expander = row_tokenizer.expander
        self._numbered = expander is not None and expander.numbered
        """Whether a row may give several examples, whose keys then end in their number."""
        self._options = options
        self._ledger, self._collate, self._resume = ledger, collate_batch, resume
        self._process_group = process_group
        self._slots = range(process_group.rank, batches_per_step, process_group.world_size)
        self._own = sorted({slot % plan.num_groups for slot in self._slots})
        self._slots_of_groups = [slot for slot in range(batches_per_step) if slot % plan.num_groups in self._own]
        groups = {"shard groups": str(plan.num_groups), "shard group version": str(SHARD_GROUP_VERSION)}
        self._data_position = DataPosition(
            shortened_inputs({**plan.fingerprint_inputs, **groups, **row_tokenizer.fingerprint_inputs(), **more_inputs})
        )
        self._notes: list[WindowReport] = []
        self._num_unreadable = 0
        self._waits = StepWaits()
        self._counted: Mapping[str, int] = NOTHING_COUNTED
        self.counted_epoch: int | None = 0
        """The epoch whose rows are counted and checked: the first one, or the first one after the data changed. In the
        second case it is None until a step is requested."""
        self._started = False

    @property
    def waits(self) -> dict[str, float]:
        """How long this rank has waited for steps: `seconds`, `waited_seconds` and `wait_share`."""
        return self._waits.record()

    def total_steps(self, epochs: float) -> int:
        """Raise DataError: the length of a stream is unknown."""
        raise DataError(f"a stream has no known length, so {epochs:g} epochs is not a number of steps; write max_steps")

    def load_data_position(self, data_position: Mapping[str, Any]) -> None:
        """Continue after the step that carried `data_position`. Raise ResumeError as `continued` does."""
        inputs = self._data_position.fingerprint_inputs
        loaded = continued(data_position, inputs, resume=self._resume, started=self._started)
        state = loaded.loader_state
        if state is not None and (not isinstance(state, dict) or len(state.get("groups", ())) != self.plan.num_groups):
            raise ResumeError("the data position is damaged; continue from an older checkpoint")
        self._data_position = loaded
        before = data_position.get("loader_state")
        if isinstance(before, dict) and state is None:
            self.counted_epoch = None
        elif isinstance(before, dict):
            self._counted, self.counted_epoch = before["ledger"], before.get("counted_epoch", 0)

    @property
    def data_position(self) -> Mapping[str, Any]:
        """The position before the first step, as JSON."""
        return self._data_position.to_json()

    def steps(self) -> Iterator[GlobalBatch]:
        """Yield steps from the current position, without end. Raise DataError if an epoch has no usable row."""
        return self._start(self._data_position.epoch, itertools.count(self._data_position.epoch))

    def epoch_steps(self, epoch: int) -> Generator[GlobalBatch]:
        """Yield the steps of an epoch; if the loaded position lies in it, those after the position.

        Worker processes end with the epoch. Raise DataError if it has no usable row.
        """
        return self._start(epoch, [epoch])

    def merge_data_positions(self, data_positions: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Merge the positions of the ranks, each of which knows its own shard groups."""
        return merged(data_positions)

    def _start(self, first: int, epochs: Iterable[int]) -> Generator[GlobalBatch]:
        if not self._started or first == self._data_position.epoch:  # the rows after the position may be read again
            self._ledger.load(self._counted, split=TRAINING)
        if self.counted_epoch is None:
            self.counted_epoch = first
        self._started = True
        return self._closing_steps(epochs)

    def _closing_steps(self, epochs: Iterable[int]) -> Generator[GlobalBatch]:
        """Yield steps; closing the generator releases files and processes at once."""
        with closing(self._steps(epochs)) as steps:
            yield from self._waits.timed(steps)

    def _steps(self, epochs: Iterable[int]) -> Generator[GlobalBatch]:
        encode = ChunkTokenizer(self._row_tokenizer, max_row_tokens=self.plan.policy.max_row_tokens)
        with EncodingWorkers(encode, self._options) as workers:
            for epoch in epochs:
                start = (
                    self._data_position
                    if epoch == self._data_position.epoch
                    else DataPosition(self._data_position.fingerprint_inputs, epoch)
                )
                step = start.step
                with closing(self._epoch(epoch, step, start.loader_state, workers)) as steps:
                    for batch in steps:
                        step += 1
                        yield batch
                self._ledger.check()
                if not step:
                    raise DataError(f"{self.plan.names} has no row that can be used")

    def _epoch(
        self, epoch: int, step: int, loader_state: Any, workers: EncodingWorkers[RawChunk, EncodedChunk]
    ) -> Generator[GlobalBatch]:
        """Yield the steps of an epoch after `step`, until no shard group has rows left."""
        with ExitStack() as files:
            groups = {
                number: files.enter_context(closing(self._group(number, epoch, loader_state, workers)))
                for number in self._own
            }
            if workers.number:  # first read everything that the first step needs, then what later steps need
                for group in groups.values():
                    group.read_window()
            while True:
                if workers.number:  # keep all workers busy while a step is awaited
                    read_ahead(list(groups.values()), windows=len(groups) + self._windows_ahead)
                batches = {slot: groups[slot % self.plan.num_groups].next_batch() for slot in self._slots_of_groups}
                if not self._is_left(any(batch is not None for batch in batches.values())):
                    return
                step += 1
                positions = [
                    groups[number].position if number in groups else None for number in range(self.plan.num_groups)
                ]
                after = {
                    "groups": positions,
                    "ledger": self._ledger.state(split=TRAINING),
                    "counted_epoch": self.counted_epoch,
                }
                yield GlobalBatch(
                    tuple(self._batch(batches[slot]) for slot in self._slots),
                    data_position=DataPosition(self._data_position.fingerprint_inputs, epoch, step, after).to_json(),
                    epoch=float(epoch),
                )

    def _group(
        self, number: int, epoch: int, loader_state: Any, workers: EncodingWorkers[RawChunk, EncodedChunk]
    ) -> ShardGroup:
        return ShardGroup(
            self.plan,
            number,
            epoch=epoch,
            workers=workers,
            # If several ranks read a group, the rank of its first slot counts the rows.
            seen=self._seen if epoch == self.counted_epoch and number in self._slots else ignore,
            numbered=self._numbered,
            position=loader_state["groups"][number] if loader_state is not None else None,
        )

    def _batch(self, batch: tuple[TokenizedDataset, PlannedBatch] | None) -> Batch:
        return self._collate(*(batch or (NO_ROWS, NOTHING)))

    @property
    def _windows_ahead(self) -> int:
        """Number of windows read ahead in all groups together: `prefetch`, or two chunks per worker."""
        chunks = -(-self.plan.policy.window // CHUNK)
        return max(self._options.prefetch, -(-2 * self._options.workers // chunks))

    def _seen(self, rows: SeenRows) -> None:
        """Record the outcome of rows."""
        left_out = []
        for row in rows.bad:
            file, number = rows.keys.location(row.index)
            example = f"#{row.number}" if self._numbered and row.number else ""
            left_out.append(LeftOut(f"{rows.keys[row.index]}{example}", row.reasons, file, number, row.raw))
        self._notes.append(WindowReport(left_out, used=rows.used))
        self._num_unreadable += rows.num_unreadable
        if self._process_group.world_size == 1:
            # Many windows without a batch may follow each other: each is judged before the next one is read.
            self._count(self._notes)
            self._notes = []
        self._refuse_mostly_broken(left_out)

    def _refuse_mostly_broken(self, left_out: Sequence[LeftOut]) -> None:
        """Raise DataError if many rows of this rank are malformed, and more than are good."""
        num_bad = self._num_unreadable
        num_good = self._ledger.split(TRAINING).used + sum(note.used.rows for note in self._notes)
        if is_mostly_broken(num_bad, num_good):
            last = left_out[-1]
            raise DataError(
                f"{self.plan.names}: {num_bad:,} rows are broken and {num_good:,} are good; the last broken one is "
                f"{last.key}: {last.reasons[0]}; repair the file or leave it out"
            )

    def _is_left(self, mine: bool) -> bool:
        """Return whether any rank has rows left; record in the ledger the rows that all ranks have read."""
        reports = self._process_group.all_gather_object((mine, self._notes), "rows that are left")
        self._notes = []
        self._count([note for _, notes in reports for note in notes])
        return any(left for left, _ in reports)

    def _count(self, notes: Sequence[WindowReport]) -> None:
        """Record the outcome of rows in the ledger. Raise DataError if too many are left out."""
        for note in notes:
            for row in note.left_out:
                self._ledger.leave_out(
                    row.key, row.reasons, split=TRAINING, file=row.file, number=row.number, row=row.raw
                )
            self._ledger.use(note.used, split=TRAINING)
            self._ledger.check_so_far()
            self._ledger.refuse_unknown_tokens(TRAINING, least=LOSS_TOKENS_FOR_A_SHARE)


def read_ahead(groups: Sequence[ShardGroup], *, windows: int) -> None:
    """Read until all groups together hold `windows` windows, first the group that needs its next window soonest."""
    while sum(group.windows_held for group in groups) <= windows - 1:
        reading = [group for group in groups if not group.ended]
        if not reading:
            return
        min(reading, key=lambda group: (group.ahead, group.left)).read_window()


def ignore(rows: SeenRows) -> None:
    """Ignore rows of later epochs: they were counted in the first one."""


def merged(data_positions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the positions of the ranks after the same step, each of which knows its own shard groups."""
    first = dict(data_positions[0])
    groups = zip(*(position["loader_state"]["groups"] for position in data_positions), strict=True)
    known = [next(position for position in positions if position is not None) for positions in groups]
    return first | {"loader_state": first["loader_state"] | {"groups": known}}
