"""Tests of best of n: the answer with the highest reward is kept, from the same samples in every run."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.generation.best_of import AnswerChooser, BestOf
from partita.generation.requests import RowResult
from partita.lm.base import Generated, GenerationOptions
from partita_schema.config import Config
from partita_schema.errors import JobError, OutOfMemory, ResumeError

from ..lm.conftest import sharpen
from ..outputs.conftest import config_of
from .conftest import nano_model

SAMPLED = GenerationOptions({"do_sample": True, "temperature": 2.0, "top_k": 0})
SAMPLES = 4
ROWS = [{"question": "x" * (1 + 5 * n % 11), "n": n} for n in range(6)]
CONFIG = config_of(generation={"do_sample": True, "best_of": SAMPLES, "reward": "rm"})


@dataclass(frozen=True)
class Score:
    value: float | None
    error: str | None = None


@dataclass
class Rule:
    """A reward by a rule, in place of a model."""

    rule: Callable[[Mapping[str, Any], str], float | None]
    fingerprint: str = "a rule"
    config: Config = CONFIG
    asked: list[tuple[Any, str]] = field(default_factory=list)
    most: int = 10**9
    """Most answers that fit in memory."""

    def scores(self, row: Mapping[str, Any], answers: Sequence[str]) -> list[Score]:
        if len(answers) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.asked += [(row.get("n"), answer) for answer in answers]
        values = [self.rule(row, answer) for answer in answers]
        return [Score(value, None if value is not None else "too long") for value in values]


def vowels(row: Mapping[str, Any], answer: str) -> float:
    """Return a reward with ties, which depends on the row too."""
    return float((sum(map(ord, answer)) + row["n"]) % 5)


@pytest.fixture(scope="module")
def lm() -> Any:
    lm = nano_model()
    sharpen(lm.module)
    return lm


def predicted(predict: Any, lm: Any, rows: Any, rule: Rule, *, keep: bool = True, **options: Any) -> list[Any]:
    generation = {**CONFIG.generation.model_dump(), "keep_samples": keep}
    config = config_of(generation=generation)
    best_of = BestOf(SAMPLES, rule, keep_samples=keep)
    arguments = {"generation": SAMPLED, "max_new_tokens": 5} | options
    return list(predict(lm, rows, config=config, best_of=best_of, **arguments))


def test_the_answer_with_the_highest_reward_is_kept_and_the_first_of_a_tie(lm, make_rows, predict) -> None:
    rule = Rule(vowels)
    rows = predicted(predict, lm, make_rows(ROWS), rule)
    ties = 0
    for row in rows:
        rewards = [sample["reward"] for sample in row["samples"]]
        assert rewards == [vowels(row, sample["text"]) for sample in row["samples"]]
        best = rewards.index(max(rewards))
        assert (row["answer"], row["reward"]) == (row["samples"][best]["text"], max(rewards))
        ties += rewards.count(max(rewards)) > 1
    assert ties, "some row has a tie"
    assert [row["n"] for row in rows] == list(range(6))
    assert len(set(rule.asked)) == len(rule.asked), "equal answers to a row are scored once"
    assert any(row["answer"] != row["samples"][0]["text"] for row in rows)


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 7}, {"batch_size": 64}])
def test_the_batch_size_changes_no_answer(lm, make_rows, predict, options: dict[str, Any]) -> None:
    usual = predicted(predict, lm, make_rows(ROWS), Rule(vowels))
    again = predicted(predict, lm, make_rows(ROWS), Rule(vowels), fresh=True, **options)
    assert again == usual


def test_samples_are_left_out_of_the_table_unless_they_are_kept(lm, make_rows, predict, tmp_path: Path) -> None:
    rows = predicted(predict, lm, make_rows(ROWS), Rule(vowels), keep=False, output=tmp_path / "answers.csv")
    assert "samples" not in rows[0]
    assert list(rows[0])[-2:] == ["tokens", "reward"]
    header = (tmp_path / "answers.csv").read_text("utf8").splitlines()[0]
    assert header.endswith(",tokens,reward")


def test_a_table_holds_rewards_as_numbers_and_samples_as_json(lm, make_rows, predict, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    rows = predicted(predict, lm, make_rows(ROWS), Rule(vowels), output=tmp_path / "answers.parquet")
    table = pq.read_table(tmp_path / "answers.parquet")
    assert table["reward"].to_pylist() == [row["reward"] for row in rows]
    assert [json.loads(text) for text in table["samples"].to_pylist()] == [row["samples"] for row in rows]


def test_a_column_named_reward_keeps_its_values_under_another_name(lm, make_rows, predict) -> None:
    rows = predicted(predict, lm, make_rows([row | {"reward": 7} for row in ROWS]), Rule(vowels))
    assert {row["reward_input"] for row in rows} == {7}


def test_a_resumed_job_gives_the_answers_of_an_uninterrupted_one(lm, make_rows, predict, tmp_path: Path) -> None:
    usual = predicted(predict, lm, make_rows(ROWS), Rule(vowels), batch_size=5)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:3]))
    rule = Rule(vowels)
    assert predicted(predict, lm, make_rows(ROWS), rule, batch_size=5) == usual
    assert len({n for n, _ in rule.asked}) == len(ROWS) - 2, "two rows were in the journal"


def test_the_answers_of_another_reward_model_are_not_reused(lm, make_rows, predict) -> None:
    predicted(predict, lm, make_rows(ROWS), Rule(vowels))
    with pytest.raises(ResumeError, match=r"answers changed .*reward a rule -> .*reward another rule"):
        predicted(predict, lm, make_rows(ROWS), Rule(vowels, fingerprint="another rule"))


def test_answers_without_a_reward_are_not_chosen(lm, make_rows, predict, caplog: pytest.LogCaptureFixture) -> None:
    usual = predicted(predict, lm, make_rows(ROWS), Rule(vowels))
    bad = {usual[0]["answer"]} | {sample["text"] for sample in usual[1]["samples"]}
    rule = Rule(lambda row, answer: None if row["n"] < 2 and answer in bad else vowels(row, answer))
    with caplog.at_level(logging.WARNING):
        rows = predicted(predict, lm, make_rows(ROWS), rule, fresh=True)
    assert rows[0]["answer"] not in bad
    assert {sample["reward"] for sample in rows[0]["samples"] if sample["text"] in bad} == {None}
    assert (rows[1]["answer"], rows[1]["status"]) == (None, "error")
    assert rows[1]["error"] == "no answer has a reward: too long"
    assert rows[2:] == usual[2:]
    assert "answers without a reward, which cannot be chosen; the last one because: too long" in caplog.text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_a_finite_number_is_none(lm, make_rows, predict, value: float) -> None:
    rows = predicted(predict, lm, make_rows(ROWS), Rule(lambda row, answer: value))
    assert {row["error"] for row in rows} == {"no answer has a reward: the reward is not a number"}


@pytest.mark.long  # garbage is collected after each error
def test_rewards_that_do_not_fit_in_memory_are_computed_for_fewer_answers(lm, make_rows, predict) -> None:
    usual = predicted(predict, lm, make_rows(ROWS), Rule(vowels))
    assert predicted(predict, lm, make_rows(ROWS), Rule(vowels, most=3), fresh=True) == usual
    rows = predicted(predict, lm, make_rows(ROWS[:1]), Rule(vowels, most=0), fresh=True)
    reason = "no answer has a reward: the reward of this answer does not fit in memory even alone"
    assert {row["error"] for row in rows} == {reason}


def test_an_answer_that_is_too_large_for_the_reward_model_alone_has_no_reward(lm, make_rows, predict) -> None:
    usual = predicted(predict, lm, make_rows(ROWS), Rule(vowels))

    def refusing(row: Mapping[str, Any], answer: str) -> float:
        if answer == usual[0]["answer"]:
            raise OutOfMemory("a prompt of 9 tokens does not fit in memory even alone; shorten it")
        return vowels(row, answer)

    rows = predicted(predict, lm, make_rows(ROWS), Rule(refusing), fresh=True)
    assert rows[0]["answer"] != usual[0]["answer"]
    assert rows[1:] == usual[1:]


def test_a_broken_device_ends_the_job(lm, make_rows, predict) -> None:
    def broken(row: Mapping[str, Any], answer: str) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(JobError, match="the device failed and cannot continue"):
        predicted(predict, lm, make_rows(ROWS), Rule(broken))


def test_a_row_of_which_a_sample_failed_is_an_error(make_rows) -> None:
    chooser = AnswerChooser(BestOf(2, Rule(vowels)), make_rows(ROWS))
    answer = Generated((1,), "a", "stop")
    assert chooser.take([RowResult(0, answer), RowResult(3, answer)]) == []
    assert chooser.take([RowResult(1, None, "the model's scores are NaN")]) == [
        RowResult(0, None, "the model's scores are NaN")
    ]
    assert chooser.take([RowResult(2, answer)]) == [RowResult(1, answer, reward=vowels(ROWS[1], "a"))]


@pytest.mark.parametrize("size", [1, 3, 12])
def test_a_row_is_scored_by_itself_as_soon_as_its_samples_are_there(make_rows, size: int) -> None:
    rule = Rule(vowels)
    chooser = AnswerChooser(BestOf(4, rule), make_rows(ROWS))
    # The second row is finished first.
    order = [4, 0, 5, 6, 1, 7, 2, 8, 3, 9, 10, 11]
    samples = [RowResult(number, Generated((1,), f"{number}", "stop")) for number in order]
    chosen = []
    for start in range(0, len(samples), size):
        chosen += chooser.take(samples[start : start + size])
        complete = [row for row in (1, 0, 2) if {4 * row + n for n in range(4)} <= {*order[: start + size]}]
        assert [result.row for result in chosen] == complete
        assert rule.asked == [(row, f"{4 * row + number}") for row in complete for number in range(4)]
    best = [max(vowels(ROWS[row], f"{4 * row + number}") for number in range(4)) for row in (1, 0, 2)]
    assert [result.reward for result in chosen] == best


def test_an_evaluation_scores_the_chosen_answers(lm, make_rows, predict, answer) -> None:
    rule = Rule(vowels)
    chosen = predicted(predict, lm, make_rows(ROWS), Rule(vowels))
    found = answer(
        lm, make_rows(ROWS), generation=SAMPLED, max_new_tokens=5, best_of=BestOf(SAMPLES, rule), batch_size=9
    )
    assert {one.row: one.decoded.values["answer"] for one in found} == {row["n"]: row["answer"] for row in chosen}
