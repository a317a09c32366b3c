"""Tests of work assignment: every item is held by one worker at a time and answered once, also when workers die."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.backends.ray.job import Assignments


def test_items_are_assigned_in_the_order_of_the_plan() -> None:
    assignments = Assignments(5)

    assert assignments.assign("one", 2) == [0, 1]
    assert assignments.assign("other", 9) == [2, 3, 4]
    assert assignments.assign("one", 1) == []
    assert (assignments.holds("one"), assignments.holds("other"), assignments.left) == (2, 3, 0)


def test_items_of_a_lost_worker_come_first() -> None:
    assignments = Assignments(6)
    assignments.assign("one", 3)
    assignments.answer("one", 1)

    assert assignments.requeue("one") == 2
    assert assignments.left == 5
    assert assignments.assign("other", 3) == [0, 2, 3]


def test_only_the_holder_of_an_item_can_answer_it() -> None:
    assignments = Assignments(2)
    assignments.assign("one", 2)
    assignments.requeue("one")
    assignments.assign("other", 2)

    with pytest.raises(KeyError):
        assignments.answer("one", 0)


@given(
    total=st.integers(0, 40),
    moves=st.lists(st.tuples(st.sampled_from(["deal", "answer", "die"]), st.integers(0, 3), st.integers(1, 7))),
)
def test_every_item_is_answered_once_after_any_deaths(total: int, moves: list[tuple[str, int, int]]) -> None:
    assignments = Assignments(total)
    answered: list[int] = []

    def answer(worker: int) -> None:
        for place in sorted(assignments.assigned.get(worker, ())):
            assignments.answer(worker, place)
            answered.append(place)

    for move, worker, amount in moves:
        if move == "deal":
            assert len(assignments.assign(worker, amount)) <= amount
        elif move == "answer":
            answer(worker)
        else:
            assignments.requeue(worker)
        assigned = [place for places in assignments.assigned.values() for place in places]
        assert len(assigned) == len(set(assigned))
        assert assignments.done == (len(answered) == total)
    for worker in list(assignments.assigned):
        assignments.requeue(worker)
    while assignments.left:
        assignments.assign("last", 3)
    answer("last")  # type: ignore[arg-type]  # a name is as good as a number

    assert sorted(answered) == list(range(total))
    assert assignments.done
