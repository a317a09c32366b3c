"""Rounds of self-training: the dialogues of each round, and what was trained on them."""

from collections.abc import Mapping, Sequence
from typing import Any

from partita.report.charts import SHARES, Chart, Curve, Table, curve_chart
from partita.report.number_text import as_number
from partita.report.run_record import RunRecord
from partita.report.section import Charts, NamedTable, Paragraph, Part, Section
from partita_schema.common.text import counted

DRAWN = ("success", "reward", "exact_turns", "exact_last")
"""Metrics of dialogues in the chart."""


def rounds_section(run: RunRecord) -> Section | None:
    """Return the results by round; None without self-training."""
    dialogues: Sequence[Mapping[str, Any]] = run.manifest.get("dialogues") or ()
    rounds: Sequence[Mapping[str, Any]] = run.manifest.get("rounds") or ()
    if not dialogues:
        return None
    names = list(dict.fromkeys(name for values in dialogues for name in values))
    titles = ["metric", *(f"round {number}" for number in range(1, len(dialogues) + 1))]
    rows = [[name.removesuffix(".n"), *(as_number(name, values.get(name)) for values in dialogues)] for name in names]
    parts: list[Part] = [
        Paragraph("Each round runs dialogues with the model of the round before, and then trains on them.")
    ]
    parts += [Paragraph(trained(number, round_)) for number, round_ in enumerate(rounds, start=1)]
    chart = rounds_chart(dialogues)
    parts += [Charts([chart])] if chart is not None else []
    return Section("Rounds of self-training", [*parts, NamedTable("Dialogues by round", Table(titles, rows))])


def trained(number: int, round_: Mapping[str, Any]) -> str:
    """Return a sentence about the training of a round."""
    loss = (round_.get("metrics") or {}).get("validation", {}).get("loss")
    kept = "" if round_.get("kept", True) else "; its weights were not kept, because the dialogues after it were worse"
    validation = f", validation loss {as_number('loss', loss)}" if isinstance(loss, int | float) else ""
    return f"Round {number}: {counted(int(round_.get('steps') or 0), 'step')}{validation}{kept}."


def rounds_chart(dialogues: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Return the chart of the results by round; None with fewer than two rounds."""
    if len(dialogues) < 2:
        return None
    numbers = [float(number) for number in range(1, len(dialogues) + 1)]
    curves = [
        Curve(name, numbers, [float(values.get(name, float("nan"))) for values in dialogues], dots=True)
        for name in DRAWN
        if any(name in values for values in dialogues)
    ]
    if not curves:
        return None
    return curve_chart("Means over the dialogues of each round", curves, x_label="round", y_label="", include=SHARES)
