"""Histograms and scatter plots."""

from xml.etree import ElementTree

import numpy as np
import pytest

from partita.report.charts import bars_chart, histogram_chart, scatter_chart
from partita.report.charts.chart import HEIGHT, WIDTH
from partita.report.charts.scatter import MAX_DOTS


def test_the_bars_of_a_histogram_count_all_values() -> None:
    chart = histogram_chart("Residuals", np.random.default_rng(1).normal(size=5000), x_label="error", bins=10)

    bars = list(ElementTree.fromstring(chart.svg).iter("rect"))
    assert len(bars) == 10
    assert sum(int(count.replace(",", "")) for _, count in chart.table.rows) == 5000
    assert all(0 <= float(bar.get("y", "")) + float(bar.get("height", "")) <= HEIGHT for bar in bars)


@pytest.mark.parametrize("values", [[0.1, 0.1 + 1.4e-17, 0.1 + 2.8e-17], [1e17, 1e17 + 16], [-3.0, -3.0], [0.0]])
def test_values_that_differ_by_rounding_are_in_the_middle(values: list[float]) -> None:
    chart = histogram_chart("Residuals", values, x_label="error", bins=10)

    counts = [int(count) for _, count in chart.table.rows]
    assert sum(counts) == sum(counts[4:6]) == len(values)


def test_a_few_whole_numbers_have_a_bar_each() -> None:
    chart = histogram_chart("Residuals", [-3.0, -1.0, -1.0, 2.0], x_label="error")

    bars = list(ElementTree.fromstring(chart.svg).iter("rect"))
    assert len({bar.get("width") for bar in bars}) == 1
    assert chart.table.rows == [["-3", "1"], ["-2", "0"], ["-1", "2"], ["0", "0"], ["1", "0"], ["2", "1"]]


def test_intervals_are_named_by_their_limits() -> None:
    chart = bars_chart("Lengths", [3, 4], [0, 8, 16], x_label="tokens")

    assert chart.table.rows == [["0 to 8", "3"], ["8 to 16", "4"]]


def test_a_scatter_plot_draws_some_of_many_pairs_and_no_infinite_ones() -> None:
    xs = np.arange(10_000, dtype=float)
    ys = np.where(xs % 2, xs, np.inf)
    chart = scatter_chart("Parity", xs, ys, x_label="reference", y_label="answer")

    dots = list(ElementTree.fromstring(chart.svg).iter("circle"))
    assert len(dots) == MAX_DOTS
    assert all(0 <= float(dot.get("cx", "")) <= WIDTH for dot in dots)


def test_a_scatter_plot_of_nothing_is_an_empty_frame() -> None:
    nothing = np.zeros(0)

    assert "circle" not in scatter_chart("Parity", nothing, nothing, x_label="reference", y_label="answer").svg
