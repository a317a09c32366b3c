"""What the process of a command makes of ranks that run elsewhere: it shows what they tell, and ends as they do."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from partita.distributed.event_queue import (
    JobFinished,
    Message,
    Posted,
    ProgressClosed,
    ProgressMoved,
    ProgressOpened,
    RankDied,
    RankFinished,
    RankLogged,
    RankStarted,
)
from partita.runs.progress import show_progress
from partita_schema.errors import JobError, OtherRankError, TrainingError
from partita_trainers.interrupt import interruption

logger = logging.getLogger(__name__)

GLANCE_SECONDS = 0.2
"""Time after which it is looked whether the job is to stop, where nothing happens."""
END_SECONDS = 5.0
"""Time that ranks have to end by themselves once one of them has."""


class RankLauncher(Protocol):
    """Ranks that somebody starts, and starts again where one is gone."""

    def poll(self, timeout_seconds: float) -> Sequence[Posted]:
        """What has been told since, with the name of who told it; may be nothing."""

    def stop(self) -> None:
        """Let all ranks know that they are to stop. None is started again."""

    def end(self, sender: str) -> None:
        """End the process of a rank."""

    def close(self) -> None:
        """End all that is left, and wait until it is gone, for a few seconds."""

    def resources(self) -> Mapping[str, float]:
        """What there is to run ranks on, in all."""


@dataclass
class Attempt:
    """The ranks that work together, from their start to their end or to the death of one."""

    came: dict[str, RankStarted] = field(default_factory=dict)
    left: dict[str, RankFinished] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)

    @property
    def errors(self) -> list[BaseException]:
        """What ranks have ended with."""
        return [left.error for left in self.left.values() if left.error is not None]

    @property
    def reason(self) -> BaseException | None:
        """What a rank has ended with by itself; None where all have ended with others, or not at all."""
        return next((error for error in self.errors if not isinstance(error, OtherRankError)), None)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks are there."""
        return bool(self.came) and len(self.came) == next(iter(self.came.values())).ranks

    def gone(self, ranks: Sequence[int]) -> str:
        """That these ranks are gone, for what is said to people; not those that have told of their end."""
        silent = {came.rank: came for sender, came in self.came.items() if sender not in self.left}
        missing = [silent[rank] for rank in sorted(ranks) if rank in silent]
        names = [f"rank {came.rank} (process {came.process} on {came.node})" for came in missing]
        return f"{' and '.join(names) or 'a worker'} {'are' if len(names) > 1 else 'is'} gone"


def follow(
    ranks: RankLauncher,
    *,
    workers: int,
    max_failures: int,
    timeout_seconds: float,
    quiet: bool,
    again: str = "at the newest checkpoint",
    end_seconds: float = END_SECONDS,
) -> Any:
    """What rank 0 has made. Raises what a rank has ended with; TrainingError where ranks die too often.

    Where one is gone all start `again`, as that says. Once one has ended with an error the others have `end_seconds` to
    end by themselves. Ctrl-C and SIGTERM stop the ranks behind their step; a second one ends them at once.
    """
    follower = RankMonitor(
        ranks,
        workers,
        max_failures=max_failures,
        timeout_seconds=timeout_seconds,
        quiet=quiet,
        again=again,
        end_seconds=end_seconds,
    )
    stopping = False
    try:
        with interruption("stopping after this step") as asked, follower.displays:
            while follower.end is None:
                follower.look()
                if asked.asked and not stopping:
                    ranks.stop()
                    stopping = True
                if stopping and (follower.end is not None or not follower.attempt.came):
                    raise KeyboardInterrupt
    finally:
        ranks.close()
    follower.check_end()
    return follower.result


