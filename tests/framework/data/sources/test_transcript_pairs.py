"""Tests of pairs and labelled answers from transcripts: which answers are compared, and what gives no pair."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from partita.data.episode import Episode
from partita.data.sources.sources import open_rows
from partita.data.sources.transcripts import WantedRows
from partita_schema.common.checksums import sealed_line
from partita_schema.errors import DataError
from partita_schema.sections.sources import SimulationSource

PAIRS = WantedRows(pairs=True)
LABELLED = WantedRows(label="liked")


def attempt(*said: str, task: str = "task-0", ok: bool | None = None, **outcome: Any) -> Episode:
    """Return an episode in which the user and the model speak in turn; messages of the checker begin with `!`."""
    made = Episode(f"{task}#{outcome.get('number', 1)}", task, {}, 0)
    for number, text in enumerate(said):
        if number % 2:
            made.act(text, (1,))
        else:
            made.observe(text.removeprefix("!"), agent="checker" if text[:1] == "!" else "user")
    gold = outcome.get("gold", ())
    for reply, right in zip(made.replies, gold, strict=False):
        reply.gold = right
    made.ok, made.reward, made.target = ok, outcome.get("reward"), outcome.get("target")
    made.end(outcome.get("status", "done"))
    return made


def read(folder: Path, *lines: Episode | dict[str, Any], wanted: WantedRows = PAIRS, **source: Any) -> list[Any]:
    """Return the rows of episodes: their messages, what is chosen, and what is rejected or the label."""
    path = folder / "predicted.jsonl"
    written = [line.line() if isinstance(line, Episode) else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in written), encoding="utf8")
    rows = open_rows(SimulationSource(type="simulation", path=path.name, **source), folder=folder, wanted=wanted)
    return [
        (
            [message["content"] for message in row["messages"]],
            row["labels"][0],
            row["rejected"]["content"] if wanted.pairs else row["liked"],
        )
        for row in rows.get(range(len(rows)))
    ]


BEST: dict[str, Any] = {"select": "best_and_worst"}


def test_the_first_answers_in_which_the_best_and_the_worst_attempt_differ_are_a_pair(tmp_path: Path) -> None:
    attempts = [
        attempt("tea", "how many", "two", "one tea", "no", "bye", reward=0.2),
        attempt("tea", "how many", "two", "two teas", reward=1.0),
        attempt("tea", "what", reward=0.5),
    ]

    assert read(tmp_path, *attempts, **BEST) == [(["tea", "how many", "two"], "two teas", "one tea")]


def test_a_success_is_better_than_a_larger_reward(tmp_path: Path) -> None:
    attempts = [attempt("tea", "cheap", ok=True, reward=0.1), attempt("tea", "dear", ok=False, reward=0.9)]

    assert read(tmp_path, *attempts, **BEST) == [(["tea"], "cheap", "dear")]


def test_attempts_are_compared_with_those_at_the_same_task_and_with_the_same_beginning(tmp_path: Path) -> None:
    attempts = [
        attempt("tea", "yes", task="a", ok=True),
        attempt("milk", "yes", task="b", ok=True),
        attempt("rum", "sorry", task="b", ok=False),  # the environment began in another way
        attempt("milk", "no", task="b", ok=False),
        attempt("tea", "never", task="a", ok=False),
    ]

    assert read(tmp_path, *attempts, **BEST) == [(["tea"], "yes", "never"), (["milk"], "yes", "no")]


def test_attempts_without_a_pair_are_counted_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempts = [
        attempt("tea", "yes", task="pair", ok=True),
        attempt("tea", "no", task="pair", ok=False),
        attempt("tea", "yes", task="tie", ok=True),
        attempt("tea", "yes!", task="tie", ok=True),
        attempt("tea", "yes", task="equal", ok=True),
        attempt("tea", "yes", task="equal", ok=False),
        attempt("tea", "yes", task="alone", ok=True),
        attempt("tea", "no", task="alone", status="failed"),
        attempt("tea", "", task="empty", ok=False),
        attempt("tea", "yes", task="empty", ok=True),
        attempt("tea", "yes", task="other", ok=True),
        attempt("rum", "no", task="other", ok=False),
        attempt("tea", "yes", task="unknown"),
        attempt("tea", "no", task="unknown"),
    ]
    with caplog.at_level(logging.INFO):
        assert len(read(tmp_path, *attempts, **BEST)) == 1

    reasons = (
        "1 task whose attempts are equally good, 1 task whose attempts differ before an answer of the model, "
        "1 task whose attempts have equal answers, 1 task with an empty answer, "
        "2 tasks with fewer than two attempts of known outcome"
    )
    assert caplog.messages == [f"predicted.jsonl: 1 pair of answers; without any: {reasons}"]
    with pytest.raises(DataError) as raised:
        read(tmp_path, *attempts[2:], **BEST)
    assert str(raised.value) == (
        f"predicted.jsonl: no pair of answers can be made with select: best_and_worst; there are {reasons}; sample "
        "several attempts at each task, with generation: {do_sample: true}, repeats: 4 and repeats_share_seed: true in "
        "simulation"
    )


def limit_warning(cut: int, rows: str) -> str:
    return (
        f"predicted.jsonl: {cut} of {rows} to learn ended at the token limit; training on them teaches the model to "
        "stop there: simulate with a larger generation.max_new_tokens"
    )


def test_an_answer_that_ended_at_the_token_limit_is_chosen_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut, whole, wrong = (attempt("tea", said, ok=said != "no") for said in ("yes and", "yes", "no"))
    cut.replies[0].is_cut = True
    assert read(tmp_path, cut, whole, wrong, **BEST) == [(["tea"], "yes", "no")]
    cut.ok, wrong.ok = False, True
    assert read(tmp_path, cut, wrong, **BEST) == [(["tea"], "no", "yes and")]
    assert not caplog.messages
    cut.ok, wrong.ok = True, False
    assert read(tmp_path, cut, wrong, **BEST) == [(["tea"], "yes and", "no")]
    assert caplog.messages == [limit_warning(1, "1 answer")]


def test_good_answers_that_ended_at_the_token_limit_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = attempt("tea", "yes and", ok=True), attempt("tea", "no and", ok=False)
    good.replies[0].is_cut = bad.replies[0].is_cut = True
    read(tmp_path, good, bad, wanted=LABELLED, select="all")
    assert caplog.messages == [limit_warning(1, "2 answers")]


def test_known_right_answers_are_chosen_and_wrong_ones_rejected(tmp_path: Path) -> None:
    judged = attempt("tea", "one", "no", "three", ok=False, target="two", gold=["a tea", "two, please"])

    assert read(tmp_path, judged) == [(["tea", "one", "no"], "two", "three")]
    assert read(tmp_path, judged, target="every_agent_turn") == [
        (["tea"], "a tea", "one"),
        (["tea", "one", "no"], "two", "three"),
    ]
    # The last wrong answer, also if the dialogue went on rightly after it.
    assert read(tmp_path, attempt("tea", "one", "no", "two", ok=False, gold=["two", "two"])) == [
        (["tea"], "two", "one")
    ]


def test_an_accepted_retry_is_chosen_before_the_rejected_answer(tmp_path: Path) -> None:
    retried = attempt("tea", "one", "!wrong", "three", "!wrong", "two", ok=True)

    assert read(tmp_path, retried) == [(["tea", "one", "wrong"], "two", "three")]
    assert read(tmp_path, retried, target="every_agent_turn") == [
        (["tea"], "two", "one"),
        (["tea", "one", "wrong"], "two", "three"),
    ]


def test_a_correction_in_the_file_is_chosen_whatever_the_outcome(tmp_path: Path) -> None:
    line = attempt("tea", "one", "no", "two", ok=True).line()
    line["messages"][1]["correction"] = "how many?"

    assert read(tmp_path, line) == [(["tea"], "how many?", "one")]
    assert read(tmp_path, line, wanted=LABELLED, select="all") == [(["tea"], "one", False)]
    rows = open_rows({"type": "simulation", "path": str(tmp_path / "predicted.jsonl")}, folder=tmp_path)
    assert [(row["messages"][-1]["content"], row["labels"]) for row in rows.get([0])] == [("tea", ["how many?"])]


def test_a_changed_line_needs_no_checksum_and_a_text_as_correction(tmp_path: Path) -> None:
    line = attempt("tea", "one", ok=True).line()
    line["messages"][1]["correction"] = 2
    with pytest.raises(DataError, match=r"predicted.jsonl:1 .* \(ValueError: the correction 2 is not a text\)"):
        read(tmp_path, line)
    line["messages"][1]["correction"] = "two"
    sealed = sealed_line(json.dumps(line).encode()).replace(b"two", b"ten")
    (tmp_path / "changed.jsonl").write_bytes(sealed)
    with pytest.raises(DataError, match="or remove the checksum of a line that you have changed"):
        open_rows({"type": "simulation", "path": "changed.jsonl"}, folder=tmp_path)


def test_dialogues_without_a_corrected_answer_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dialogues = [
        attempt("tea", "one", ok=False, target="two"),
        attempt("tea", "two", ok=True),
        attempt("tea", "one", ok=False),
        attempt("tea", "one"),
        attempt("tea", "one", status="failed"),
        attempt("tea", "two", ok=False, target="two"),
    ]
    with caplog.at_level(logging.INFO):
        assert len(read(tmp_path, *dialogues)) == 1

    assert caplog.messages == [
        (
            "predicted.jsonl: 1 pair of answers; without any: 1 failed, 1 of unknown outcome, 1 succeeded, 1 wrong, "
            "1 wrong, with no right answer known"
        )
    ]


def test_answers_are_labelled_by_the_outcome(tmp_path: Path) -> None:
    dialogues = [
        attempt("tea", "two", ok=True),
        attempt("tea", "a", "no", "one", ok=False, target="two", gold=["a", None]),
        attempt("tea", "one", "!wrong", "two", ok=True),
        attempt("tea", "one"),
        attempt("tea", "one", status="failed"),
        attempt("tea", " ", ok=False),
    ]

    assert read(tmp_path, *dialogues, wanted=LABELLED, select="all") == [
        (["tea"], "two", True),
        (["tea", "a", "no"], "one", False),
        (["tea", "one", "wrong"], "two", True),
    ]
    assert read(tmp_path, *dialogues[1:3], wanted=LABELLED, select="all", target="every_agent_turn") == [
        (["tea"], "a", True),
        (["tea", "a", "no"], "one", False),
        (["tea"], "one", False),
        (["tea", "one", "wrong"], "two", True),
    ]


@pytest.mark.parametrize(("wanted", "select"), [(PAIRS, "corrected"), (PAIRS, "best_and_worst"), (LABELLED, "all")])
def test_turns_with_several_outputs_are_refused(tmp_path: Path, wanted: WantedRows, select: str) -> None:
    line = attempt("tea", "{}", ok=True).line()
    line["messages"][1]["values"] = '{"a": 1}'
    with pytest.raises(DataError) as raised:
        read(tmp_path, line, wanted=wanted, select=select)

    assert str(raised.value) == (
        "dialogue task-0#1 has turns with several outputs, and single texts are compared; simulate with a model of one "
        "text output"
    )
