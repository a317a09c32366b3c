import json
import logging
import os
import pickle
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from partita.generation.answer_lengths import default_new_tokens
from partita.generation.job import Tally
from partita.generation.predict import finish_started_rows
from partita.generation.predictions import PredictionStats
from partita.generation.spent import Spent
from partita.lm.base import GenerationOptions
from partita.lm.scripted import ScriptedModel
from partita_schema.errors import ResumeError

from ...json_lines import read_json_lines

KIND = {"name": "kind", "type": "category", "decoder": {"labels": ["even", "odd"]}}
QUESTIONS = [{"question": "x" * (1 + n * 7 % 10), "kind": "even", "n": n} for n in range(10)]


def parity(prompt: str) -> str:
    return "it is " + ("odd" if prompt.count("x") % 2 else "even")


def test_rows_are_returned_in_input_order_with_their_columns(make_config: Any, make_rows: Any, predict: Any) -> None:
    predictions = predict(ScriptedModel(parity), make_rows(QUESTIONS), config=make_config(KIND))
    assert [row["n"] for row in predictions] == list(range(10))
    assert predictions[3] == {
        "key": "data:4",
        "question": "xx",
        "kind_input": "even",
        "n": 3,
        "kind": "even",
        "kind_raw": "it is even",
        "status": "ok",
        "error": None,
        "finish_reason": "stop",
        "tokens": 10,
    }
    assert [row["kind"] for row in predictions] == [parity(row["question"]).split()[-1] for row in QUESTIONS]


def test_outcomes_are_counted(make_rows: Any, predict: Any) -> None:
    stats = predict(ScriptedModel(str.upper), make_rows(QUESTIONS)).stats
    assert (stats.rows, stats.ok, stats.errors, stats.skipped, stats.resumed, stats.batches) == (10, 10, 0, 0, 0, 3)
    assert stats.prompt_tokens == stats.generated_tokens == sum(len(row["question"]) for row in QUESTIONS)
    assert 0 < stats.padding < 0.5
    assert stats.tokens_per_second == pytest.approx(stats.generated_tokens / stats.seconds)


@pytest.mark.parametrize(
    ("rate", "tokens", "text"),
    [
        (1234.5, 5, "5 tokens in 2.0 s (1,234 tokens/s)"),
        (2.54, 5, "5 tokens in 2.0 s (2.5 tokens/s)"),
        (0.04, 1, "1 token in 2.0 s (0.04 tokens/s)"),
        (0.0, 0, "3 prompt tokens in 2.0 s (1.5 tokens/s)"),
    ],
)
def test_singular_and_slow_rates_are_formatted(rate: float, tokens: int, text: str) -> None:
    stats = PredictionStats(
        rows=1,
        ok=0,
        errors=1,
        skipped=0,
        batches=1,
        seconds=2.0,
        prompt_tokens=3,
        generated_tokens=tokens,
        tokens_per_second=rate,
    )
    assert str(stats) == f"1 row, 0 answered, 1 error, {text}"


def test_progress_shows_no_token_rate_without_generation() -> None:
    assert Tally(Spent(prompt_tokens=8, seconds=2.0)).display_values == {"prompt_tokens_per_second": 4.0}
    assert Tally(Spent(prompt_tokens=8, seconds=2.0), generated_tokens=1).display_values == {
        "tokens_per_second": 0.5,
        "prompt_tokens_per_second": 4.0,
    }


def test_unreadable_answers_are_counted_and_reported(make_config: Any, make_rows: Any, predict: Any) -> None:
    lm = ScriptedModel(lambda prompt: "even" if len(prompt) % 2 else "neither")
    stats = predict(lm, make_rows(QUESTIONS), config=make_config(KIND)).stats
    silent = sum(len(row["question"]) % 2 == 0 for row in QUESTIONS)
    assert 0 < silent < 10
    assert (stats.ok, stats.unreadable) == (10, silent)
    assert str(stats).startswith(f"10 rows, 10 answered, {silent} unreadable, ")


def test_a_finished_job_is_not_generated_again(make_rows: Any, predict: Any, caplog: Any, tmp_path: Path) -> None:
    lm = ScriptedModel(str.upper)
    first = list(predict(lm, make_rows(QUESTIONS)))
    calls = lm.calls
    with caplog.at_level(logging.INFO):
        again = predict(lm, make_rows(QUESTIONS))
    assert (lm.calls, list(again), again.stats.resumed) == (calls, first, 10)
    assert f"resumed 10 of 10 from {tmp_path / 'journal.jsonl'}" in caplog.messages