class RankMonitor:
    """The process that people look at."""

    def __init__(
        self,
        ranks: RankLauncher,
        workers: int,
        *,
        max_failures: int,
        timeout_seconds: float,
        quiet: bool,
        again: str,
        end_seconds: float,
    ) -> None:
        self.ranks, self.workers, self.max_failures = ranks, workers, max_failures
        self.timeout, self.quiet, self.again = timeout_seconds, quiet, again
        self.end_seconds = end_seconds
        self.attempt = Attempt()
        self.given_up: set[str] = set()
        self.deaths = 0
        self.displays = ExitStack()
        self.shown: dict[tuple[str, int], tuple[Any, ExitStack]] = {}
        self.last_gone = ""
        self.ended_at: float | None = None
        """When the first rank has ended by itself."""
        self.end: JobFinished | None = None
        self.result: Any = None

    def look(self) -> None:
        """Take in what has happened. Raises what a rank has ended with, once the others have ended as well."""
        for sender, message in self.ranks.poll(GLANCE_SECONDS):
            if sender not in self.given_up:
                self.handle_event(sender, message)
        reason = self.attempt.reason
        if reason is None:
            self.check_timeouts()
            return
        self.ended_at = self.ended_at or time.monotonic()
        late = time.monotonic() - self.ended_at > self.end_seconds
        if late or len(self.attempt.left) == len(self.attempt.came) or self.end is not None:
            raise reason

    def handle_event(self, sender: str, message: Message | RankDied | JobFinished) -> None:
        """Show or remember what was told."""
        match message:
            case RankStarted():
                self.attempt.came[sender] = message
            case RankLogged():
                logging.getLogger(message.logger).log(message.level, "%s", message.text)
            case ProgressOpened():
                self.open(sender, message)
            case ProgressMoved():
                self.shown[sender, message.number][0].advance(message.amount, **message.shown)
            case ProgressClosed():
                self.shown.pop((sender, message.number))[1].close()
            case RankFinished(error=None):
                self.attempt.left[sender] = message
                if self.attempt.came[sender].rank == 0:
                    self.result = message.result
            case RankFinished():
                self.attempt.left[sender] = message
                if not isinstance(message.error, OtherRankError):
                    self.ranks.end(sender)  # those that wait for it need not wait longer
            case RankDied():
                self.lose(message)
            case JobFinished():
                self.end = message

    def lose(self, died: RankDied) -> None:
        """Ranks are gone; what others say of it is not shown."""
        if self.attempt.reason is not None:
            return  # it was ended
        self.last_gone = self.attempt.gone(died.ranks)
        self.given_up |= {*died.senders, *self.attempt.came}
        for _, stack in self.shown.values():
            stack.close()
        self.shown.clear()
        self.attempt = Attempt()
        self.deaths += 1
        if self.deaths <= self.max_failures:
            told = (self.last_gone, self.again, self.deaths, self.max_failures)
            logger.warning("%s; all start again %s (%d of %d times)", *told)

    def check_end(self) -> None:
        """Raises TrainingError where it ended before its ranks were done."""
        reason = self.end.reason if self.end is not None else None
        if reason is None:
            return
        if self.end is not None and self.end.is_death:
            raise TrainingError(
                f"{self.last_gone}, and backend.max_failures: {self.max_failures} allows no further start; "
                "what was saved is kept, start the same command again to go on"
            )
        raise TrainingError(f"Ray has ended the training: {reason}")

    def open(self, sender: str, opened: ProgressOpened) -> None:
        """Show a progress display."""
        stack = self.displays.enter_context(ExitStack())
        display = show_progress(opened.total, opened.description, completed=opened.completed, quiet=self.quiet)
        self.shown[sender, opened.number] = stack.enter_context(display), stack

    def check_timeouts(self) -> None:
        """Raises JobError where ranks that are to start do not come."""
        attempt = self.attempt
        if not attempt.is_whole and self.end is None and time.monotonic() - attempt.since > self.timeout:
            told = ", ".join(f"{amount:g} {name}" for name, amount in self.ranks.resources().items())
            raise JobError(
                f"{len(attempt.came)} of {self.workers} workers have started within {self.timeout:,.0f} s "
                f"(backend.timeout_seconds). In all there are {told or 'no machines'}: write a smaller "
                "backend.workers, add machines, or write a longer time"
            )
