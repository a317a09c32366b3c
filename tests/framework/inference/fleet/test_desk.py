"""Every place is dealt, held by one worker at a time, and answered once, whoever dies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.inference.fleet.assignments import Assignments


def test_places_are_dealt_in_the_order_of_the_plan() -> None:
    desk = Assignments(5)

    assert desk.assign("one", 2) == [0, 1]
    assert desk.assign("other", 9) == [2, 3, 4]
    assert desk.assign("one", 1) == []
    assert (desk.holds("one"), desk.holds("other"), desk.left) == (2, 3, 0)


def test_what_a_worker_has_left_comes_first() -> None:
    desk = Assignments(6)
    desk.assign("one", 3)
    desk.answer("one", 1)

    assert desk.requeue("one") == 2
    assert desk.left == 5
    assert desk.assign("other", 3) == [0, 2, 3]


def test_a_place_is_answered_by_the_one_who_holds_it() -> None:
    desk = Assignments(2)
    desk.assign("one", 2)
    desk.requeue("one")
    desk.assign("other", 2)

    with pytest.raises(KeyError):
        desk.answer("one", 0)


@given(
    total=st.integers(0, 40),
    moves=st.lists(st.tuples(st.sampled_from(["deal", "answer", "die"]), st.integers(0, 3), st.integers(1, 7))),
)
def test_every_place_is_answered_once_whoever_dies(total: int, moves: list[tuple[str, int, int]]) -> None:
    desk = Assignments(total)
    answered: list[int] = []

    def answer(worker: int) -> None:
        for place in sorted(desk.held.get(worker, ())):
            desk.answer(worker, place)
            answered.append(place)

    for move, worker, amount in moves:
        if move == "deal":
            assert len(desk.assign(worker, amount)) <= amount
        elif move == "answer":
            answer(worker)
        else:
            desk.requeue(worker)
        held = [place for places in desk.held.values() for place in places]
        assert len(held) == len(set(held))
        assert desk.done == (len(answered) == total)
    for worker in list(desk.held):
        desk.requeue(worker)
    while desk.left:
        desk.assign("last", 3)
    answer("last")  # type: ignore[arg-type]  # a name is as good as a number

    assert sorted(answered) == list(range(total))
    assert desk.done
