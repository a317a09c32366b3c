"""Numbers and scores: residuals, and answers beside references."""

import numpy as np

from partita.report.charts import histogram_chart, scatter_chart
from partita.report.evaluation import OutputColumn
from partita.report.section import Charts, Paragraph, Part
from partita.report.value_metrics import numbers_of

MAX_DRAWN = 1e150
"""Numbers from this on are not drawn, because the range of an axis could overflow; the largest errors show them."""


def number_parts(column: OutputColumn) -> list[Part]:
    """Return the histogram of residuals and the parity plot."""
    truths_N, values_N = numbers_of(column)
    known_N = (np.abs(truths_N) < MAX_DRAWN) & (np.abs(values_N) < MAX_DRAWN)
    if not known_N.any():
        return [Paragraph("No answer is a number.", kind="warning")]
    truths_N, values_N = truths_N[known_N], values_N[known_N]
    scatter = scatter_chart(
        "Answers and references",
        truths_N,
        values_N,
        x_label="reference",
        y_label="answer",
        note="On the dotted line, the answer equals the reference.",
    )
    return [Charts([histogram_chart("Residuals", values_N - truths_N, x_label="answer - reference"), scatter])]
