"""Tests of training rows from transcripts: which dialogues and answers are used, and the history of each answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from partita.data.episode import Episode
from partita.data.sources.sources import open_rows
from partita_schema.errors import DataError
from partita_schema.sections.sources import SimulationSource


def dialogue(key: str, answers: list[tuple[str, str | None]], **outcome: Any) -> Episode:
    """Return a dialogue of questions with answers and the correct answers."""
    made = Episode(key, key, {}, 0)
    for number, (text, gold) in enumerate(answers):
        made.observe([{"role": "user", "content": f"question {number}"}], gold=gold)
        made.act(text, (1,))
    made.ok, made.target = outcome.get("ok"), outcome.get("target")
    made.end(outcome.get("status", "done"), outcome.get("reason"))
    return made


RIGHT = dialogue("right", [("a", "a"), ("b", "b")])
WRONG = dialogue("wrong", [("a", "a"), ("x", "b")])
JUDGED = dialogue("judged", [("y", "a"), ("x", "b")], ok=False, target="c")
UNKNOWN = dialogue("unknown", [("a", None)])
LOST = dialogue("lost", [("x", None)], ok=False)
FAILED = dialogue("failed", [("x", "a")], status="failed", reason="environment: it broke")


def rows_of(folder: Path, *dialogues: Episode, **source: Any) -> list[tuple[list[str], list[str]]]:
    """Return the input and the loss text of each row."""
    return rows_of_lines(folder, *(made.line() for made in dialogues), **source)


def rows_of_lines(folder: Path, *lines: dict[str, Any], **source: Any) -> list[tuple[list[str], list[str]]]:
    """Return the input and the loss text of each row of transcript lines."""
    path = folder / "predicted.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf8")
    rows = open_rows(SimulationSource(type="simulation", path="predicted.jsonl", **source), folder=folder)
    result = rows.get(range(len(rows)))
    assert all(row["train_all"] is False for row in result)
    assert [rows.key(number) for number in range(len(rows))] == [f"predicted.jsonl:{n + 1}" for n in range(len(rows))]
    return [([message["content"] for message in row["messages"]], row["labels"]) for row in result]


ALL = (RIGHT, WRONG, JUDGED, UNKNOWN, LOST, FAILED)


def test_wrong_last_answers_are_corrected_with_the_real_history(tmp_path: Path) -> None:
    assert rows_of(tmp_path, *ALL) == [
        (["question 0", "a", "question 1"], ["b"]),
        (["question 0", "y", "question 1"], ["c"]),
    ]


def test_every_turn_with_a_known_correct_answer_is_trained(tmp_path: Path) -> None:
    assert rows_of(tmp_path, WRONG, JUDGED, LOST, target="every_agent_turn") == [
        (["question 0"], ["a"]),
        (["question 0", "a", "question 1"], ["b"]),
        (["question 0"], ["a"]),
        (["question 0", "y", "question 1"], ["c"]),
    ]


def test_successful_answers_are_trained_unchanged(tmp_path: Path) -> None:
    result = rows_of(tmp_path, *ALL, select="succeeded", target="every_agent_turn")

    assert result == [(["question 0"], ["a"]), (["question 0", "a", "question 1"], ["b"])]
    assert rows_of(tmp_path, *ALL, select="succeeded") == result[1:]


def test_successful_and_corrected_dialogues_can_be_combined(tmp_path: Path) -> None:
    assert [labels for _, labels in rows_of(tmp_path, *ALL, select="all")] == [["b"], ["b"], ["c"]]


def test_without_training_rows_the_error_counts_the_dialogues(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        rows_of(tmp_path, RIGHT, RIGHT, UNKNOWN, LOST, FAILED)

    assert str(raised.value) == (
        "predicted.jsonl: no dialogue can be trained on with select: corrected; there are 1 failed, "
        "1 of unknown outcome, 2 succeeded, 1 wrong, with no right answer known"
    )


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n', encoding="utf8")

    with pytest.raises(DataError, match=r"chats.jsonl:1 is not a dialogue of a simulation \(KeyError: 'dialogue'\)"):
        open_rows(SimulationSource(type="simulation", path="chats.jsonl"), folder=tmp_path)


def test_rows_of_transcripts_are_the_same_in_every_run(tmp_path: Path) -> None:
    rows_of(tmp_path, *ALL)
    source = {"type": "simulation", "path": str(tmp_path / "predicted.jsonl"), "select": "all"}

    assert open_rows(source, folder=tmp_path).fingerprint == open_rows(source, folder=tmp_path).fingerprint


def corrected(made: Episode, index: int) -> dict[str, Any]:
    """Return the line of a dialogue with a correction in a message."""
    line = made.line()
    line["messages"][index]["correction"] = "corrected"
    return line


def retried(*, ok: bool) -> Episode:
    """Return a dialogue whose first answer to its second question was rejected by the checker."""
    made = Episode("retried", "retried", {}, 0)
    made.observe("question 0")
    made.act("a", (1,))
    made.observe("question 1")
    made.act("rejected", (1,))
    made.observe("try again", agent="checker")
    made.act("accepted", (1,))
    made.ok, made.rounds, made.target = ok, 1, None if ok else "right"
    made.end("done")
    return made


@pytest.mark.parametrize("select", ["succeeded", "all"])
def test_an_answer_that_the_checker_rejected_is_not_learned(select: str, tmp_path: Path) -> None:
    assert rows_of(tmp_path, retried(ok=True), select=select, target="every_agent_turn") == [
        (["question 0"], ["a"]),
        (["question 0", "a", "question 1"], ["accepted"]),
        (["question 0", "a", "question 1", "rejected", "try again"], ["accepted"]),
    ]


def test_the_right_answer_of_the_checker_is_learned_in_place_of_all_rejected_ones(tmp_path: Path) -> None:
    assert rows_of(tmp_path, retried(ok=False), target="every_agent_turn") == [
        (["question 0", "a", "question 1"], ["right"]),
        (["question 0", "a", "question 1", "rejected", "try again"], ["right"]),
    ]


@pytest.mark.parametrize("target", ["last_agent_turn", "every_agent_turn"])
def test_a_correction_in_a_failed_dialogue_is_learned(target: str, tmp_path: Path) -> None:
    assert rows_of_lines(tmp_path, corrected(FAILED, 1), target=target) == [(["question 0"], ["corrected"])]
    other = dialogue("failed", [("x", "a"), ("y", "b")], status="failed", reason="environment: it broke")
    assert rows_of_lines(tmp_path, corrected(other, 1), target=target) == [(["question 0"], ["corrected"])]


def test_a_correction_of_another_speaker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="message 0 has a correction, but is no answer of the main agent"):
        rows_of_lines(tmp_path, corrected(RIGHT, 0))


def test_an_episode_that_was_truncated_before_its_reward_is_no_success(tmp_path: Path) -> None:
    done, cut = dialogue("done", [("a", None), ("b", None)]), dialogue("cut", [("x", "a"), ("y", None)])
    done.reward = 1.0
    cut.status, cut.reason = "truncated", "turns"
    assert rows_of(tmp_path, done, cut, target="every_agent_turn") == [(["question 0"], ["a"])]
    with pytest.raises(DataError, match="there are 1 of unknown outcome"):
        rows_of(tmp_path, cut)


def test_rows_of_a_gold_history_have_the_answers_that_the_model_saw(tmp_path: Path) -> None:
    gold = dialogue("gold", [("x", "a"), ("y", "b")])
    gold.shows_gold = True
    assert rows_of(tmp_path, gold) == [(["question 0", "a", "question 1"], ["b"])]
    assert rows_of(tmp_path, WRONG) == [(["question 0", "a", "question 1"], ["b"])]
    gold.shows_gold = False
    assert rows_of(tmp_path, gold) == [(["question 0", "x", "question 1"], ["b"])]


def test_learned_answers_that_ended_at_the_token_limit_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut = dialogue("cut", [("a", "a"), ("b", "b")])
    cut.replies[1].is_cut = True
    rows_of(tmp_path, cut, RIGHT, WRONG, select="all")
    (message,) = caplog.messages
    assert message == (
        "predicted.jsonl: 1 of 3 answers to learn ended at the token limit; training on them teaches the model to stop "
        "there: simulate with a larger generation.max_new_tokens"
    )
    caplog.clear()
    cut.replies[1].gold = "another"
    rows_of(tmp_path, cut, select="all")
    assert not caplog.messages
