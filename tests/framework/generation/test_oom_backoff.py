import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from partita.generation.oom_backoff import BatchBudget, BatchPart, halves, run_with_oom_backoff

SIZES = st.lists(st.integers(min_value=1, max_value=30), max_size=40)
LIMITS = st.integers(min_value=1, max_value=50)


class Device:
    """A device with `room`; a batch takes, per row, the size of its largest row."""

    def __init__(self, sizes: list[int], *, room: int, unasked: frozenset[int] = frozenset()) -> None:
        self.sizes, self.room, self.unasked = sizes, room, unasked
        self.tried: list[range] = []

    def work(self, places: range) -> tuple[list[int] | None, Exception | None]:
        if self.unasked.issuperset(places):
            return None, None
        self.tried.append(places)
        if self.cost(places) > self.room:
            return None, torch.OutOfMemoryError("out of memory")
        return [place for place in places if place not in self.unasked], None

    def largest(self, places: range) -> int:
        return max(self.sizes[place] for place in places)

    def cost(self, places: range) -> int:
        return len(places) * self.largest(places)

    def run(self, limit: BatchBudget) -> list[BatchPart[list[int]]]:
        def describe(places: range) -> str:
            return f"{len(places)} rows"

        return list(
            run_with_oom_backoff(len(self.sizes), self.work, budget=limit, tokens=self.largest, describe=describe)
        )


@pytest.mark.parametrize(("tokens", "rows"), [(1, 8), (50, 4), (100, 2), (199, 1), (1000, 1)])
def test_a_limit_found_with_long_rows_allows_more_short_rows_up_to_the_initial_size(tokens: int, rows: int) -> None:
    limit = BatchBudget(8)
    assert limit.limit_at(tokens) == 8
    limit.current_limit, limit.limit_tokens = 2, 100
    assert limit.limit_at(tokens) == rows


@given(SIZES, LIMITS, st.integers(min_value=1, max_value=60), st.frozensets(st.integers(0, 39)))
def test_every_requested_row_runs_once_in_order_unless_it_does_not_fit_alone(
    sizes: list[int], start: int, room: int, unasked: frozenset[int]
) -> None:
    device, limit = Device(sizes, room=room, unasked=unasked), BatchBudget(start)
    results: list[int] = []
    for part in device.run(limit):
        if part.result is None:
            assert len(part.indices) == 1
            assert sizes[part.indices[0]] > room
            assert isinstance(part.failure, torch.OutOfMemoryError)
        results += part.result if part.result is not None else part.indices
    assert results == [place for place in range(len(sizes)) if place not in unasked]
    assert limit.out_of_memory == sum(device.cost(places) > room for places in device.tried)
    assert len(device.tried) < 2 * max(1, len(sizes))
    assert 1 <= limit.current_limit <= start
    assert all(len(places) <= start for places in device.tried)


@given(st.integers(min_value=1, max_value=100), st.integers(min_value=1, max_value=120), LIMITS)
def test_a_batch_of_similar_rows_is_split_in_the_same_way_with_a_new_or_a_known_limit(
    rows: int, room: int, start: int
) -> None:
    # With a smaller limit, parts would run before the one that fails; these are larger than the limit that is found.
    result, known = BatchBudget(max(start, rows)), BatchBudget(max(start, rows))
    learned = [part.indices for part in Device([1] * rows, room=room).run(result)]
    known.current_limit, known.limit_tokens = result.current_limit, result.limit_tokens
    again = Device([1] * rows, room=room)
    assert [part.indices for part in again.run(known)] == again.tried == learned
    assert known.out_of_memory == 0


@given(SIZES, LIMITS)
def test_rows_that_do_not_fit_alone_do_not_change_the_limit(sizes: list[int], start: int) -> None:
    # Without the rows that never fit, all others fit together.
    limit = BatchBudget(start)
    Device([1000 if size > 25 else 0 for size in sizes], room=999).run(limit)
    assert limit.current_limit == start


def test_a_failure_not_explained_by_one_large_row_lowers_the_limit() -> None:
    # Eight of the small rows are too many as well; four fit.
    device, limit = Device([2] * 8 + [99] + [2] * 7, room=8), BatchBudget(16)
    parts = device.run(limit)
    assert [(part.indices.start, part.indices.stop) for part in parts] == [
        (0, 4),
        (4, 8),
        (8, 9),
        (9, 10),
        (10, 12),
        (12, 16),
    ]
    assert (limit.current_limit, limit.limit_tokens, limit.out_of_memory) == (4, 2, 3)


def test_a_row_that_fits_only_alone_does_not_limit_shorter_rows() -> None:
    device, limit = Device([100] + [10] * 31, room=100), BatchBudget(16)
    assert [len(part.indices) for part in device.run(limit)] == [1, 1, 2, 4, 8, 8, 8]
    assert (limit.current_limit, limit.limit_tokens) == (1, 100)
    assert (
        limit.limit_at(100),
        limit.limit_at(51),
        limit.limit_at(50),
        limit.limit_at(10),
        limit.limit_at(1),
        limit.limit_at(999),
    ) == (1, 1, 2, 10, 16, 1)


@given(st.integers(min_value=1, max_value=99), st.integers(min_value=0, max_value=999))
def test_an_initial_limit_without_failures_applies_to_any_length(rows: int, tokens: int) -> None:
    assert BatchBudget(rows).limit_at(tokens) == rows


def test_an_unrequested_row_says_nothing_about_the_others() -> None:
    # The first row never fits and is already recorded as an error: nothing else is too large.
    device, limit = Device([99] + [0] * 7, room=9, unasked=frozenset({0})), BatchBudget(8)
    assert [part.result for part in device.run(limit)] == [[1], [2, 3], [4, 5, 6, 7]]
    assert limit.current_limit == 8


def test_the_first_half_is_the_larger_one() -> None:
    assert halves(range(2, 7)) == (range(2, 5), range(5, 7))
    assert halves(range(2)) == (range(1), range(1, 2))


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (torch.OutOfMemoryError("out of memory"), "out of memory with 4 rows: continuing with 2"),
        (
            RuntimeError("CUDA error: invalid configuration argument"),
            "too large for the device: 4 rows: continuing with 2",
        ),
    ],
)
def test_a_split_is_reported_once_with_its_numbers(caplog: Any, failure: Exception, expected: str) -> None:
    def work(places: range) -> tuple[bool | None, Exception | None]:
        return (None, failure) if len(places) > 2 else (True, None)

    limit = BatchBudget(4)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            list(run_with_oom_backoff(4, work, budget=limit, tokens=len, describe=lambda places: f"{len(places)} rows"))
    assert caplog.messages == [expected]
