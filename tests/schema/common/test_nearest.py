"""Tests of suggestions for misspelt names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita_schema.common.text import distance, nearest

KEYS = ["batch_size", "epochs", "learning_rate", "r", "seed", "beta1", "beta2"]


@pytest.mark.parametrize(
    ("left", "right", "steps"),
    [
        ("", "abc", 3),
        ("abc", "abc", 0),
        ("abc", "acb", 1),
        ("abc", "ab", 1),
        ("abc", "xbc", 1),
        ("kitten", "sitting", 3),
    ],
)
def test_the_distance_counts_swaps_of_adjacent_letters_as_one(left: str, right: str, steps: int) -> None:
    assert distance(left, right) == steps


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_the_distance_is_symmetric_and_bounded(a: str, b: str, c: str) -> None:
    assert distance(a, b) == distance(b, a)
    assert (distance(a, b) == 0) == (a == b)
    assert abs(len(a) - len(b)) <= distance(a, b) <= max(len(a), len(b))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("batch_sise", ["batch_size"]),
        ("batchSize", ["batch_size"]),
        ("batch-size", ["batch_size"]),
        ("epohcs", ["epochs"]),
        ("sede", ["seed"]),
        ("beta3", ["beta1", "beta2"]),
        ("rr", ["r"]),
        ("q", []),
        ("", []),
        ("temperature", []),
        ("x" * 10_000, []),
    ],
)
def test_similar_names_are_found(name: str, meant: list[str]) -> None:
    assert nearest(name, KEYS) == meant


def test_a_misspelled_class_is_found_regardless_of_case() -> None:
    assert nearest("ZeroShott", ["Finetune", "ZeroShot"]) == ["ZeroShot"]
    assert nearest("pissaa", ["PiSSA", "OLoRA"]) == ["PiSSA"]
