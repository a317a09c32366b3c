"""Charts of curves: all values in the picture, few points, and the numbers as a table."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from partita.report.charts import Chart, Curve, Mark, curve_chart
from partita.report.charts.chart import HEIGHT, MAX_TABLE_ROWS, WIDTH
from partita.report.charts.curves import SECTIONS, thin


def points_of(chart: Chart) -> list[tuple[float, float]]:
    """Return the points of all lines and dots; the picture must be well-formed XML."""
    root = ElementTree.fromstring(chart.svg)
    numbers = [float(one) for element in root for one in re.findall(r"-?[\d.]+", element.get("points", ""))]
    dots = [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in root.iter("circle")]
    return [*zip(numbers[::2], numbers[1::2], strict=True), *dots]


def chart_of(*curves: Curve, **options: object) -> Chart:
    return curve_chart("Loss", list(curves), x_label="step", y_label="nats", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [-3.0, 1e9], [1e-12, 1e-9, 1e-3], list(range(5000))])
def test_every_point_is_inside_the_picture(values: list[float]) -> None:
    chart = chart_of(Curve("training", range(len(values)), values), marks=[Mark(2.0, "resumed")])

    points = points_of(chart)

    assert points
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)


def test_many_steps_are_drawn_as_means_with_their_range() -> None:
    values = np.arange(100_000, dtype=float)

    thinned = thin(Curve("training", values, values), positive=False)

    assert len(thinned.xs_N) == SECTIONS
    assert thinned.lows_N is not None
    assert thinned.highs_N is not None
    assert thinned.lows_N[0] == 0
    assert thinned.highs_N[-1] == 99_999
    assert np.allclose(thinned.ys_N, (thinned.lows_N + thinned.highs_N) / 2)


def test_few_steps_are_all_drawn() -> None:
    thinned = thin(Curve("training", range(2 * SECTIONS), range(2 * SECTIONS)), positive=False)

    assert len(thinned.xs_N) == 2 * SECTIONS
    assert thinned.lows_N is None


def test_values_that_are_not_finite_are_left_out() -> None:
    thinned = thin(Curve("training", [1, 2, 3, 4], [1.0, math.nan, math.inf, 0.0]), positive=True)

    assert thinned.xs_N.tolist() == [1]


def test_the_table_has_the_values_of_all_curves_and_few_rows() -> None:
    training = Curve("training", range(1, 201), [1 / step for step in range(1, 201)])
    chart = chart_of(training, Curve("validation", [1, 200], [0.5, 0.25], dots=True))

    assert chart.table.titles == ["step", "training", "validation"]
    assert len(chart.table.rows) == MAX_TABLE_ROWS
    assert chart.table.rows[0] == ["1", "1", "0.5"]
    assert chart.table.rows[-1] == ["200", "0.005", "0.25"]


def test_curves_differ_by_dashes_as_well_as_by_color() -> None:
    chart = chart_of(*(Curve(name, [0, 1], [0, 1]) for name in "abcd"))

    looks = re.findall(r'<polyline class="curve" stroke="([^"]+)"(?: stroke-dasharray="([^"]+)")?', chart.svg)
    assert len({color for color, _ in looks}) == 4
    assert len({dashes for _, dashes in looks}) == 4


def test_values_can_be_dots_without_a_line() -> None:
    chart = chart_of(Curve("trial", [0, 1, 2], [0.5, 0.25, 0.75], line=False))

    assert "polyline" not in chart.svg
    assert chart.svg.count("<circle") == 3


def test_the_legend_has_a_dot_for_values_without_a_line() -> None:
    trials = Curve("trial", [0, 1, 2], [0.5, 0.25, 0.75], line=False)
    chart = chart_of(Curve("best so far", [0, 1, 2], [0.5, 0.25, 0.25]), trials)

    assert chart.svg.count('<line class="curve"') == 1
    assert chart.svg.count("<circle") == 4


def test_the_vertical_axis_holds_the_values_to_include() -> None:
    chart = chart_of(Curve("gold", [1, 2], [0.4, 0.6]), include=(0, 1))

    labels = [element.text for element in ElementTree.fromstring(chart.svg).iter("text")]
    assert {"0", "0.2", "0.8", "1"} <= set(labels)


def test_a_chart_without_values_is_an_empty_frame() -> None:
    chart = chart_of(Curve("training", [], []))

    assert points_of(chart) == []
    assert chart.table.rows == []
