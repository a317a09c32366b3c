"""What dialogues came to: counts, and means with failures left out and with failures as 0, each with its n.

A dialogue that failed has no reward and no metrics. To leave it out flatters an agent whose dialogues break when they
go badly; to count it as 0 blames it for a broken environment. So both are told.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from partita.data.episode import Episode


@dataclass(frozen=True)
class MeanOfTasks:
    """A mean over dialogues."""

    mean: float
    """Failed dialogues left out."""
    n: int
    """Dialogues that it is over."""
    with_failures: float
    """Failed dialogues as 0."""
    n_with_failures: int
    """Dialogues that this is over."""


@dataclass(frozen=True)
class RolloutOutcomes:
    """What the dialogues of one history came to."""

    dialogues: int
    statuses: dict[str, int]
    """How many, by status and reason up to the first colon."""
    turns: float
    """Answers of the model, on average over dialogues that did not fail."""
    means: dict[str, MeanOfTasks]
    """`reward`, `success`, `exact_turns`, `exact_last`, and metrics of the environment and the checker."""
    by_turn: dict[int, MeanOfTasks] = field(default_factory=dict)
    """Share of right answers by turn, from 1, where they are known."""
    repeats: int = 1
    pass_at_k: float | None = None
    """Share of tasks of which a repeat succeeded; None without repeats."""
    pass_hat_k: float | None = None
    """Share of tasks of which all repeats succeeded; None without repeats."""


@dataclass(frozen=True)
class SimulationReport:
    """What a simulation came to, by history."""

    histories: dict[str, RolloutOutcomes]
    folder: str
    """Where the transcripts are."""

    def record(self) -> dict[str, Any]:
        """As JSON."""
        from dataclasses import asdict

        return asdict(self)

    def flat(self) -> dict[str, dict[str, float]]:
        """A column of numbers for each history."""
        return {history: column(outcomes) for history, outcomes in self.histories.items()}


def column(outcomes: RolloutOutcomes) -> dict[str, float]:
    """Numbers by name, for a table."""
    found: dict[str, float] = {"dialogues.n": outcomes.dialogues}
    found |= {f"{name}.n": count for name, count in sorted(outcomes.statuses.items())}
    for name, value in outcomes.means.items():
        found[name] = value.mean
        if value.n != value.n_with_failures:
            found[f"{name}, failures as 0"] = value.with_failures
    found["turns"] = outcomes.turns
    found |= {f"exact, turn {turn}": value.mean for turn, value in outcomes.by_turn.items()}
    if outcomes.pass_at_k is not None and outcomes.pass_hat_k is not None:
        found |= {f"pass@{outcomes.repeats}": outcomes.pass_at_k, f"pass^{outcomes.repeats}": outcomes.pass_hat_k}
    return found


def outcomes_of(dialogues: Sequence[Episode], *, repeats: int) -> RolloutOutcomes:
    """What dialogues of one history came to."""
    statuses: dict[str, int] = defaultdict(int)
    values: dict[str, list[float]] = defaultdict(list)
    turns: dict[int, list[float]] = defaultdict(list)
    for dialogue in dialogues:
        reason = f": {dialogue.reason.partition(':')[0]}" if dialogue.reason else ""
        statuses[f"{dialogue.status}{reason}"] += 1
        if dialogue.status == "failed":
            continue
        for name, value in numbers_of(dialogue).items():
            values[name].append(value)
        for number, reply in enumerate(dialogue.replies, start=1):
            if reply.exact is not None:
                turns[number].append(float(reply.exact))
    failed = sum(dialogue.status == "failed" for dialogue in dialogues)
    kept = [len(dialogue.replies) for dialogue in dialogues if dialogue.status != "failed"]
    passed = passes(dialogues) if repeats > 1 else None
    return RolloutOutcomes(
        dialogues=len(dialogues),
        statuses=dict(statuses),
        turns=sum(kept) / len(kept) if kept else 0.0,
        means={name: mean(found, failed=failed) for name, found in values.items()},
        by_turn={number: mean(found, failed=0) for number, found in sorted(turns.items())},
        repeats=repeats,
        pass_at_k=passed[0] if passed is not None else None,
        pass_hat_k=passed[1] if passed is not None else None,
    )


def numbers_of(episode: Episode) -> dict[str, float]:
    """Numbers of a dialogue that did not fail."""
    found: dict[str, float] = {}
    if episode.reward is not None:
        found["reward"] = episode.reward
    if episode.succeeded is not None:
        found["success"] = float(episode.succeeded)
    exact = [reply.exact for reply in episode.replies if reply.exact is not None]
    if exact:
        found["exact_turns"] = sum(exact) / len(exact)
        if episode.replies[-1].exact is not None:
            found["exact_last"] = float(episode.replies[-1].exact)
    if episode.rounds:
        found["rounds"] = float(episode.rounds)
    return found | episode.metrics


def mean(values: Sequence[float], *, failed: int) -> MeanOfTasks:
    """A mean, without and with so many zeros."""
    total = sum(values)
    return MeanOfTasks(total / len(values), len(values), total / (len(values) + failed), len(values) + failed)


def passes(dialogues: Sequence[Episode]) -> tuple[float, float] | None:
    """Shares of tasks of which some and all repeats succeeded; None where success is not known of every task."""
    tasks: dict[str, list[bool]] = defaultdict(list)
    for dialogue in dialogues:
        if dialogue.succeeded is None:
            return None
        tasks[dialogue.task_key].append(dialogue.succeeded)
    if not tasks:
        return None
    return sum(map(any, tasks.values())) / len(tasks), sum(map(all, tasks.values())) / len(tasks)
