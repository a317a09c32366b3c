"""Training data as optimizer steps while it is read: any size, from any position.

The batches of a step come from lanes in turn: batch s from lane s modulo their number. A lane has shards of its own,
so that a process which takes every n-th batch reads every n-th lane only.

In memory is a window for each lane that a process reads, and with workers those that are read ahead: `prefetch` in all
lanes together. What of a window was handed out makes room for what comes next.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from partita.data.chunks import ChunkEncoder, EncodedChunk, RawChunk
from partita.data.collate import Collate
from partita.data.ledger import LOSS_TOKENS_FOR_A_SHARE, NOTHING_COUNTED, Ledger, UsedRows
from partita.data.loader import check_ranks
from partita.data.planning.cursor import Cursor, Resume, continued, short_parts
from partita.data.planning.plan import NOTHING, PlannedBatch
from partita.data.reading.text_files import is_mostly_broken
from partita.data.shaping.row_tokenizer import RowTokenizer
from partita.data.splits import TRAINING
from partita.data.statistics import Statistics
from partita.data.streams.shard_group import CHUNK, SeenWindow, ShardGroup, ShardPlan
from partita.data.tokenized import NO_ROWS, TokenizedDataset
from partita.data.workers import EncodingWorkers
from partita_schema.data import LoaderOptions
from partita_schema.errors import DataError, ResumeError
from partita_trainers.base import Batch, GlobalBatch
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

LANE_VERSION = 3
"""Changes with anything that puts rows of a stream into other batches."""
MOST_LANES = 16
"""More lanes than this are not made: the position of each is saved with every checkpoint."""
MOST_READERS = 48
"""Nor more lanes than leave so many of all sources in all lanes, since each has a position."""


def count_lanes(batches_per_step: int, *, sources: int = 1) -> int:
    """The largest number of lanes into which the batches of a step can be dealt evenly: up to MOST_LANES, and fewer
    where there are many sources.
    """
    most = max(1, min(MOST_LANES, MOST_READERS // sources, batches_per_step))
    return max(lanes for lanes in range(1, most + 1) if batches_per_step % lanes == 0)


class LeftOut(NamedTuple):
    """A row that is left out."""

    key: str
    reasons: Sequence[str]
    file: str
    number: int
    raw: Mapping[str, Any] | str | None


@dataclass(frozen=True)
class WindowReport:
    """What became of the rows of a window."""

    left_out: Sequence[LeftOut]
    used: UsedRows


class StreamLoader:
    """Steps over streams, epoch after epoch: `partita_trainers.base.Batches`."""

    steps_per_epoch = None
    num_rows = None

    def __init__(
        self,
        plan: ShardPlan,
        encoder: RowTokenizer,
        *,
        options: LoaderOptions,
        batches_per_step: int,
        parts: Mapping[str, str],
        ledger: Ledger,
        collate_batch: Collate,
        resume: Resume = "strict",
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """`parts` are what decides the batches beside the streams, by names that a person knows.

        Each rank of `process_group` reads its own lanes only. Before each step ranks tell each other whether they have
        rows left, since an epoch ends for all of them at once, and what became of rows, so that every ledger is that of
        the whole run. Raises DataError where the ranks do not divide the batches of a step.
        """
        check_ranks(process_group.world_size, batches_per_step)
        self._plan, self._encoder, self._options = plan, encoder, options
        self._ledger, self._collate, self._resume = ledger, collate_batch, resume
        self._process_group = process_group
        self._slots = range(process_group.rank, batches_per_step, process_group.world_size)
        self._own = sorted({slot % plan.lanes for slot in self._slots})
        self._slots_of_lanes = [slot for slot in range(batches_per_step) if slot % plan.lanes in self._own]
        lanes = {"lanes": str(plan.lanes), "lane version": str(LANE_VERSION)}
        self._cursor = Cursor(short_parts({**plan.parts, **lanes, **encoder.parts(), **parts}))
        self._notes: list[WindowReport] = []
        self._num_unreadable = 0
        self._statistics = Statistics()
        self._counted: Mapping[str, int] = NOTHING_COUNTED
        self._started = False

    @property
    def statistics(self) -> dict[str, float]:
        """What was handed out: steps, rows, tokens, loss_tokens, padding, seconds, and shares of them."""
        return self._statistics.record()

    def total_steps(self, epochs: float) -> int:
        """Raises DataError: nobody knows how long a stream is."""
        raise DataError(f"a stream has no known length, so {epochs:g} epochs are no number of steps; write max_steps")

    def load_state_dict(self, cursor: Mapping[str, Any]) -> None:
        """Continue after the step that carried `cursor`.

        Raises ResumeError when steps have been asked for already, or data or plan are not the same and `resume` is
        strict.
        """
        if self._started:
            raise ResumeError("a data position must be loaded before the first step is asked for")
        loaded = continued(cursor, self._cursor.parts, resume=self._resume)
        place = loaded.place
        if place is not None and (not isinstance(place, dict) or len(place.get("lanes", ())) != self._plan.lanes):
            raise ResumeError("the data position is damaged; continue from an older checkpoint")
        self._cursor = loaded
        before = cursor.get("place")
        if isinstance(before, dict) and (place is not None or loaded.epoch):  # rows are counted in epoch 0 only
            self._counted = before["ledger"]

    def steps(self) -> Iterator[GlobalBatch]:
        """Steps from the position on, without end. Raises DataError where an epoch has no row that can be used."""
        if not self._started:
            self._ledger.load(self._counted, split=TRAINING)
        self._started = True
        return self._closing_steps()

    def merge_state_dicts(self, cursors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """One position out of those of the ranks, each of which knows its own lanes."""
        return merged(cursors)

    def _closing_steps(self) -> Iterator[GlobalBatch]:
        """Steps that let files and processes go as soon as they are closed."""
        with closing(self._steps()) as steps:
            yield from self._statistics.count(steps)

    def _steps(self) -> Generator[GlobalBatch]:
        epoch, step, place = self._cursor.epoch, self._cursor.step, self._cursor.place
        encode = ChunkEncoder(self._encoder, most_tokens=self._plan.policy.most_tokens)
        with EncodingWorkers(encode, self._options) as workers:
            while True:
                with closing(self._epoch(epoch, step, place, workers)) as steps:
                    for made in steps:
                        step += 1
                        yield made
                self._ledger.check()
                if not step:
                    raise DataError(f"{self._plan.names} has no row that can be used")
                epoch, step, place = epoch + 1, 0, None

    def _epoch(
        self, epoch: int, step: int, place: Any, workers: EncodingWorkers[RawChunk, EncodedChunk]
    ) -> Generator[GlobalBatch]:
        """Steps of an epoch from `step` on, until no lane has anything left."""
        with ExitStack() as files:
            lanes = {
                number: files.enter_context(closing(self._lane(number, epoch, place, workers))) for number in self._own
            }
            if workers.number:  # all that the first step waits for before anything that it does not
                for lane in lanes.values():
                    lane.read_window()
            while True:
                if workers.number:  # none of them is to be idle while a step is waited for
                    read_ahead(list(lanes.values()), windows=len(lanes) + self._windows_ahead)
                found = {slot: lanes[slot % self._plan.lanes].next_batch() for slot in self._slots_of_lanes}
                if not self._is_left(any(batch is not None for batch in found.values())):
                    return
                step += 1
                places = [lanes[number].place if number in lanes else None for number in range(self._plan.lanes)]
                behind = {"lanes": places, "ledger": self._ledger.state(split=TRAINING)}
                yield GlobalBatch(
                    tuple(self._batch(found[slot]) for slot in self._slots),
                    state_dict=Cursor(self._cursor.parts, epoch, step, behind).to_json(),
                    epoch=float(epoch),
                )

    def _lane(
        self, number: int, epoch: int, place: Any, workers: EncodingWorkers[RawChunk, EncodedChunk]
    ) -> ShardGroup:
        expander = self._encoder.expander
        return ShardGroup(
            self._plan,
            number,
            epoch=epoch,
            workers=workers,
            # A lane that several ranks read is noted by the one that has its first slot.
            seen=self._seen if epoch == 0 and number in self._slots else ignore,
            numbered=expander is not None and expander.numbered,
            place=place["lanes"][number] if place is not None else None,
        )

    def _batch(self, found: tuple[TokenizedDataset, PlannedBatch] | None) -> Batch:
        return self._collate(*(found or (NO_ROWS, NOTHING)))

    @property
    def _windows_ahead(self) -> int:
        """Windows that are read ahead in all lanes together: `prefetch`, or what gives every worker two chunks."""
        chunks = -(-self._plan.policy.window // CHUNK)
        return max(self._options.prefetch, -(-2 * self._options.workers // chunks))

    def _seen(self, window: SeenWindow) -> None:
        """Note what became of a window's rows."""
        left_out = []
        for row in window.bad:
            file, number = window.keys.place(row.place)
            left_out.append(LeftOut(str(window.keys[row.place]), row.reasons, file, number, row.raw))
        self._notes.append(WindowReport(left_out, used=window.used))
        self._num_unreadable += window.num_unreadable
        if self._process_group.world_size == 1:
            # Windows without a batch may follow one another to the end of the file: each is judged before the next.
            self._count(self._notes)
            self._notes = []
        self._refuse_mostly_broken(left_out)

    def _refuse_mostly_broken(self, left_out: Sequence[LeftOut]) -> None:
        """Raise DataError where more rows of this rank are broken than are good, and they are many."""
        num_bad = self._num_unreadable
        num_good = self._ledger.split(TRAINING).used + sum(note.used.rows for note in self._notes)
        if is_mostly_broken(num_bad, num_good):
            last = left_out[-1]
            raise DataError(
                f"{self._plan.names}: {num_bad:,} rows are broken and {num_good:,} are good; the last broken one is "
                f"{last.key}: {last.reasons[0]}; repair the file or leave it out"
            )

    def _is_left(self, mine: bool) -> bool:
        """Whether any rank has rows left; the ledger is told what became of those that all have seen."""
        told = self._process_group.all_gather_object((mine, self._notes), "rows that are left")
        self._notes = []
        self._count([note for _, notes in told for note in notes])
        return any(left for left, _ in told)

    def _count(self, notes: Sequence[WindowReport]) -> None:
        """Tell the ledger what became of rows. Raises DataError where too many are left out."""
        for note in notes:
            for row in note.left_out:
                self._ledger.leave_out(
                    row.key, row.reasons, split=TRAINING, file=row.file, number=row.number, row=row.raw
                )
            self._ledger.use(note.used, split=TRAINING)
            self._ledger.check_so_far()
            self._ledger.refuse_unknown_tokens(TRAINING, least=LOSS_TOKENS_FOR_A_SHARE)


def read_ahead(lanes: Sequence[ShardGroup], *, windows: int) -> None:
    """Read on while all lanes together hold less than so many windows, first where the next is needed first."""
    while sum(lane.held for lane in lanes) <= windows - 1:
        reading = [lane for lane in lanes if not lane.ended]
        if not reading:
            return
        min(reading, key=lambda lane: (lane.ahead, lane.left)).read_window()


def ignore(window: SeenWindow) -> None:
    """Rows of later epochs were counted in the first."""


def merged(cursors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One position of a job out of those of its ranks behind the same step, each of which knows its own lanes."""
    first = dict(cursors[0])
    lanes = zip(*(cursor["place"]["lanes"] for cursor in cursors), strict=True)
    known = [next(place for place in places if place is not None) for places in lanes]
    return first | {"place": {"lanes": known, "ledger": first["place"]["ledger"]}}
