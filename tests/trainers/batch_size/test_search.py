"""Tests of the search on curves with known results."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita_trainers.batch_size.probe import ProbeResult
from partita_trainers.batch_size.search import (
    COMFORTABLE,
    MIN_GROWTH,
    NEAR_BEST,
    between,
    candidate_sizes,
    is_comfortable,
    largest_fitting,
    line,
    next_rows,
    predicted_rows,
    smallest_near_best,
)

GB = 10**9


def probe_of(rows: int, taken: int, *, budget: int, device: int | None = None) -> ProbeResult:
    if device is not None and taken > device:
        return ProbeResult(rows, "out of memory", used_bytes=None, taken_bytes=None)
    return ProbeResult(rows, "fits" if taken <= budget else "too large", used_bytes=taken, taken_bytes=taken)


def search(
    taken: Callable[[int], int], *, budget: int, cap: int = 65_535, device: int | None = None
) -> tuple[int, list[ProbeResult]]:
    probes: list[ProbeResult] = []
    while (rows := next_rows(probes, cap=cap, budget=budget)) is not None:
        assert rows not in [probe.rows for probe in probes], "no size is probed twice"
        assert rows <= cap
        probes.append(probe_of(rows, taken(rows), budget=budget, device=device))
        assert len(probes) <= 25
    return largest_fitting(probes, cap=cap, budget=budget), probes


def test_a_straight_line_needs_three_probes() -> None:
    result, probes = search(lambda rows: 50_000_000 * rows, budget=10 * GB)
    assert result == 200
    assert [probe.rows for probe in probes] == [1, 4, 200]


def test_a_large_constant_that_hides_the_slope_needs_more_steps() -> None:
    result, probes = search(lambda rows: max(400_000_000, 1_000_000 * rows), budget=10 * GB, device=11 * GB)
    assert result >= 0.98 * 10_000
    assert not any(probe.verdict == "out of memory" for probe in probes)


def test_no_size_above_the_number_of_rows_is_probed() -> None:
    result, probes = search(lambda rows: rows, budget=10 * GB, cap=37)
    assert (result, [probe.rows for probe in probes]) == (37, [1, 4, 37])


def test_two_rows_need_two_probes() -> None:
    assert [probe.rows for probe in search(lambda rows: rows, budget=GB, cap=2)[1]] == [1, 2]


def test_one_row_that_does_not_fit_ends_the_search() -> None:
    result, probes = search(lambda rows: 3 * GB * rows, budget=2 * GB)
    assert (result, len(probes)) == (0, 1)


def test_a_size_below_a_probe_that_ran_but_was_too_large_needs_no_probe() -> None:
    probes = [probe_of(1, 100, budget=1000), probe_of(4, 400, budget=1000), probe_of(20, 2000, budget=1000)]
    assert next_rows(probes, cap=100, budget=1000) is None
    assert largest_fitting(probes, cap=100, budget=1000) == 10


def test_the_result_is_below_every_size_that_the_device_refuses() -> None:
    def taken(rows: int) -> int:
        return 10_000_000 * rows if rows < 90 else 40_000_000 * rows

    result, probes = search(taken, budget=2 * GB, device=2 * GB)
    assert 80 <= result < 90
    assert any(probe.verdict == "out of memory" for probe in probes)


@given(
    constants=st.lists(st.floats(0, 0.2), min_size=1, max_size=4),
    slopes=st.lists(st.floats(0.00002, 0.3), min_size=4, max_size=4),
    cap=st.integers(1, 100_000),
    room=st.floats(1.0, 1.3),
)
def test_the_result_fits_for_any_curve(constants: list[float], slopes: list[float], cap: int, room: float) -> None:
    budget = 10 * GB

    def taken(rows: int) -> int:
        return int(budget * max(c + s * rows for c, s in zip(constants, slopes, strict=False)))

    result, _ = search(taken, budget=budget, cap=cap, device=int(room * budget))
    if result == 0:
        assert taken(1) > budget
        return
    assert taken(result) <= budget
    # The result is close to the maximum: a size 5% larger is too large.
    further = result + max(1, int(0.05 * result)) + 1
    assert further > cap or taken(further) > budget


@given(st.floats(0, 0.1), st.floats(0.0001, 0.2))
def test_on_a_straight_line_the_result_is_within_the_minimum_growth_of_the_maximum(
    constant: float, slope: float
) -> None:
    budget = 10 * GB
    result, probes = search(lambda rows: int(budget * (constant + slope * rows)), budget=budget)
    exact = min(65_535, int((1 - constant) / slope + 1e-9))
    assert result >= (1 - MIN_GROWTH) * exact - 2
    assert len(probes) <= 6


def test_a_size_needs_no_probe_if_its_predicted_peak_leaves_half_of_the_budget() -> None:
    probes = [probe_of(1, 10, budget=1000), probe_of(4, 40, budget=1000)]
    assert is_comfortable(probes, int(100 * COMFORTABLE), budget=1000)
    assert not is_comfortable(probes, int(100 * COMFORTABLE) + 1, budget=1000)
    assert is_comfortable(probes, 4, budget=50), "it ran"
    assert predicted_rows(probes, budget=1000) == 100


def test_candidate_sizes_grow_by_at_most_half() -> None:
    sizes = list(candidate_sizes(1000))
    assert sizes[:9] == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert sizes[-1] == 1000
    assert list(candidate_sizes(1)) == [1]
    assert sizes == sorted(set(sizes))


def test_the_smallest_size_near_the_fastest_is_chosen() -> None:
    speeds = {1: 10.0, 2: 19.0, 4: 30.0, 8: 39.0, 16: 40.0, 32: 33.0}
    assert smallest_near_best(list(speeds), speeds.__getitem__) == 16
    speeds[8] = NEAR_BEST * 40
    assert smallest_near_best(list(speeds), speeds.__getitem__) == 8


def test_the_fit_of_points_on_a_line_is_that_line() -> None:
    assert line([(1, 3.5), (4, 5.0), (10, 8.0)]) == pytest.approx((3.0, 0.5))
    assert line([(4, 8.0)]) == (0.0, 2.0)


def test_the_fitted_line_has_no_negative_constant_and_no_negative_slope() -> None:
    assert line([(1, 1.0), (4, 6.0)])[0] == 0.0
    assert line([(1, 5.0), (4, 4.0)])[1] == 0.0


def test_values_between_points_are_interpolated_and_beyond_them_extrapolated() -> None:
    points = [(4, 2.0), (8, 4.0), (16, 5.0)]
    assert between(points, 6) == 3.0
    assert between(points, 8) == 4.0
    assert between(points, 24) == 6.0
    assert between(points, 1) == 2.0
    assert between([(4, 2.0)], 100) == 2.0
