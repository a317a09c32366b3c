"""Roll out the episodes of one history on all ranks of a process group, each episode on one rank.

There are no collectives during the rollout. Ranks finish turns at different times, so a collective would wait for the
slowest rank or be matched with a different call on another rank. Instead, ranks take episodes from a shared counter and
report progress and stop requests through further counters. At the end, one `all_gather_object` collects a summary of
each rank.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from partita.data.episode import Episode
from partita.generation.oom_backoff import BatchBudget
from partita.generation.work_queue import WorkQueue, drain
from partita.runs.progress import ShowProgress
from partita.simulation.reward_checker import RewardChecker
from partita.simulation.rollout import Rollout
from partita.simulation.transcripts import Transcripts
from partita.simulation.turns import log_prompt_counts
from partita_schema.common.text import counted
from partita_schema.errors import SimulationError
from partita_schema.sections.simulation import Limits
from partita_trainers.base import Progress
from partita_trainers.interrupt import interruption
from partita_trainers.process_group import ProcessGroup, synchronized_errors

logger = logging.getLogger(__name__)

MIN_ENDED = 20
"""Number of finished episodes from which `limits.fail_fraction` applies."""
STOP_POLL_SECONDS = 0.25
"""Interval at which the stop requests of other ranks are read, in seconds."""


class RolloutProgress:
    """Progress of all ranks, kept in shared counters."""

    def __init__(self, process_group: ProcessGroup, *, ended: int, failed: int) -> None:
        """Create the shared counters; all ranks must do so at the same point.

        Args:
            process_group: The ranks.
            ended: Number of episodes that ended in earlier runs.
            failed: Number of them that failed.
        """
        self.is_single = process_group.world_size == 1
        self.before = (ended, failed)
        """Episodes that ended in earlier runs, and those of them that failed."""
        self.count_ended = process_group.shared_counter("dialogues that ended")
        self.count_failed = process_group.shared_counter("dialogues that failed")
        self.count_turns = process_group.shared_counter("answers of the model")
        self.count_stops = process_group.shared_counter("processes that end the simulation")
        self.mine = (0, 0)
        """Episodes that ended on this rank in this run, and those of them that failed."""
        self.stops = False
        """Whether a rank has requested a stop, as far as this rank knows."""
        self.last_poll = time.monotonic()

    def update(self, *, failed: bool, turns: int) -> tuple[int, int, int]:
        """Count an episode that ended on this rank.

        Args:
            failed: Whether it failed.
            turns: Number of the model's answers in it.

        Returns:
            Episodes of all ranks that ended, those of them that failed, and answers of all ranks in this run.
        """
        self.mine = (self.mine[0] + 1, self.mine[1] + failed)
        # A counter returns its value before the addition.
        return (
            self.before[0] + self.count_ended(1) + 1,
            self.before[1] + self.count_failed(int(failed)) + int(failed),
            self.count_turns(turns) + turns,
        )

    def stop(self) -> None:
        """Request a stop of all ranks."""
        self.stops = True
        self.count_stops(1)

    def is_stopping(self) -> bool:
        """Return whether a rank has requested a stop."""
        # Called before every step; reading a shared counter each time would be slow.
        if not (self.stops or self.is_single) and time.monotonic() - self.last_poll >= STOP_POLL_SECONDS:
            self.stops = self.count_stops(0) > 0
            self.last_poll = time.monotonic()
        return self.stops


@dataclass(frozen=True)
class WorkerSummary:
    """Final state of one rank, or the sum of all.

    It contains everything that is needed to report the end, since the shared counters are lost when the first rank
    exits.
    """

    ended: int
    """Number of episodes that ended."""
    failed: int
    """Number of them that failed."""
    interrupted: bool
    """Whether a rank was interrupted."""
    too_many: bool
    """Whether a rank found that more than `limits.fail_fraction` of all episodes failed."""
    reason: str | None
    """Reason of a last failure on a rank."""


def rollout(
    episodes: Sequence[Episode],
    transcripts: Transcripts,
    *,
    begin: Callable[..., Rollout],
    budget: BatchBudget,
    limits: Limits,
    name: str,
    progress: ShowProgress,
    checker: RewardChecker | None = None,
    process_group: ProcessGroup,
) -> None:
    """Run the episodes that are not in the transcripts yet, in the given order, and save them there.

    Args:
        episodes: All episodes, the same on every rank.
        transcripts: Transcripts of this rank.
        begin: Creates a rollout from `budget` and `stopping`.
        budget: Batch budget of the main agent; lowered when memory runs out.
        limits: `fail_fraction` limits the failed episodes.
        name: Name of the progress display.
        progress: Creates the progress display.
        checker: Judges finished episodes by a reward model.
        process_group: The ranks that share the episodes.

    Raises:
        SimulationError: Too many episodes failed. Finished episodes are saved.
        KeyboardInterrupt: A rank was interrupted before all episodes ended. Finished episodes are saved.
    """
    remaining, shared_progress = remaining_episodes(episodes, transcripts, limits=limits, process_group=process_group)
    claims = WorkQueue(len(remaining), process_group=process_group)
    limit_to_share(budget, len(remaining), ranks=process_group.world_size)
    with (
        interruption("finishing the answers in progress") as interrupt,
        progress(len(episodes), name, completed=shared_progress.before[0]) as display,
    ):
        with synchronized_errors(process_group, "the dialogues"), stop_all_on_error(shared_progress):
            rollout = begin(budget=budget, stopping=lambda: interrupt.requested or shared_progress.is_stopping())
            # Lazy: the rollout takes an episode from the shared counter only when it can start one.
            claimed = (remaining[index] for index in drain(claims))
            save = partial(record, shared_progress=shared_progress, display=display, limits=limits, checker=checker)
            shown, too_many = save(rollout, claimed, transcripts)
            if interrupt.requested or too_many:
                shared_progress.stop()
        mine = WorkerSummary(*shared_progress.mine, interrupt.requested, too_many, transcripts.last_failure)
        total = gather_summaries(mine, transcripts, before=shared_progress.before, process_group=process_group)
        if total.ended > shown:
            display.advance(total.ended - shown)
    log_prompt_counts(rollout.encoders)
    if total.too_many:
        error = too_many_failed(total, limits=limits, folder=transcripts.path.parent)
        process_group.raise_if_any_failed(error, "the share of failures")
    if total.ended < len(episodes) and total.interrupted:
        logger.info("%s of %s saved", f"{total.ended:,}", counted(len(episodes), "dialogue"))
        raise KeyboardInterrupt


def remaining_episodes(
    episodes: Sequence[Episode], transcripts: Transcripts, *, limits: Limits, process_group: ProcessGroup
) -> tuple[list[Episode], RolloutProgress]:
    """Return the episodes that are still to be run, and the progress of all ranks so far.

    If a simulation is resumed, failed episodes are run again, unless all episodes ended and no more of them failed than
    `limits` allows.

    Args:
        episodes: All episodes, the same on every rank.
        transcripts: Transcripts of this rank; those of rank 0 count.
        limits: `fail_fraction` limits the failed episodes.
        process_group: The ranks that share the episodes.
    """
    saved = process_group.run_on_rank_zero(
        lambda: {key: done.status for key, done in transcripts.done.items()}, "the dialogues finished before"
    )
    finished = {key for key, status in saved.items() if status != "failed"}
    failed = len(saved) - len(finished)
    if all(episode.key in saved for episode in episodes) and not exceeds(failed, len(saved), limits):
        return [], RolloutProgress(process_group, ended=len(saved), failed=failed)
    if saved:
        again = f"; {counted(failed, 'failed one', 'failed ones')} run again" if failed else ""
        logger.info("%s of %s already finished%s", f"{len(finished):,}", counted(len(episodes), "dialogue"), again)
    remaining = [episode for episode in episodes if episode.key not in finished]
    return remaining, RolloutProgress(process_group, ended=len(finished), failed=0)


def limit_to_share(budget: BatchBudget, remaining: int, *, ranks: int) -> None:
    """Lower the batch size so that no rank runs more than its share of the remaining episodes at once."""
    # Otherwise, with few episodes, the first rank would take all of them.
    budget.batch_size = max(1, min(budget.batch_size, -(-remaining // ranks)))
    # Each episode has room for its longest prompt, so shorter ones make no room for more.
    budget.token_budget = None


def gather_summaries(
    mine: WorkerSummary, transcripts: Transcripts, *, before: tuple[int, int], process_group: ProcessGroup
) -> WorkerSummary:
    """Return the sum of the final states of all ranks, with the episodes of earlier runs.

    Args:
        mine: Final state of this rank.
        transcripts: Transcripts of this rank; closed on other ranks than 0, which merges the files afterwards.
        before: Number of episodes that ended in earlier runs, and of those that failed.
        process_group: The ranks that share the episodes.
    """
    if process_group.rank > 0:
        transcripts.close()  # before the collective
    ranks = process_group.all_gather_object(mine, "the end of the dialogues")
    return WorkerSummary(
        ended=before[0] + sum(rank.ended for rank in ranks),
        failed=before[1] + sum(rank.failed for rank in ranks),
        interrupted=any(rank.interrupted for rank in ranks),
        too_many=any(rank.too_many for rank in ranks),
        reason=next((rank.reason for rank in ranks if rank.reason is not None), None),
    )


def exceeds(failed: int, ended: int, limits: Limits) -> bool:
    """Return whether more of the episodes that ended have failed than `limits.fail_fraction` allows."""
    return ended >= MIN_ENDED and failed > limits.fail_fraction * ended


def too_many_failed(total: WorkerSummary, *, limits: Limits, folder: Path) -> SimulationError:
    """Return the error for a simulation in which too many episodes failed; their transcripts are in `folder`."""
    return SimulationError(
        f"{total.failed} of {counted(total.ended, 'dialogue')} failed, more than limits.fail_fraction: "
        f"{limits.fail_fraction:g} allows; the last one: {total.reason}. Finished dialogues are saved in {folder}; "
        "the same command runs the others and the failed ones"
    )


def record(
    rollout: Rollout,
    episodes: Iterator[Episode],
    transcripts: Transcripts,
    *,
    shared_progress: RolloutProgress,
    display: Progress,
    limits: Limits,
    checker: RewardChecker | None = None,
) -> tuple[int, bool]:
    """Save episodes as they end, until all have ended or too many have failed.

    Args:
        rollout: Runs the episodes.
        episodes: Episodes for this rank.
        transcripts: Transcripts of this rank.
        shared_progress: Progress of all ranks.
        display: Progress display.
        limits: `fail_fraction` limits the failed episodes.
        checker: Judges finished episodes by a reward model.

    Returns:
        Number of finished episodes of all ranks that the display shows, and whether too many have failed.
    """
    started, shown = time.perf_counter(), shared_progress.before[0]
    for episode in rollout.run(episodes):
        if checker is not None:
            checker.check(episode)
        transcripts.add(episode)
        ended, failed, turns = shared_progress.update(failed=episode.status == "failed", turns=len(episode.replies))
        rate = turns / (time.perf_counter() - started)
        display.advance(ended - shown, live=len(rollout.active), failed=failed, turns_per_second=rate)
        shown = ended
        if exceeds(failed, ended, limits):
            return shown, True
    return shown, False


@contextmanager
def stop_all_on_error(shared_progress: RolloutProgress) -> Iterator[None]:
    """Request a stop of all ranks when the block raises."""
    try:
        yield
    except Exception:
        with suppress(Exception):  # the counters are lost if other ranks have exited, which then need no request
            shared_progress.stop()
        raise
