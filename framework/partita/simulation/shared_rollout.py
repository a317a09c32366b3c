"""The dialogues of one history, had by all processes of a job: each is had by one of them, from its first word on.

Nobody waits for anybody while dialogues are had: processes whose turns come at different times would be handed each
other's objects. They claim dialogues from a number that they count up together, and tell in such numbers how far they
are, and that the simulation is to end. At the end they meet once.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from partita.data.episode import Episode
from partita.generation.oom_backoff import Capacity
from partita.generation.predict import ShowProgress
from partita.generation.work_queue import WorkQueue, drain
from partita.simulation.rollout import Rollout
from partita.simulation.transcripts import Transcripts
from partita.simulation.turns import log_prompt_counts
from partita_schema.errors import SimulationError
from partita_schema.simulation import Limits
from partita_trainers.base import Progress
from partita_trainers.interrupt import interruption
from partita_trainers.process_group import ProcessGroup, synchronized_errors

logger = logging.getLogger(__name__)

FIRST = 20
"""Dialogues that have ended before it is asked whether too many failed."""
ASK_SECONDS = 0.25
"""Time after which it is looked again whether another process ends the simulation."""


class RolloutProgress:
    """How far all processes are. Each makes one at the same point of its work."""

    def __init__(self, process_group: ProcessGroup, *, ended: int, failed: int) -> None:
        """`ended` and `failed` dialogues there were before."""
        self.alone = process_group.world_size == 1
        self.before = (ended, failed)
        self.count_ended = process_group.shared_counter("dialogues that ended")
        self.count_failed = process_group.shared_counter("dialogues that failed")
        self.count_turns = process_group.shared_counter("answers of the model")
        self.count_stops = process_group.shared_counter("processes that end the simulation")
        self.mine = (0, 0)
        """Dialogues that have ended here, and those of them that failed."""
        self.stops = False
        self.looked = time.monotonic()

    def note(self, *, failed: bool, turns: int) -> tuple[int, int, int]:
        """A dialogue has ended here: how many have ended, how many of them failed, and answers since the start."""
        self.mine = (self.mine[0] + 1, self.mine[1] + failed)
        return (
            self.before[0] + self.count_ended(1) + 1,
            self.before[1] + self.count_failed(int(failed)) + int(failed),
            self.count_turns(turns) + turns,
        )

    def stop(self) -> None:
        """The simulation is to end, on all processes."""
        self.stops = True
        self.count_stops(1)

    def is_stopping(self) -> bool:
        """Whether a process ends the simulation; the others are not asked each time."""
        if not (self.stops or self.alone) and time.monotonic() - self.looked >= ASK_SECONDS:
            self.stops = self.count_stops(0) > 0
            self.looked = time.monotonic()
        return self.stops


@dataclass(frozen=True)
class WorkerSummary:
    """How a process has come to the end of its part.

    It holds all that is said of the end: the numbers that are counted up are gone with the first process that leaves.
    """

    ended: int
    """Dialogues that have ended there."""
    failed: int
    """Those of them that failed."""
    asked: bool
    """Whether somebody asked it to stop."""
    too_many: bool
    """Whether it has seen that too many dialogues failed."""
    reason: str | None
    """Of the last one that failed there."""


def rollout(
    dialogues: Sequence[Episode],
    transcripts: Transcripts,
    *,
    begin: Callable[..., Rollout],
    capacity: Capacity,
    limits: Limits,
    name: str,
    progress: ShowProgress,
    process_group: ProcessGroup,
) -> None:
    """Have those dialogues that are not in the transcripts, in this order, and keep them there.

    `begin` makes a rollout. Each rank of the process group has the dialogues that it claims. Raises SimulationError
    where too many fail, and KeyboardInterrupt where one was asked to stop; what was had is kept.
    """
    had = process_group.run_on_rank_zero(
        lambda: {key: done.status for key, done in transcripts.done.items()}, "what was had before"
    )
    owed = [dialogue for dialogue in dialogues if dialogue.key not in had]
    if had and owed:
        logger.info("%s of %s dialogues were finished before", f"{len(had):,}", f"{len(dialogues):,}")
    standing = RolloutProgress(process_group, ended=len(had), failed=sum(status == "failed" for status in had.values()))
    claims = WorkQueue(len(owed), process_group=process_group)
    # No rank begins more than its share at once: the others would be left without.
    share = replace(capacity, rows=max(1, min(capacity.rows, -(-len(owed) // process_group.world_size))))
    with (
        interruption("finishing the answers in progress") as asked,
        progress(len(dialogues), name, completed=len(had)) as display,
    ):
        with synchronized_errors(process_group, "the dialogues"), stopping_all(standing):
            rollout = begin(capacity=share, stopping=lambda: asked.asked or standing.is_stopping())
            begun = (owed[place] for place in drain(claims))
            shown, too_many = record(rollout, begun, transcripts, standing=standing, display=display, limits=limits)
            if asked.asked or too_many:
                standing.stop()
        ending = WorkerSummary(*standing.mine, asked.asked, too_many, transcripts.last_failure)
        if process_group.rank > 0:
            transcripts.close()  # rank 0 takes over what is there
        endings = process_group.all_gather_object(ending, "the end of the dialogues")
        ended = standing.before[0] + sum(other.ended for other in endings)
        if ended > shown:
            display.advance(ended - shown)
    log_prompt_counts(rollout.encoders)
    if any(other.too_many for other in endings):
        failed = standing.before[1] + sum(other.failed for other in endings)
        reason = next(other.reason for other in endings if other.reason is not None)
        told = f"{failed} of {ended} dialogues failed, more than limits.fail_fraction: {limits.fail_fraction:g} allows"
        message = f"{told}; the last one: {reason}. Finished dialogues are saved in {transcripts.path.parent}"
        process_group.raise_if_any_failed(SimulationError(message), "the share of failures")
    if ended < len(dialogues) and any(other.asked for other in endings):
        logger.info("%s of %s dialogues are kept", f"{ended:,}", f"{len(dialogues):,}")
        raise KeyboardInterrupt


def record(
    rollout: Rollout,
    dialogues: Iterator[Episode],
    transcripts: Transcripts,
    *,
    standing: RolloutProgress,
    display: Progress,
    limits: Limits,
) -> tuple[int, bool]:
    """Keep dialogues as they end, up to where so many have failed that the simulation is to end.

    How many the display has shown, of all processes, and whether so many have failed.
    """
    started, shown = time.perf_counter(), standing.before[0]
    for dialogue in rollout.run(dialogues):
        transcripts.add(dialogue)
        ended, failed, turns = standing.note(failed=dialogue.status == "failed", turns=len(dialogue.replies))
        rate = turns / (time.perf_counter() - started)
        display.advance(ended - shown, live=len(rollout.active), failed=failed, turns_per_second=rate)
        shown = ended
        if ended >= FIRST and failed > limits.fail_fraction * ended:
            return shown, True
    return shown, False


@contextmanager
def stopping_all(standing: RolloutProgress) -> Iterator[None]:
    """Around the work of this process: what it raises ends the work of the others."""
    try:
        yield
    except Exception:
        with suppress(Exception):  # where the others are gone, they need not be told
            standing.stop()
        raise
