"""The process of the command while ranks run elsewhere: it shows their messages and ends as they do."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from partita.backends.ray.event_queue import (
    JobFinished,
    LogMessage,
    Message,
    Posted,
    ProgressClosed,
    ProgressMoved,
    ProgressOpened,
    RankDied,
    RankFinished,
    RankStarted,
)
from partita.runs.progress import show_progress
from partita_schema.errors import JobError, OtherRankError, SimulationError, TrainingError
from partita_trainers.interrupt import interruption

logger = logging.getLogger(__name__)

GLANCE_SECONDS = 0.2
"""Interval between checks for a stop request when no messages arrive."""
END_SECONDS = 5.0
"""Seconds that ranks have to exit by themselves after one of them failed."""


@dataclass(frozen=True)
class RankWork:
    """What the ranks do, in the words of messages."""

    name: str
    error: type[JobError]
    """Raised if it ends too early."""
    again: str
    """Where restarted ranks begin."""
    advice: str
    """What is kept if it ends too early, and what to do."""
    stopping: str
    """What happens after a request to stop."""


TRAINING = RankWork(
    "training",
    TrainingError,
    again="from the newest checkpoint",
    advice="saved checkpoints are kept, rerun the same command to resume",
    stopping="stopping after this step",
)
EVALUATION = RankWork(
    "evaluation", JobError, again="from the first row", advice="rerun the same command", stopping="stopping"
)
SIMULATION = RankWork(
    "simulation",
    SimulationError,
    again="and continue with the remaining dialogues",
    advice="finished dialogues are kept, rerun the same command to resume",
    stopping="finishing the answers in progress",
)


class RankLauncher(Protocol):
    """Ranks that another program starts, and restarts if one is gone."""

    def poll(self, timeout_seconds: float) -> Sequence[Posted]:
        """Return new messages with their senders; may be empty."""

    def stop(self) -> None:
        """Ask all ranks to stop. None is restarted."""

    def end(self, sender: str) -> None:
        """Kill the process of a rank."""

    def close(self) -> None:
        """Kill all remaining ranks and wait a few seconds for them to exit."""

    def resources(self) -> Mapping[str, float]:
        """Return the total resources for ranks."""


@dataclass
class Attempt:
    """The ranks that run together, from their start until they finish or one dies."""

    started: dict[str, RankStarted] = field(default_factory=dict)
    finished: dict[str, RankFinished] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)

    @property
    def errors(self) -> list[BaseException]:
        """Errors of the ranks."""
        return [finished.error for finished in self.finished.values() if finished.error is not None]

    @property
    def reason(self) -> BaseException | None:
        """The first error that is not a consequence of another rank's; None if there is none."""
        return next((error for error in self.errors if not isinstance(error, OtherRankError)), None)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have started."""
        return bool(self.started) and len(self.started) == next(iter(self.started.values())).ranks

    def describe_lost(self, ranks: Sequence[int]) -> str:
        """Return a message that names the ranks that are gone, without those that reported their end."""
        silent = {started.rank: started for sender, started in self.started.items() if sender not in self.finished}
        missing = [silent[rank] for rank in sorted(ranks) if rank in silent]
        names = [f"rank {started.rank} (process {started.process} on {started.node})" for started in missing]
        return f"{' and '.join(names) or 'a worker'} {'are' if len(names) > 1 else 'is'} gone"


def follow(
    ranks: RankLauncher,
    *,
    workers: int,
    max_failures: int,
    timeout_seconds: float,
    quiet: bool,
    work: RankWork = TRAINING,
    end_seconds: float = END_SECONDS,
) -> Any:
    """Wait for the ranks and return the result of rank 0.

    Ctrl-C and SIGTERM let the ranks finish what they have started; a second one stops them at once.

    Args:
        ranks: Starts the ranks and delivers their messages.
        workers: Expected number of ranks.
        max_failures: How often the ranks may be restarted.
        timeout_seconds: Time for all ranks to start.
        quiet: Whether to hide progress.
        work: What the ranks do, for messages.
        end_seconds: Time for the ranks to exit by themselves after one failed.

    Raises:
        JobError: Ranks died too often, Ray ended the job, or not all ranks started in time.
        KeyboardInterrupt: The user stopped the job.
        Exception: The error of a rank.
    """
    monitor = RankMonitor(
        ranks,
        workers,
        max_failures=max_failures,
        timeout_seconds=timeout_seconds,
        quiet=quiet,
        work=work,
        end_seconds=end_seconds,
    )
    stopping = False
    try:
        with interruption(work.stopping) as interrupt, monitor.displays:
            while monitor.end is None:
                monitor.look()
                if interrupt.requested and not stopping:
                    ranks.stop()
                    stopping = True
                if stopping and (monitor.end is not None or not monitor.attempt.started):
                    raise KeyboardInterrupt
    finally:
        ranks.close()
    monitor.check_end()
    return monitor.result


class RankMonitor:
    """Handles the messages of the ranks in the process of the command."""

    def __init__(
        self,
        ranks: RankLauncher,
        workers: int,
        *,
        max_failures: int,
        timeout_seconds: float,
        quiet: bool,
        work: RankWork,
        end_seconds: float,
    ) -> None:
        """See `follow` for the arguments."""
        self.ranks, self.workers, self.max_failures = ranks, workers, max_failures
        self.timeout, self.quiet, self.work = timeout_seconds, quiet, work
        self.end_seconds = end_seconds
        self.attempt = Attempt()
        self.ignored_senders: set[str] = set()
        self.deaths = 0
        self.displays = ExitStack()
        self.shown: dict[tuple[str, int], tuple[Any, ExitStack]] = {}
        self.last_death = ""
        self.ended_at: float | None = None
        """Time of the first failure of a rank."""
        self.end: JobFinished | None = None
        self.result: Any = None

    def look(self) -> None:
        """Handle new messages. Raises the error of a failed rank after the others have ended too."""
        for sender, message in self.ranks.poll(GLANCE_SECONDS):
            if sender not in self.ignored_senders:
                self.handle_event(sender, message)
        reason = self.attempt.reason
        if reason is None:
            self.check_timeouts()
            return
        self.ended_at = self.ended_at or time.monotonic()
        late = time.monotonic() - self.ended_at > self.end_seconds
        if late or len(self.attempt.finished) == len(self.attempt.started) or self.end is not None:
            raise reason

    def handle_event(self, sender: str, message: Message | RankDied | JobFinished) -> None:
        """Show or record a message."""
        match message:
            case RankStarted():
                self.attempt.started[sender] = message
            case LogMessage():
                logging.getLogger(message.logger).log(message.level, "%s", message.text)
            case ProgressOpened():
                self.open(sender, message)
            case ProgressMoved():
                self.shown[sender, message.number][0].advance(message.amount, **message.shown)
            case ProgressClosed():
                self.shown.pop((sender, message.number))[1].close()
            case RankFinished(error=None):
                self.attempt.finished[sender] = message
                if self.attempt.started[sender].rank == 0:
                    self.result = message.result
            case RankFinished():
                self.attempt.finished[sender] = message
                if not isinstance(message.error, OtherRankError):
                    self.ranks.end(sender)  # ranks that wait for it then fail at once
            case RankDied():
                self.handle_death(message)
            case JobFinished():
                self.end = message

    def handle_death(self, died: RankDied) -> None:
        """Record the death of ranks; later messages of their peers are ignored."""
        if self.attempt.reason is not None:
            return  # it was killed because of its error
        self.last_death = self.attempt.describe_lost(died.ranks)
        self.ignored_senders |= {*died.senders, *self.attempt.started}
        for _, stack in self.shown.values():
            stack.close()
        self.shown.clear()
        self.attempt = Attempt()
        self.deaths += 1
        if self.deaths <= self.max_failures:
            details = (self.last_death, self.work.again, self.deaths, self.max_failures)
            logger.warning("%s; all are restarted %s (%d of %d times)", *details)

    def check_end(self) -> None:
        """Raise an error if the job ended before its ranks finished."""
        reason = self.end.reason if self.end is not None else None
        if reason is None:
            return
        if self.end is not None and self.end.is_death:
            raise self.work.error(
                f"{self.last_death}, and backend.max_failures: {self.max_failures} allows no further start; "
                f"{self.work.advice}"
            )
        raise self.work.error(f"Ray has ended the {self.work.name}: {reason}; {self.work.advice}")

    def open(self, sender: str, opened: ProgressOpened) -> None:
        """Show a progress display."""
        stack = self.displays.enter_context(ExitStack())
        display = show_progress(opened.total, opened.description, completed=opened.completed, quiet=self.quiet)
        self.shown[sender, opened.number] = stack.enter_context(display), stack

    def check_timeouts(self) -> None:
        """Raise JobError if ranks do not start in time."""
        attempt = self.attempt
        if not attempt.is_whole and self.end is None and time.monotonic() - attempt.since > self.timeout:
            available = ", ".join(f"{amount:g} {name}" for name, amount in self.ranks.resources().items())
            raise JobError(
                f"{len(attempt.started)} of {self.workers} workers have started within {self.timeout:,.0f} s "
                f"(backend.timeout_seconds). In all there are {available or 'no machines'}: write a smaller "
                "backend.workers, add machines, or write a longer time"
            )
