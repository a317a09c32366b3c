"""Simulated dialogues: their outcomes by history, and right answers by turn."""

from collections.abc import Mapping

from partita.report.charts import Curve, Table, curve_chart
from partita.report.run_record import RunRecord
from partita.report.section import Charts, Link, NamedTable, Paragraph, Part, Section
from partita.report.simulated import TRANSCRIPTS, transcript_folder
from partita.report.transcript_page import differences
from partita.simulation.report import RolloutOutcomes, column, outcomes_of


def dialogues_section(run: RunRecord) -> Section | None:
    """Return the outcomes of simulated dialogues; None without a simulation."""
    if not run.simulations:
        return None
    outcomes = {history: outcomes_of(episodes, repeats=1) for history, episodes in run.simulations.items()}
    columns = {history: column(one) for history, one in outcomes.items()}
    names = list(dict.fromkeys(name for values in columns.values() for name in values))
    rows = [[name, *(cell(name, values.get(name)) for values in columns.values())] for name in names]
    parts: list[Part] = [NamedTable("By history", Table(["metric", *columns], rows))]
    parts += [Paragraph(sentence) for sentence in differences(columns)]
    curves = turn_curves(outcomes)
    if curves:
        chart = curve_chart("Right answers by turn", curves, x_label="turn", y_label="share of answers", include=(0, 1))
        parts.append(Charts([chart]))
    folder = transcript_folder(run.folder)
    if (folder / "index.html").is_file():
        path = "index.html" if folder == run.folder else f"{TRANSCRIPTS}/index.html"
        parts.append(Link("The dialogues themselves, the worst first, are in", path, path))
    return Section("Dialogues", parts)


def turn_curves(outcomes: Mapping[str, RolloutOutcomes]) -> list[Curve]:
    """Return the share of right answers by turn, for each history with right answers."""
    return [
        Curve(history, [float(turn) for turn in one.by_turn], [mean.mean for mean in one.by_turn.values()], dots=True)
        for history, one in outcomes.items()
        if one.by_turn
    ]


def cell(name: str, value: float | None) -> str:
    """Format a number of the table; counts have no decimals."""
    if value is None:
        return ""
    return f"{value:,.0f}" if name.endswith(".n") else f"{value:.3f}"
