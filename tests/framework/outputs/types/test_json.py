"""Tests of the metrics of dialogue states, by hand and on states of other shapes."""

import random
from typing import Any

import pytest

from partita.outputs.base import ReadError
from partita.outputs.types.json import JsonMetrics, JsonReader, canonical

STATES: list[tuple[dict[str, Any], Any]] = [
    ({"area": "north", "stars": 4}, {"area": "north", "stars": 4}),  # all right
    ({"area": "north", "stars": 4}, {"area": "north"}),  # one missing
    ({}, {"area": "south"}),  # one too many
    ({"area": "west"}, {"area": "east", "phone": "1"}),  # one wrong, and one that no reference has
    ({}, {}),
]


def results_of(pairs: list[tuple[Any, Any]]) -> dict[str, float]:
    metrics = JsonMetrics()
    for truth, value in pairs:
        metrics.add(truth, value, valid=value is not None)
    return metrics.results(len(pairs))


def test_joint_accuracy_and_slot_scores_of_states_equal_those_by_hand() -> None:
    results = results_of(STATES)

    assert results["joint_accuracy"] == results["exact_match"] == 2 / 5
    # area is wrong in the third and the fourth row, stars in the second; the other slots are equal or absent in both.
    assert results["slot_accuracy"] == pytest.approx(1 - 3 / (5 * 2))
    # 3 of 5 slots of the references are answered rightly, and 3 of 6 slots of the answers are right.
    assert results["slot_f1"] == pytest.approx(2 * 3 / (5 + 6))
    assert results["slot.area"] == pytest.approx(2 * 2 / (3 + 4))
    assert results["slot.stars"] == pytest.approx(2 * 1 / (2 + 1))
    assert "slot.phone" not in results


def test_slots_of_nested_states_are_paths_and_a_list_is_one_value() -> None:
    truth = {"hotel": {"area": "north", "days": ["mon", "tue"]}, "taxi": {}}
    results = results_of([(truth, {"hotel": {"area": "north", "days": ["tue", "mon"]}, "taxi": {}})])

    assert [name for name in results if name.startswith("slot.")] == ["slot.hotel.area", "slot.hotel.days", "slot.taxi"]
    assert (results["slot.hotel.area"], results["slot.hotel.days"], results["slot.taxi"]) == (1, 0, 1)
    assert results["slot_accuracy"] == pytest.approx(2 / 3)


def test_an_unreadable_answer_is_wrong_in_every_slot_of_its_reference() -> None:
    results = results_of([({"area": "north"}, None), ({}, None)])

    assert (results["joint_accuracy"], results["slot_f1"], results["slot_accuracy"]) == (0, 0, 0.5)


def test_states_without_any_slot_have_the_joint_accuracy_as_their_slot_scores() -> None:
    results = results_of([({}, {}), ({}, None)])

    assert results["joint_accuracy"] == results["slot_accuracy"] == results["slot_f1"] == 0.5


def test_a_dot_in_a_key_is_no_path() -> None:
    results = results_of([({"a": {"b": 2}}, {"a.b": 2})])

    assert (results["exact_match"], results["slot_f1"], results["slot.a.b"]) == (0, 0, 0)


@pytest.mark.parametrize(("first", "second"), [(10**16, 1e16), (2.0**53, 2**53), (1, 1.0)])
def test_whole_numbers_are_equal_however_they_are_written(first: float, second: float) -> None:
    assert canonical({"a": first}) == canonical({"a": second})


@pytest.mark.parametrize("text", ['{"a": 1e400}', "[1, [-1e999]]", "1e400"])
def test_a_number_that_no_float_holds_is_unreadable(text: str) -> None:
    with pytest.raises(ReadError, match="a number is too large"):
        JsonReader(None).read(text)


def test_values_that_are_no_objects_have_no_slots() -> None:
    assert not {"joint_accuracy", "slot_accuracy", "slot_f1"} & results_of([([1], [1]), ("a", {"b": 1})]).keys()


def test_slot_scores_of_flat_states_equal_a_loop_over_all_slots_and_rows() -> None:
    rng = random.Random(7)

    def state() -> dict[str, int]:
        return {slot: rng.randint(0, 2) for slot in "abcd" if rng.random() < 0.6}

    pairs: list[tuple[Any, Any]] = [(state(), state()) for _ in range(50)]
    slots = sorted({slot for truth, _ in pairs for slot in truth})
    equal = [truth.get(slot) == value.get(slot) for truth, value in pairs for slot in slots]
    same = sum(canonical(truth) == canonical(value) for truth, value in pairs)
    hits = sum(truth[slot] == value.get(slot) for truth, value in pairs for slot in truth)
    precision = hits / sum(len(value) for _, value in pairs)
    recall = hits / sum(len(truth) for truth, _ in pairs)

    results = results_of(pairs)

    assert results["joint_accuracy"] == same / 50
    assert results["slot_accuracy"] == pytest.approx(sum(equal) / len(equal))
    assert results["slot_f1"] == pytest.approx(2 * precision * recall / (precision + recall))