def test_errors_and_unusable_rows_keep_their_position(make_rows: Any, predict: Any, caplog: Any) -> None:
    def answer(prompt: str) -> str:
        if prompt == "bad":
            raise ValueError("no such luck")
        return prompt.upper()

    rows = make_rows([{"question": text} for text in ("good", "bad", "", "y" * 50, "fine")])
    predictions = predict(ScriptedModel(answer, context_length=40), rows)
    results = [(row["status"], row["answer"], row["error"]) for row in predictions]
    assert results == [
        ("ok", "GOOD", None),
        ("error", None, "ValueError: no such luck"),
        ("skipped", None, "column question is missing or empty"),
        ("error", None, "the prompt has 50 tokens and the context holds 40; nothing can be answered"),
        ("ok", "FINE", None),
    ]
    assert (predictions.stats.ok, predictions.stats.errors, predictions.stats.skipped) == (2, 2, 1)
    assert "without an answer: 3 of 5 rows (2 errors, 1 skipped); the column error holds the reasons" in caplog.messages


def test_only_errors_are_retried_if_requested(make_rows: Any, predict: Any, tmp_path: Path) -> None:
    broken = ["bad"]

    def answer(prompt: str) -> str:
        if prompt in broken:
            raise ValueError("no such luck")
        return prompt.upper()

    lm, rows = ScriptedModel(answer), make_rows([{"question": text} for text in ("good", "bad", "")])
    predict(lm, rows)
    broken.clear()
    assert [row["status"] for row in predict(lm, rows)] == ["ok", "error", "skipped"]
    again = predict(lm, rows, retry_errors=True)
    assert [(row["status"], row["answer"]) for row in again] == [("ok", "GOOD"), ("ok", "BAD"), ("skipped", None)]
    assert again.stats.resumed == 2
    lines = (tmp_path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["attempt"] for line in lines[1:]] == [1, 1, 1, 2]


def test_an_answer_without_a_value_has_a_reason(make_config: Any, make_rows: Any, predict: Any) -> None:
    lm = ScriptedModel(lambda prompt: "no idea")
    row = predict(lm, make_rows(QUESTIONS), config=make_config(KIND))[0]
    assert (row["kind"], row["kind_raw"], row["status"], row["error"]) == (
        None,
        "no idea",
        "ok",
        "no label in 'no idea'",
    )
    several = make_config(KIND, {"name": "age", "type": "number"})
    lm = ScriptedModel(lambda prompt: '{"kind": "odd"}')
    row = predict(lm, make_rows(QUESTIONS), config=several, fresh=True)[0]
    assert (row["kind"], row["age"], row["kind_raw"], row["age_raw"]) == ("odd", None, "odd", '{"kind": "odd"}')
    assert row["error"] == "age: the answer has no 'age'"


def test_a_changed_decoder_reads_the_same_answers_again(make_config: Any, make_rows: Any, predict: Any) -> None:
    lm = ScriptedModel(parity)
    predict(lm, make_rows(QUESTIONS), config=make_config(KIND))
    calls = lm.calls
    other = {"name": "kind", "type": "category", "decoder": {"match": {"A": {"value": "even"}, "B": {"value": "odd"}}}}
    predictions = predict(lm, make_rows(QUESTIONS), config=make_config(other))
    assert {row["kind"] for row in predictions} == {"A", "B"}
    assert lm.calls == calls


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"fingerprint": {"model": "other", "data": "rows"}}, r"model changed \(scripted -> other\)"),
        ({"max_new_tokens": 8}, r"answers changed \(max_new_tokens 64 -> max_new_tokens 8\)"),
    ],
)
def test_a_job_that_changed_is_refused(make_rows: Any, predict: Any, change: Any, expected: str) -> None:
    lm = ScriptedModel(str.upper)
    predict(lm, make_rows(QUESTIONS))
    with pytest.raises(ResumeError, match=expected):
        predict(lm, make_rows(QUESTIONS), **change)
    assert predict(lm, make_rows(QUESTIONS), fresh=True, **change).stats.resumed == 0


