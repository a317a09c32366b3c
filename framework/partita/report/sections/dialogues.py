"""Simulated dialogues: their outcomes by history with intervals, and right answers by turn."""

from collections.abc import Mapping, Sequence

from partita.data.episode import Episode
from partita.report.charts import SHARES, Curve, Table, curve_chart
from partita.report.compared_rows import evaluation_of_episodes
from partita.report.measures import MetricEstimate, main_measure, measure_rows
from partita.report.number_text import as_number, is_count
from partita.report.row_shares import SUCCESS
from partita.report.run_record import RunRecord
from partita.report.section import Charts, Link, NamedTable, Paragraph, Part, Section
from partita.report.sections.metrics import with_interval
from partita.report.simulated import TRANSCRIPTS, transcript_folder
from partita.simulation.report import outcomes_of
from partita_schema.common.text import counted

Simulations = Mapping[str, Sequence[Episode]]
"""Dialogues by history."""
Columns = Mapping[str, Mapping[str, float]]
"""Numbers of simulations by history and name."""
WANTED = {SUCCESS: "success rate", "reward": "mean reward", "exact_turns": "share of right answers"}
"""Metrics that describe a simulation, the best one first, and what they are."""
MEANING = (
    "With gold history, the model sees the right answers to earlier turns, as in most evaluations; with predicted "
    "history it sees its own, as in use. The difference is the cost of its earlier mistakes."
)
NOTE = "In brackets: 95 % intervals over dialogues."


def dialogues_section(run: RunRecord) -> Section | None:
    """Return the outcomes of simulated dialogues; None without a simulation."""
    if not run.simulations:
        return None
    parts = history_parts(run.outcomes, run.simulations)
    folder = transcript_folder(run.folder)
    if (folder / "index.html").is_file():
        path = "index.html" if folder == run.folder else f"{TRANSCRIPTS}/index.html"
        parts.append(Link("The dialogues themselves, the worst first, are in", path, path))
    return Section("Dialogues", parts)


def history_parts(columns: Columns, simulations: Simulations) -> list[Part]:
    """Return the numbers of each history side by side, and the chart of right answers by turn.

    Args:
        columns: Numbers by history.
        simulations: Dialogues by history.
    """
    measures = measures_of_histories(simulations)
    names = list(dict.fromkeys(name for values in columns.values() for name in values))
    of_outputs = [name for name in names if "." in name.removesuffix(".n") or name in ("exact_match", "n")]
    of_outputs += [f"{name.partition('.')[0]}.n" for name in of_outputs if "." in name]  # counts of turns
    titles = ["metric", *(f"{history} history" for history in columns), *(["difference"] if len(columns) == 2 else [])]
    rows = {name: cells_of(name, columns, [one.get(name) for one in measures.values()]) for name in names}
    whole = [[name.removesuffix(".n"), *cells] for name, cells in rows.items() if name not in of_outputs]
    parts: list[Part] = [NamedTable("", Table(titles, whole), note=NOTE if any(measures.values()) else "")]
    single = [[name, *cells] for name, cells in rows.items() if name in of_outputs and name.rpartition(".")[2] != "n"]
    parts += [NamedTable("Outputs of all turns", Table(titles, single), folded=True)] if single else []
    parts += [Paragraph(MEANING)] if len(columns) == 2 else []
    curves = turn_curves(simulations)
    if curves:
        chart = curve_chart("Right answers by turn", curves, x_label="turn", y_label="share of answers", include=SHARES)
        parts.append(Charts([chart]))
    return parts


def measures_of_histories(simulations: Simulations) -> dict[str, dict[str, MetricEstimate]]:
    """Return the metrics of dialogues by history and name, those of `predicted` with the difference from `gold`.

    None of tasks that were repeated, because the dialogues of a task are not independent.
    """
    rows = {history: evaluation_of_episodes(episodes, history) for history, episodes in simulations.items()}
    keys = [one.keys for one in rows.values()]
    tasks = {len({episode.task_key for episode in episodes}) for episodes in simulations.values()}
    if any(one != keys[0] for one in keys) or tasks != {len(keys[0])}:
        return {history: {} for history in rows}
    return {
        history: {one.metric: one for one in measure_rows(evaluation, rows.get("gold") if history != "gold" else None)}
        for history, evaluation in rows.items()
    }


def cells_of(name: str, columns: Columns, measures: Sequence[MetricEstimate | None]) -> list[str]:
    """Return the cells of a number: its value in each history, and their difference if there are two.

    Args:
        name: Name of the number.
        columns: Numbers by history.
        measures: The metric of that name in each history; None without an interval.
    """
    values = [values.get(name) for values in columns.values()]
    cells = [
        as_number(name, value) if measure is None else with_interval(name, measure.result)
        for value, measure in zip(values, measures, strict=True)
    ]
    if len(cells) != 2:
        return cells
    if measures[1] is not None and measures[1].difference is not None:
        return [*cells, with_interval(name, measures[1].difference, sign="+")]
    if is_count(name) or None in values:
        return [*cells, ""]
    first, second = (value or 0.0 for value in values)
    return [*cells, f"{'+' if second > first else ''}{as_number(name, second - first)}"]


def turn_curves(simulations: Simulations) -> list[Curve]:
    """Return the share of right answers by turn, for each history with right answers."""
    outcomes = {history: outcomes_of(episodes, repeats=1) for history, episodes in simulations.items()}
    return [
        Curve(history, [float(turn) for turn in one.by_turn], [mean.mean for mean in one.by_turn.values()], dots=True)
        for history, one in outcomes.items()
        if one.by_turn
    ]


def sentence_of(columns: Columns, simulations: Simulations) -> str:
    """Return the most important sentence on a simulation.

    Args:
        columns: Numbers by history.
        simulations: Dialogues by history; at least one.
    """
    history = "predicted" if "predicted" in simulations else next(iter(simulations))
    dialogues = f"{counted(len(simulations[history]), 'dialogue')} with {history} history"
    name = next((one for one in WANTED if one in columns[history]), None)
    if name is None:
        return f"{dialogues[0].upper()}{dialogues[1:]} {'was' if len(simulations[history]) == 1 else 'were'} simulated."
    measures = list(measures_of_histories(simulations)[history].values())
    main = main_measure([one for one in measures if one.metric == name], [name])
    value, interval = as_number(name, columns[history][name]), ""
    if main is not None and main.has_interval:
        low, high = (as_number(name, end) for end in (main.result.low, main.result.high))
        interval = f" (95 % interval {low} to {high})"
    gold = columns.get("gold", {}).get(name) if history != "gold" else None
    other = "" if gold is None else f"; with gold history it is {as_number(name, gold)}"
    return f"The {WANTED[name]} is {value}{interval} in {dialogues}{other}."
