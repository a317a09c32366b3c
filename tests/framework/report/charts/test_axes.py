"""Axes: positions, round ticks, short labels."""

import pytest

from partita.report.charts.axes import Axis, axis_of, tick_label


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (3, 240, [50, 100, 150, 200]),
        (0.0, 0.003, [0, 0.001, 0.002, 0.003]),
        (-2, 2, [-2, -1, 0, 1, 2]),
    ],
)
def test_ticks_are_round_and_inside_the_axis(low: float, high: float, ticks: list[float]) -> None:
    assert Axis(low, high, 0, 100).ticks() == pytest.approx(ticks)


def test_ticks_of_whole_numbers_are_whole() -> None:
    assert axis_of([1, 2, 3], start=0, end=100).ticks() == [1, 2, 3]
    assert axis_of([0.0, 0.5, 3.0], start=0, end=100).ticks() == pytest.approx([0, 1, 2, 3])


def test_ticks_of_a_logarithmic_axis_are_powers_of_ten() -> None:
    axis = axis_of([2e-6, 0.3], start=0, end=100, scale="log")

    assert axis.ticks() == pytest.approx([1e-4, 1e-2])
    assert axis.position(2e-6) == pytest.approx(0)
    assert axis.position(0.3) == pytest.approx(100)


def test_a_short_logarithmic_axis_also_has_two_and_five_times_the_powers() -> None:
    axis = axis_of([0.15, 7.0], start=0, end=100, scale="log")

    assert axis.ticks() == pytest.approx([0.2, 0.5, 1, 2, 5])


@pytest.mark.parametrize("values", [[], [5.0], [0.0], [float("nan")]])
def test_an_axis_of_one_value_or_none_has_a_length(values: list[float]) -> None:
    axis = axis_of(values, start=0, end=100)

    assert axis.low < axis.high
    assert axis.ticks()


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (1e-4, "1e-4"),
        (7.5e-5, "7.5e-5"),
        (2.5e12, "2.5e12"),
        (1500, "1.5k"),
        (1234, "1234"),
        (20_000, "20k"),
        (3e6, "3M"),
        (2e9, "2e9"),
        (-40, "-40"),
    ],
)
def test_labels_are_short(value: float, label: str) -> None:
    assert tick_label(value) == label
