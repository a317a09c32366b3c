"""Confusion matrices as charts."""

from xml.etree import ElementTree

import numpy as np
import pytest

from partita.report.charts import matrix_chart
from partita.report.charts.chart import WIDTH, shortened


def test_a_cell_has_its_count_and_its_share_of_the_row() -> None:
    chart = matrix_chart(
        "Confusion matrix",
        np.array([[3, 1], [0, 2]]),
        rows=["a", "b"],
        columns=["a", "b"],
        row_label="correct",
        column_label="answer",
    )

    texts = [element.text for element in ElementTree.fromstring(chart.svg).iter("text")]
    assert [text for text in texts if text and text[0].isdigit()] == ["3", "75%", "1", "25%", "2", "100%"]
    assert chart.table.titles == ["correct \\ answer", "a", "b"]
    assert chart.table.rows == [["a", "3", "1"], ["b", "0", "2"]]


def test_many_labels_fit_and_their_names_are_shortened_in_the_middle() -> None:
    names = [f"a rather long name {index}" for index in range(13)]
    chart = matrix_chart(
        "Confusion matrix", np.eye(13), rows=names, columns=names, row_label="correct", column_label="answer"
    )

    root = ElementTree.fromstring(chart.svg)
    ends = [float(cell.get("x", "")) + float(cell.get("width", "")) for cell in root.iter("rect")]
    assert max(ends) <= WIDTH
    labels = [element.text for element in root.iter("text") if "\u2026" in str(element.text)]
    assert labels[12:14] == ["a r\u2026 12", "a rath\u2026ame 0"]


@pytest.mark.parametrize(
    ("most", "short"), [(1, "\u2026"), (2, "a\u2026"), (3, "a\u2026f"), (5, "ab\u2026ef"), (6, "abcdef")]
)
def test_a_shortened_text_has_at_most_so_many_characters(most: int, short: str) -> None:
    assert shortened("abcdef", most=most) == short