def test_batch_size_may_change_and_the_seed_unless_answers_are_sampled(make_rows: Any, predict: Any) -> None:
    lm = ScriptedModel(str.upper)
    predict(lm, make_rows(QUESTIONS), batch_size=4, seed=1)
    assert predict(lm, make_rows(QUESTIONS), batch_size=2, seed=2).stats.resumed == 10
    sampled = {"generation": GenerationOptions({"do_sample": True})}
    predict(lm, make_rows(QUESTIONS), fresh=True, seed=1, **sampled)
    assert predict(lm, make_rows(QUESTIONS), batch_size=2, seed=1, **sampled).stats.resumed == 10
    with pytest.raises(
        ResumeError, match=r"answers changed \(max_new_tokens 64, seed 1 -> max_new_tokens 64, seed 2\)"
    ):
        predict(lm, make_rows(QUESTIONS), batch_size=2, seed=2, **sampled)


def test_the_same_rows_are_in_every_format(make_config: Any, make_rows: Any, predict: Any, tmp_path: Path) -> None:
    import pandas as pd

    lm, config = ScriptedModel(lambda prompt: '{"a": [1]}'), make_config({"name": "found", "type": "json"})
    for name in ("out.jsonl", "deep/out.csv", "out.parquet"):
        predictions = predict(lm, make_rows(QUESTIONS), config=config, output=tmp_path / name)
        assert predictions.path == tmp_path / name
    lines = read_json_lines(tmp_path / "out.jsonl")
    assert lines == list(predictions)
    frame = predictions.to_pandas()
    assert list(frame.columns) == list(predictions.columns)
    assert frame["found"].tolist() == [{"a": [1]}] * 10
    for read in (pd.read_csv(tmp_path / "deep/out.csv"), pd.read_parquet(tmp_path / "out.parquet")):
        assert list(read.columns) == list(predictions.columns)
        assert read["found"].tolist() == ['{"a": [1]}'] * 10
        assert read["n"].tolist() == list(range(10))
    dataset = predictions.to_dataset()
    assert dataset.column_names == list(predictions.columns)
    assert dataset["n"][:] == list(range(10))


def test_predictions_are_a_sequence(make_rows: Any, predict: Any) -> None:
    predictions = predict(ScriptedModel(str.upper), make_rows(QUESTIONS))
    assert len(predictions) == 10
    assert predictions[-1] == predictions[9] == list(predictions)[9]
    assert predictions[2:4] == [predictions[2], predictions[3]]
    assert [answer.row for answer in predictions.answers()] == list(range(10))
    with pytest.raises(IndexError, match="there is no row 10; there are 10 rows, from 0"):
        predictions[10]
    with pytest.raises(TypeError, match="read their rows from files; pickle list"):
        pickle.dumps(predictions)


def test_input_columns_with_conflicting_names_are_renamed(make_rows: Any, predict: Any) -> None:
    row = {"question": "x", "key": 1, "answer": 2, "answer_input": 3, "status": 4}
    result = predict(ScriptedModel(str.upper), make_rows([row]))[0]
    assert result["key"] == "data:1"
    assert (result["key_input"], result["answer_input_input"], result["answer_input"]) == (1, 2, 3)
    assert (result["answer"], result["status_input"], result["status"]) == ("X", 4, "ok")


def test_no_rows_give_no_predictions(make_rows: Any, predict: Any, tmp_path: Path) -> None:
    predictions = predict(ScriptedModel(str.upper), make_rows([]), output=tmp_path / "out.jsonl")
    assert (list(predictions), predictions.stats.rows) == ([], 0)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


class Asked:
    """A model that raises a signal when a prompt of 3 characters is answered, `times` times."""

    def __init__(self, number: signal.Signals = signal.SIGTERM, times: int = 1) -> None:
        self.number, self.left = number, times

    def __call__(self, prompt: str) -> str:
        while len(prompt) == 3 and self.left:
            self.left -= 1
            os.kill(os.getpid(), self.number)
        return prompt.upper()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_started_rows_are_finished_and_the_job_resumes_later(
    make_rows: Any, predict: Any, number: signal.Signals, caplog: Any
) -> None:
    before = signal.getsignal(number)
    lm, rows = ScriptedModel(Asked(number)), make_rows(QUESTIONS)
    with pytest.raises(KeyboardInterrupt), caplog.at_level(logging.INFO):
        predict(lm, rows)
    again = "; interrupt again to stop now" if number == signal.SIGINT else ""
    assert f"finishing the rows in progress, for 20 s at most{again}" in caplog.messages
    assert signal.getsignal(number) == before
    predictions = predict(lm, rows)
    assert predictions.stats.resumed == 8, "two batches of four"
    assert [row["answer"] for row in predictions] == [row["question"].upper() for row in QUESTIONS]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(make_rows: Any, predict: Any, number: signal.Signals) -> None:
    lm, rows = ScriptedModel(Asked(number, times=2)), make_rows(QUESTIONS)
    with pytest.raises(KeyboardInterrupt):
        predict(lm, rows)
    assert predict(lm, rows).stats.resumed == 4


