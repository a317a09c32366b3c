"""Tests of settings that do not fit together: reported with key and advice."""

from typing import Any

import pytest

from partita_schema.load import load_config

from ..refusals import last_line_of

FILE: dict[str, Any] = {
    "base_model": "base",
    "input_features": [{"name": "question", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
}
BEST = {"best_of": 8, "reward": "runs/rm", "do_sample": True}
REWARD = "generation.reward: reward has no effect on a single answer; add best_of: 8 or remove it"
GREEDY = (
    "all answers of best_of are the same without sampling; write do_sample: true and a temperature above 0, or remove "
    "best_of"
)


@pytest.mark.parametrize("key", ["epsilon_cutoff", "eta_cutoff"])
def test_a_cutoff_that_transformers_ignores_is_reported(key: str) -> None:
    wanted = f"generation.{key}: write a number of at least 0 and below 1; got 1"
    assert last_line_of(FILE | {"generation": {"do_sample": True, key: 1}}) == wanted


@pytest.mark.parametrize("key", ["typical_p", "top_h"])
def test_a_filter_that_keeps_nothing_is_reported(key: str) -> None:
    wanted = f"generation.{key}: write a number above 0 and at most 1; got 0"
    assert last_line_of(FILE | {"generation": {"do_sample": True, key: 0}}) == wanted


@pytest.mark.parametrize(
    ("generation", "text"),
    [
        (
            {"best_of": 8, "do_sample": True},
            (
                "generation.best_of: a reward model chooses among the answers; add reward, the directory of a run with "
                "trainer: {type: reward}, or remove best_of"
            ),
        ),
        (BEST | {"best_of": 1}, "generation.best_of: write an integer of at least 2; got 1"),
        ({"reward": "runs/rm"}, REWARD),
        (
            {"keep_samples": True},
            "generation.keep_samples: keep_samples has no effect on a single answer; add best_of: 8 or remove it",
        ),
        (BEST | {"do_sample": False}, f"generation.do_sample: {GREEDY}"),
        ({"best_of": 8, "reward": "runs/rm", "temperature": 0}, f"generation.temperature: {GREEDY}"),
        (
            BEST | {"num_beams": 4},
            "generation.num_beams: best_of samples answers, and beams search for one; remove num_beams",
        ),
    ],
)
def test_settings_that_choose_no_answer_are_reported(generation: dict[str, Any], text: str) -> None:
    assert last_line_of(FILE | {"generation": generation}) == text


def test_a_paged_cache_needs_continuous_batching() -> None:
    assert last_line_of(FILE | {"generation": {"slots": False, "kv_cache": "paged"}}) == (
        "generation.kv_cache: kv_cache: paged is a kind of continuous batching, and slots: false turns it off; remove "
        "one of them"
    )
    assert last_line_of(FILE | {"generation": {"kv_cache": "page"}}) == (
        "generation.kv_cache: got page; did you mean paged?"
    )


def test_a_checkpoint_may_say_that_answers_are_sampled() -> None:
    generation = load_config(FILE | {"generation": {"best_of": 8, "reward": "runs/rm"}}).config.generation
    assert (generation.best_of, generation.reward, generation.keep_samples) == (8, "runs/rm", False)


def test_labels_that_are_scored_have_no_several_answers() -> None:
    output = {"name": "answer", "type": "category", "decoder": {"labels": ["a", "b"], "scoring": True}}
    assert last_line_of(FILE | {"output_features": [output], "generation": BEST}) == (
        "generation.best_of: scoring generates nothing, so best_of has no effect; remove one of the two"
    )
