"""Aggregate results of dialogues: counts, and means without failed dialogues and with failures as 0, each with its n.

A failed dialogue has no reward and no metrics. Excluding it favors an agent whose dialogues break when they go badly;
counting it as 0 penalizes the agent for a broken environment. Both means are therefore reported.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from partita.data.episode import Episode, successes

ScoreTurns = Callable[[Sequence[Episode]], dict[str, float]]


@dataclass(frozen=True)
class MeanOfTasks:
    """A mean over dialogues."""

    mean: float
    """Mean without failed dialogues."""
    n: int
    """Number of dialogues in `mean`."""
    with_failures: float
    """Mean with failed dialogues as 0."""
    n_with_failures: int
    """Number of dialogues in `with_failures`."""


@dataclass(frozen=True)
class RolloutOutcomes:
    """The aggregate results of one history."""

    dialogues: int
    """Number of dialogues."""
    statuses: dict[str, int]
    """Number of dialogues by status and reason, where the reason ends at its first colon."""
    turns: float
    """Mean number of model answers over dialogues that did not fail."""
    means: dict[str, MeanOfTasks]
    """`reward`, `success`, `exact_turns`, `exact_last`, and metrics of the environment and the checker."""
    by_turn: dict[int, MeanOfTasks] = field(default_factory=dict)
    """Share of right answers by turn, from 1, for turns with a known right answer."""
    repeats: int = 1
    """Number of dialogues per task."""
    pass_at_k: float | None = None
    """Share of tasks with at least one successful repeat; None without repeats."""
    pass_hat_k: float | None = None
    """Share of tasks whose repeats all succeeded; None without repeats."""
    outputs: dict[str, float] = field(default_factory=dict)
    """Metrics of a turn's outputs over all turns with a known right answer, as `output.metric`."""

    @property
    def failed(self) -> int:
        """Number of dialogues that failed."""
        return sum(count for status, count in self.statuses.items() if status.partition(":")[0] == "failed")


@dataclass(frozen=True)
class SimulationReport:
    """The results of a simulation, by history."""

    histories: dict[str, RolloutOutcomes]
    """Results by history: `gold`, `predicted`."""
    folder: str
    """Folder of the transcripts."""

    @property
    def all_failed(self) -> bool:
        """Whether there are dialogues, and none that did not fail."""
        counts = [(outcomes.dialogues, outcomes.failed) for outcomes in self.histories.values()]
        return any(episodes for episodes, _ in counts) and all(episodes == failed for episodes, failed in counts)

    def record(self) -> dict[str, Any]:
        """Return the report as a JSON-compatible dictionary."""
        return asdict(self)

    def flat(self) -> dict[str, dict[str, float]]:
        """Return the column of numbers of each history."""
        return {history: column(outcomes) for history, outcomes in self.histories.items()}


def column(outcomes: RolloutOutcomes) -> dict[str, float]:
    """Return the numbers of a history by name, for a table."""
    numbers: dict[str, float] = {"dialogues.n": outcomes.dialogues}
    numbers |= {f"{name}.n": count for name, count in sorted(outcomes.statuses.items())}
    for name, value in outcomes.means.items():
        numbers[name] = value.mean
        if value.n != value.n_with_failures:
            numbers[f"{name}, failures as 0"] = value.with_failures
    numbers["turns"] = outcomes.turns
    numbers |= {f"exact, turn {turn}": value.mean for turn, value in outcomes.by_turn.items()}
    numbers |= outcomes.outputs
    if outcomes.pass_at_k is not None and outcomes.pass_hat_k is not None:
        numbers |= {f"pass@{outcomes.repeats}": outcomes.pass_at_k, f"pass^{outcomes.repeats}": outcomes.pass_hat_k}
    return numbers


def outcomes_of(episodes: Sequence[Episode], *, repeats: int, score: ScoreTurns | None = None) -> RolloutOutcomes:
    """Aggregate the episodes of one history.

    Args:
        episodes: The episodes.
        repeats: Number of dialogues per task.
        score: Returns the metrics of turns with several outputs; None if a turn is only a text.
    """
    statuses: dict[str, int] = defaultdict(int)
    values: dict[str, list[float]] = defaultdict(list)
    turns: dict[int, list[float]] = defaultdict(list)
    for episode, success in zip(episodes, successes(episodes), strict=True):
        reason = f": {episode.reason.partition(':')[0]}" if episode.reason else ""
        statuses[f"{episode.status}{reason}"] += 1
        if episode.status == "failed":
            continue
        for name, value in numbers_of(episode, success=success).items():
            values[name].append(value)
        for number, reply in enumerate(episode.replies, start=1):
            if reply.exact is not None:
                turns[number].append(float(reply.exact))
    failed = sum(episode.status == "failed" for episode in episodes)
    lengths = [len(episode.replies) for episode in episodes if episode.status != "failed"]
    passed = pass_rates(episodes) if repeats > 1 else None
    return RolloutOutcomes(
        dialogues=len(episodes),
        statuses=dict(statuses),
        turns=sum(lengths) / len(lengths) if lengths else 0.0,
        means={name: mean(numbers, failed=failed) for name, numbers in values.items()},
        by_turn={turn: mean(numbers, failed=0) for turn, numbers in sorted(turns.items())},
        repeats=repeats,
        pass_at_k=passed[0] if passed is not None else None,
        pass_hat_k=passed[1] if passed is not None else None,
        outputs=score(episodes) if score is not None else {},
    )


def numbers_of(episode: Episode, *, success: bool | None) -> dict[str, float]:
    """Return the numbers of a dialogue that did not fail, by name.

    Args:
        episode: The dialogue.
        success: Whether it succeeded, by `successes`.
    """
    numbers: dict[str, float] = {}
    if episode.reward is not None:
        numbers["reward"] = episode.reward
    if success is not None:
        numbers["success"] = float(success)
    exact = [reply.exact for reply in episode.replies if reply.exact is not None]
    if exact:
        numbers["exact_turns"] = sum(exact) / len(exact)
        if episode.replies[-1].exact is not None:
            numbers["exact_last"] = float(episode.replies[-1].exact)
    if episode.rounds:
        numbers["rounds"] = float(episode.rounds)
    return numbers | episode.metrics


def mean(values: Sequence[float], *, failed: int) -> MeanOfTasks:
    """Return the mean of `values`, without and with `failed` additional zeros."""
    total = sum(values)
    return MeanOfTasks(total / len(values), len(values), total / (len(values) + failed), len(values) + failed)


def pass_rates(episodes: Sequence[Episode]) -> tuple[float, float] | None:
    """Return the shares of tasks with any and with all repeats successful; None if the success of one is unknown."""
    tasks: dict[str, list[bool]] = defaultdict(list)
    for episode, success in zip(episodes, successes(episodes), strict=True):
        if success is None:
            return None
        tasks[episode.task_key].append(success)
    if not tasks:
        return None
    return sum(map(any, tasks.values())) / len(tasks), sum(map(all, tasks.values())) / len(tasks)
