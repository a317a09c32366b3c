"""Tests of the built-in checkers: verdicts, targets, and dialogues without a verdict."""

import re
from typing import Any

import pytest

from partita.data.episode import Episode
from partita.simulation.checkers import Contains, Exact, JsonEqual, Regex


def dialogue(said: str, *, gold: str | None = None, **task: Any) -> Episode:
    result = Episode("a", "a", task, 1)
    result.observe([{"role": "user", "content": "what?"}], gold=gold)
    result.act(said, ())
    return result


@pytest.mark.parametrize(
    ("checker", "answer", "right", "ok"),
    [
        (Exact(), " four\n", "four", True),
        (Exact(), "Four", "four", False),
        (Exact(ignore_case=True), "Four", "four", True),
        (Contains(), "it is four.", "four", True),
        (Contains(), "it is Four.", "four", False),
        (Contains(ignore_case=True), "it is Four.", "fouR", True),
        (Contains(), "it is five.", "four", False),
        (JsonEqual(), '{"b": [1, 2], "a": "x"}', '{"a":"x","b":[1.0,2]}', True),
        (JsonEqual(), '{"a": [2, 1]}', '{"a": [1, 2]}', False),
        (JsonEqual(), '{"a": true}', '{"a": 1}', False),
        (JsonEqual(), '{"a": 1}', '{"a": 1, "b": null}', False),
        (JsonEqual(), "null", "[]", False),
    ],
)
def test_answers_are_compared_with_the_correct_one(checker: Any, answer: str, right: str, ok: bool) -> None:
    for asked in (dialogue(answer, gold=right), dialogue(answer, answer=right)):
        verdict = checker.check(asked)
        assert verdict.ok == ok
        assert verdict.target == right


@pytest.mark.parametrize(
    ("checker", "answer", "ok"),
    [
        (Exact(), "4", True),
        (Exact(), "five", False),
        (Contains(), "it is 4.", True),
        (JsonEqual(), "4.0", True),
        (JsonEqual(), "5", False),
        (Exact(column="sum"), "4", False),
    ],
)
def test_any_of_several_right_answers_of_the_world_is_right(checker: Any, answer: str, ok: bool) -> None:
    asked = Episode("a", "a", {"sum": "9"}, 1)
    asked.observe([{"role": "user", "content": "what?"}])
    asked.gold, asked.other_golds = '"four"', ("4",)
    asked.act(answer, ())

    assert checker.check(asked).ok == ok


def test_a_configured_column_takes_precedence_over_gold_and_gold_over_the_column_answer() -> None:
    asked = dialogue("four", gold="four", answer="five", sum="six")

    assert [Exact(column=column).check(asked).target for column in (None, "sum", "answer")] == ["four", "six", "five"]


def test_an_empty_right_answer_is_no_answer() -> None:
    for checker in (Exact(), Contains(), Exact(column="sum")):
        with pytest.raises(ValueError, match=r"the right answer is not known: the task's (answer|sum) is empty"):
            checker.check(dialogue("null", answer=None, sum=None))
    assert JsonEqual().check(dialogue("null", answer=None)).ok, "null is JSON"
    with pytest.raises(ValueError, match="the right answer is empty, and every answer contains it; write one, or"):
        Contains().check(dialogue("four", answer=""))
    assert Exact().check(dialogue(" ", answer="")).ok
    with pytest.raises(ValueError, match="the right answer four is not JSON"):
        JsonEqual().check(dialogue("4", answer="four"))


def test_json_that_is_nested_too_deeply_is_wrong() -> None:
    verdict = JsonEqual().check(dialogue("[" * 100_000, answer=[1]))
    assert (verdict.ok, verdict.metrics) == (False, {"is_json": 0.0})


def test_invalid_json_is_wrong_and_counted() -> None:
    unread, read = (JsonEqual().check(dialogue(text, answer={"a": 1})) for text in ("{a: 1}", '{"a": 1}'))

    assert (unread.ok, unread.metrics) == (False, {"is_json": 0.0})
    assert (read.ok, read.metrics) == (True, {"is_json": 1.0})
    assert unread.target == '{"a": 1}'


def test_a_pattern_needs_no_correct_answer() -> None:
    checker = Regex(pattern=r"^\d+ rooms?$", feedback="say how many")

    assert [checker.check(dialogue(text)).ok for text in ("1 room", "2 rooms", "2 rooms here", "rooms")] == [
        True,
        True,
        False,
        False,
    ]
    assert checker.check(dialogue("rooms")).feedback == "say how many"
    with pytest.raises(re.error):
        Regex(pattern="(")


@pytest.mark.parametrize(
    ("checker", "asked", "text"),
    [
        (Exact(), dialogue("four"), "the right answer is not known; name its column in options: {column: ...}"),
        (Exact(column="sum"), dialogue("four", one=1, two=2), "the task has no column sum; it has one, two"),
        (Exact(), Episode("a", "a", {}, 1), "the model has not answered"),
    ],
)
def test_unknown_names_are_reported(checker: Any, asked: Episode, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        checker.check(asked)
