"""Confusion matrices as charts."""

from xml.etree import ElementTree

import numpy as np

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
    assert shortened(names[12], most=14) == "a rathe\u2026ame 12"