def test_started_rows_have_limited_time_to_end() -> None:
    with finish_started_rows("static", finish_seconds=-1) as stopping:
        assert not stopping()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            stopping()


def test_a_job_whose_last_rows_were_started_is_done(make_rows: Any, predict: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    result = predict(ScriptedModel(Asked()), make_rows(QUESTIONS), batch_size=10, output=path)
    assert [row["answer"] for row in result] == [row["question"].upper() for row in QUESTIONS]
    assert len(path.read_text(encoding="utf8").splitlines()) == 10


def test_rows_to_be_retried_count_as_remaining(make_rows: Any, predict: Any) -> None:
    def failing(prompt: str) -> str:
        raise ValueError("no such luck")

    rows = make_rows(QUESTIONS)
    assert predict(ScriptedModel(failing), rows).stats.errors == 10
    with pytest.raises(KeyboardInterrupt):
        predict(ScriptedModel(Asked()), rows, retry_errors=True)
    assert predict(ScriptedModel(str.upper), rows).stats.errors == 2


def test_progress_starts_at_the_resumed_rows(make_rows: Any, predict: Any) -> None:
    class Noted:
        def advance(self, amount: int = 1, **shown: Any) -> None:
            advanced.append(amount)

    @contextmanager
    def progress(total: int, description: str, *, completed: int = 0) -> Any:
        started.append((total, description, completed))
        yield Noted()

    started: list[Any] = []
    advanced: list[int] = []
    lm, rows = ScriptedModel(str.upper), make_rows(QUESTIONS)
    predict(lm, rows, progress=progress)
    predict(lm, rows, progress=progress)
    assert started == [(10, "predicting", 0), (10, "predicting", 10)]
    assert advanced == [4, 4, 2]


def test_rows_are_answered_without_a_journal(make_config: Any, make_rows: Any, answer: Any, tmp_path: Path) -> None:
    answers = answer(ScriptedModel(parity), make_rows([*QUESTIONS, {"question": None}]), config=make_config(KIND))
    results = {answer.row: (answer.record.status, answer.decoded.values["kind"]) for answer in answers}
    asked = {row["n"]: ("ok", parity(row["question"]).split()[-1]) for row in QUESTIONS}
    assert results == asked | {10: ("skipped", None)}
    assert list(tmp_path.iterdir()) == []


LIMITED = {"decoder": {"max_new_tokens": 40}, "preprocessing": {"max_sequence_length": 30}}
RULES = {"decoder": {"match": {"x": {"value": "a long rule"}}}}


@pytest.mark.parametrize(
    ("outputs", "sections", "expected"),
    [
        ([{"name": "a", "type": "text"}], {}, 256),
        ([{"name": "a", "type": "number"}], {}, 256),
        ([{"name": "a", "type": "text", "preprocessing": {"max_sequence_length": 30}}], {}, 30),
        ([{"name": "a", "type": "json"} | LIMITED], {}, 40),
        ([KIND], {}, len("even") + 8),
        ([KIND], {"generation": {"max_new_tokens": 99}}, 99),
        ([{"name": "a", "type": "category"}], {}, len("seen in data") + 8),
        ([{"name": "a", "type": "category"} | RULES], {}, len("a long rule") + 8),
        ([KIND, {"name": "a", "type": "text"}], {}, 12 + 256 + len('"kind": "", ') + len('"a": "", ') + 2),
    ],
)
def test_the_token_limit_of_an_answer_depends_on_its_outputs(
    make_config: Any, outputs: Any, sections: Any, expected: int
) -> None:
    tokenizer = ScriptedModel(str.upper).tokenizer
    result = default_new_tokens(make_config(*outputs, **sections), tokenizer=tokenizer, labels={"a": ("seen in data",)})
    assert result == expected
