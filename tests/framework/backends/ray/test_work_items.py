"""Tests of work items: each requested row is handed out once, together with rows that share its result."""

import pickle

import numpy as np

from partita.backends.ray.work_items import BatchWorkPlan, RowWorkPlan
from partita.generation.requests import RowResult
from partita.generation.scheduler import RowRequests
from partita.generation.static_batches import plan_samples
from partita.lm.base import PADDED

LENGTHS = np.array([3, 5, 0, 5, 2, 4])
"""Row 2 is not requested."""


def sampled(num_samples: int) -> RowRequests:
    """Return the rows with several samples each."""
    return RowRequests(
        np.repeat(LENGTHS, num_samples),
        np.full(len(LENGTHS) * num_samples, 7),
        fetch=lambda rows: [[row // num_samples] * int(LENGTHS[row // num_samples]) for row in rows],
        key=lambda row: bytes([row]),
        num_samples=num_samples,
    )


def work(*, equal: tuple[int, int] | None = None) -> RowRequests:
    digests = np.array([bytes([row + 1]) for row in range(len(LENGTHS))], dtype="V1")
    if equal is not None:
        digests[equal[1]] = digests[equal[0]]
    return RowRequests(
        LENGTHS,
        np.full(len(LENGTHS), 7),
        fetch=lambda rows: [[row] * int(LENGTHS[row]) for row in rows],
        key=lambda row: bytes([row]),
        digests=digests,
    )


def all_but(*rows: int) -> np.ndarray:
    left = np.ones(len(LENGTHS), dtype=np.bool_)
    left[list(rows)] = False
    return left


def test_rows_are_handed_out_longest_first_with_their_prompts() -> None:
    plan = RowWorkPlan(work(), all_but(0))

    work_items = plan.work_items(range(plan.total))

    assert [work_item.rows for work_item in work_items] == [(1,), (3,), (5,), (4,)]
    assert work_items[2].prompts == ([5, 5, 5, 5],)
    assert (work_items[2].new_tokens, work_items[2].keys, work_items[2].wanted) == ((7,), (b"\x05",), (True,))


def test_rows_with_equal_prompts_are_one_item_with_one_answer() -> None:
    plan = RowWorkPlan(work(equal=(1, 3)), all_but())
    plan.work_items(range(plan.total))

    place, results = plan.answered(RowResult(1, None, "no"))

    assert plan.total == 4
    assert place == 0
    assert results == [RowResult(1, None, "no"), RowResult(3, None, "no")]


def test_a_batch_is_answered_with_its_last_row() -> None:
    plan = BatchWorkPlan(work(), all_but(1), batch_size=2, support=PADDED)
    [first, _, last] = plan.work_items(range(plan.total))

    assert (first.rows, first.wanted) == ((1, 3), (False, True))
    assert (last.index, last.rows) == (2, (4,))
    assert plan.answered(RowResult(5, None)) == (None, [RowResult(5, None)])
    assert plan.answered(RowResult(0, None))[0] == 1
    assert plan.answered(RowResult(3, None))[0] == 0


def test_a_batch_that_is_assigned_again_requests_only_missing_rows() -> None:
    plan = BatchWorkPlan(work(), all_but(), batch_size=3, support=PADDED)
    [first, _] = plan.work_items(range(plan.total))
    plan.answered(RowResult(first.rows[0], None))

    [again] = plan.work_items([0])

    assert again.rows == first.rows
    assert again.wanted == (False, True, True)


def test_finished_batches_are_skipped_and_the_others_keep_their_positions() -> None:
    plan = BatchWorkPlan(work(), all_but(1, 3), batch_size=2, support=PADDED)

    assert [work_item.index for work_item in plan.work_items(range(plan.total))] == [1, 2]


def test_the_samples_of_a_row_are_one_item_and_their_prompt_is_sent_once() -> None:
    plan = RowWorkPlan(sampled(3), np.repeat(all_but(0), 3))

    work_items = plan.work_items(range(plan.total))

    assert [work_item.rows for work_item in work_items] == [(3, 4, 5), (9, 10, 11), (15, 16, 17), (12, 13, 14)]
    assert work_items[1].keys == (b"\x09", b"\x0a", b"\x0b")
    assert (work_items[1].new_tokens, work_items[1].wanted) == ((7, 7, 7), (True, True, True))
    assert work_items[1].prompts == ([3] * 5,) * 3
    sent = pickle.loads(pickle.dumps(work_items[1]))
    assert sent.prompts[0] is sent.prompts[1] is sent.prompts[2]


def test_an_item_is_answered_with_its_last_sample_and_only_missing_ones_are_assigned_again() -> None:
    plan = RowWorkPlan(sampled(3), np.repeat(all_but(), 3))
    plan.work_items(range(plan.total))

    assert plan.answered(RowResult(4, None)) == (None, [RowResult(4, None)])
    [again] = plan.work_items([0])
    assert (again.rows, again.keys, again.prompts) == ((3, 5), (b"\x03", b"\x05"), ([1] * 5,) * 2)
    assert plan.answered(RowResult(5, None))[0] is None
    assert plan.answered(RowResult(3, None))[0] == 0


def test_batches_of_samples_are_those_of_one_process() -> None:
    requests = sampled(3)
    plan = BatchWorkPlan(requests, np.repeat(all_but(), 3), batch_size=7, support=PADDED)

    expected = [rows for group in plan_samples(requests.lengths, 3, batch_size=7) for rows in group]
    assert [item.rows for item in plan.work_items(range(plan.total))] == [tuple(rows) for rows in expected]
