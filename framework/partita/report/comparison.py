"""Comparison of runs: what differs in their configurations, and their metrics on the same rows, pair by pair."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.report.agreement import Agreement, agreement_of
from partita.report.comparable_losses import incomparable_rewards, notes_of_rewards, origin_of, why_not_comparable
from partita.report.compared_rows import ComparedRows, load_rows
from partita.report.disagreements import Disagreement, balanced, disagreements
from partita.report.measures import READABLE, MetricEstimate, main_measure, measure_rows
from partita.report.row_shares import EPISODE, SUCCESS
from partita.report.simulated import ROUND, transcript_files
from partita.runs.listing import RunSummary, is_run, main_metrics, read_summary
from partita.runs.manifest import sibling_runs
from partita.runs.settings import leaves
from partita_schema.common.text import counted
from partita_schema.errors import DataError
from partita_schema.sections.outputs import METRICS_BY_NAME

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["run", "metric", "first", "second", "difference", "low", "high", "p", "test", "verdict"]
"""Columns of the table of a comparison."""
EXAMPLES = 10
"""Rows in which two runs differ that are listed by default."""


@dataclass(frozen=True)
class PairComparison:
    """A run against the reference run."""

    run: str
    """Name of the run."""
    metrics: list[MetricEstimate]
    """Its metrics against those of the reference run, on the same rows."""
    main: MetricEstimate | None
    """The metric that describes the runs best, as in the list of runs; None without a metric."""
    agreement: list[Agreement]
    """Rows that are right, by output."""
    disagreements: list[Disagreement]
    """Some rows with different values, in turns of which run is better."""
    num_disagreements: int
    """Number of rows with a different value, of which `disagreements` has some."""


@dataclass(frozen=True)
class Comparison:
    """Two or more runs; the first one is the reference."""

    runs: list[str]
    """Names of the runs."""
    settings: dict[str, list[Any]] | None
    """Keys whose values differ, with the value of each run; None if a run did not record its configuration."""
    recorded: dict[str, list[float | None]]
    """Metrics that the runs recorded, as `split.metric`, with the value of each run."""
    split: str | None
    """What was compared row by row; None if the runs have no results of rows in common."""
    rows: int
    """Number of rows that were compared."""
    pairs: list[PairComparison]
    """Each other run against the reference."""
    notes: list[str]
    """What a reader has to know: rows that are not common, and several comparisons at once."""

    @property
    def subject(self) -> str:
        """What was compared row by row, such as `380 rows of test` or `30 dialogues with predicted history`."""
        if any(one.output == EPISODE for pair in self.pairs for one in pair.agreement):
            dialogues, split = counted(self.rows, "dialogue"), str(self.split)
            if split.startswith(ROUND):
                return f"{dialogues} of round {split.removeprefix(ROUND)}, with the weights before its training"
            return f"{dialogues} with {split} history"
        return f"{counted(self.rows, 'row')} of {self.split}"

    def __str__(self) -> str:
        """Return a line for each metric of each other run against the reference, and the notes."""
        lines = list[str]()
        for pair in self.pairs:
            lines.append(f"{pair.run} against {self.runs[0]}, {self.subject}")
            lines += [f"  {metric}" for metric in pair.metrics]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the comparison as IPython and notebooks show it."""
        printer.text(str(self))

    def record(self) -> dict[str, Any]:
        """Return the comparison as a JSON-compatible dictionary."""
        pairs = [
            asdict(pair)
            | {"main": None if pair.main is None else pair.main.metric}
            | {"metrics": [metric.record() | {"verdict": metric.verdict} for metric in pair.metrics]}
            for pair in self.pairs
        ]
        return asdict(self) | {"pairs": pairs}

    def frame(self) -> "pd.DataFrame":
        """Return a table with one row per run and metric: values, difference, interval, p-value and verdict."""
        import pandas as pd

        rows = [
            {"run": pair.run} | metric.record() | {"verdict": metric.verdict}
            for pair in self.pairs
            for metric in pair.metrics
        ]
        return pd.DataFrame(rows, columns=COLUMNS)


def compare_runs(
    folders: Sequence[str | Path], *, split: str | None = None, max_examples: int = EXAMPLES
) -> Comparison:
    """Compare runs; the first one is the reference.

    Args:
        folders: Two or more run directories.
        split: The evaluation to compare row by row, such as `test`, or the history of a simulation, such as
            `predicted`. Default: the first one that all runs have.
        max_examples: Maximum number of rows that are listed for each pair.

    Raises:
        DataError: Less than two runs, a folder that is none, no such split, or no common rows.
        PartitaError: The manifest of a round of self-training is damaged.
    """
    paths = [Path(folder) for folder in folders]
    check_runs(paths)
    runs = [read_summary(path, name=name) for path, name in zip(paths, names_of(paths), strict=True)]
    for run in runs:
        if run.status == "unreadable":
            raise DataError(str(run.problem))
    unknown = [run.name for run in runs if not run.config]
    compared = load_rows(runs, split=split)
    losses = comparable_losses(runs, compared)
    rewards = {number: incomparable_rewards(runs[0], run) for number, run in enumerate(runs) if number}
    pairs = [
        compare_pair(
            compared,
            number,
            wanted=main_metrics_of(runs[0]),
            left_out=(*rewards[number][0], *(["loss"] if losses[number] is not None else [])),
            max_examples=max_examples,
        )
        for number in range(1, len(compared.evaluations))
    ]
    return Comparison(
        runs=[run.name for run in runs],
        settings=differing([settings_of(run) for run in runs]) if not unknown else None,
        recorded=recorded_metrics(runs),
        split=compared.split,
        rows=compared.rows,
        pairs=pairs,
        notes=[
            *compared.notes,
            *notes_of_losses(losses, compared.names),
            *notes_of_rewards(rewards, compared.names, compared.evaluations),
            *note_of_settings(unknown),
            *note_of_tests(pairs),
        ],
    )


def check_runs(paths: Sequence[Path]) -> None:
    """Raise DataError unless there are two or more different runs."""
    if len(paths) < 2:
        raise DataError("there is nothing to compare; name two runs or more, the reference first")
    for path in paths:
        if not path.is_dir() or not (is_run(path) or transcript_files(path)):
            raise DataError(f"{path} is not a run directory{sibling_runs(path)}")
    twice = [path for path, count in Counter(path.resolve() for path in paths).items() if count > 1]
    if twice:
        raise DataError(f"{twice[0]} is named twice; name different runs")


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that are different names."""
    resolved = [path.resolve() for path in paths]
    longest = max(len(path.parts) for path in resolved)
    names = ["/".join(path.parts[-1:]) for path in resolved]
    for length in range(2, longest + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(path.parts[-length:]) for path in resolved]
    return names


def settings_of(run: RunSummary) -> dict[str, Any]:
    """Return what decides the results of a run, by name: its configuration, its rows, its reference, and versions.

    Raises:
        PartitaError: The manifest of a round of self-training is damaged.
    """
    manifest, origin = run.manifest, origin_of(run)
    rows = {
        f"rows of {split} (fingerprint)": values.get("fingerprint")
        for split, values in (manifest.get("data") or {}).items()
        if isinstance(values, Mapping)
    }
    versions = {f"version of {name}": value for name, value in (manifest.get("versions") or {}).items()}
    reference = {} if origin is None else {"model before training (fingerprint)": origin}
    return (leaves(run.config) if run.config else {}) | rows | reference | versions


def differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys whose values differ, with all values; None where a run does not have the key."""
    keys = dict.fromkeys(key for one in settings for key in one)
    values = {key: [one.get(key) for one in settings] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def recorded_metrics(runs: Sequence[RunSummary]) -> dict[str, list[float | None]]:
    """Return the metrics that runs recorded, by `split.metric`."""
    metrics = [
        {f"{split}.{name}": value for split, values in run.metrics.items() for name, value in values.items()}
        for run in runs
    ]
    names = dict.fromkeys(name for one in metrics for name in one)
    return {name: [one.get(name) for one in metrics] for name in names}


def comparable_losses(runs: Sequence[RunSummary], compared: ComparedRows) -> dict[int, str | None]:
    """Return for each run but the first why its loss cannot be compared with that of the first; None if it can."""
    rows = compared.evaluations
    have_losses = [any(loss is not None for loss in evaluation.losses) for evaluation in rows]
    return {
        number: why_not_comparable(runs[0], runs[number], rows[0], rows[number])
        if have_losses[0] and have_losses[number]
        else None
        for number in range(1, len(rows))
    }


def notes_of_losses(losses: Mapping[int, str | None], names: Sequence[str]) -> list[str]:
    """Return notes of the losses that are not compared."""
    return [
        f"the loss of {names[number]} is not compared with that of {names[0]}: {reason}"
        for number, reason in losses.items()
        if reason is not None
    ]


def main_metrics_of(run: RunSummary) -> list[str]:
    """Return the names of the metrics that describe a run best, that of its dialogues first."""
    return [SUCCESS, *main_metrics(run.config)]


def compare_pair(
    compared: ComparedRows, number: int, *, wanted: Sequence[str], left_out: Sequence[str], max_examples: int
) -> PairComparison:
    """Compare a run with the reference run.

    Args:
        compared: The rows of all runs.
        number: Which run it is, from 1.
        wanted: Names of the metrics that describe the runs best, the best one first.
        left_out: Metrics that cannot be compared.
        max_examples: Maximum number of rows that are listed.
    """
    first, second = compared.evaluations[0], compared.evaluations[number]
    expected = [evaluation.expected().outputs for evaluation in (first, second)]
    agreement = [
        found
        for name, column in expected[0].items()
        if (found := agreement_of(name, column.rights_N, expected[1][name].rights_N)) is not None
    ]
    different = list(disagreements(compared, number))
    metrics = [
        metric
        for metric in measure_rows(second, first)
        if metric.difference is not None and is_compared(metric) and metric.metric not in left_out
    ]
    return PairComparison(
        compared.names[number],
        metrics,
        main_measure(metrics, wanted),
        agreement,
        balanced(different, max_examples),
        len(different),
    )


def is_compared(metric: MetricEstimate) -> bool:
    """Return whether a metric says more than others: no parts of JSON, and no readable answers if all are."""
    if any(part in metric.metric for part in METRICS_BY_NAME) or metric.metric.endswith(".joint_accuracy"):
        return False
    if metric.metric.rpartition(".")[2] not in READABLE:
        return True
    assert metric.reference is not None
    return not metric.metric.endswith(".valid") and max(metric.result.value, metric.reference.value) > 0


def note_of_settings(unknown: Sequence[str]) -> list[str]:
    """Return a note of the runs whose configuration is not recorded."""
    names = ", ".join(unknown)
    return [f"the settings are not compared, because {names} did not record them"] if unknown else []


def note_of_tests(pairs: Sequence[PairComparison]) -> list[str]:
    """Return a warning if there are so many p-values that some are small by chance."""
    tests = sum(len(pair.metrics) for pair in pairs)
    if tests < 2:
        return []
    text = (
        f"{tests} p-values: without any difference, one in 20 is below 0.05 by chance; all of them together hold at "
        f"0.05 / {tests} = {0.05 / tests:.2g} (Bonferroni)"
    )
    return [text]
