"""Tests of the dialogue page: metrics, worst dialogues first, some of every kind, and no HTML from the model."""

import re

from partita.data.episode import Episode
from partita.report.transcript_page import LONGEST, choose, kind_of, page
from partita.simulation.report import column, outcomes_of

from .made_runs import dialogue
from .pages import Page


def shown(**dialogues: list[Episode]) -> Page:
    columns = {history: column(outcomes_of(result, repeats=1)) for history, result in dialogues.items()}
    return Page(page(columns, dialogues, title="Dialogues of waiter"))


def test_answers_are_shown_next_to_correct_ones_and_both_histories_side_by_side() -> None:
    result = shown(gold=[dialogue("a"), dialogue("b")], predicted=[dialogue("a"), dialogue("b", answer="three")])

    assert "right answer: two" in result.texts
    assert result.texts.count("right") == 3
    assert result.texts.count("model") == 4
    row = result.texts.index("exact_turns")
    assert result.texts[row + 1] == "1.000"  # every resample is the same
    assert result.texts[row + 2].startswith("0.500 (")
    assert result.texts[row + 3].startswith("-0.500 (")
    assert result.after("success", count=1)[0].startswith("1.000 (0.")
    sentence = (
        "The success rate is 0.500 (95 % interval 0.095 to 0.905) in 2 dialogues with predicted history; with gold "
    )
    assert f"{sentence}history it is 1.000." in result.texts


def test_a_single_history_has_no_comparison() -> None:
    result = shown(predicted=[dialogue("a")])

    assert not any("gold history" in text for text in result.texts)
    assert "difference" not in result.texts


def test_dialogues_of_repeated_tasks_have_no_intervals() -> None:
    repeats = [dialogue(f"a/{repeat}", answer=answer) for repeat, answer in enumerate(["two", "three"])]
    for repeat in repeats:
        repeat.task_key = "a"

    result = shown(predicted=repeats)

    assert result.after("success", count=1) == ["0.500"]
    assert "The success rate is 0.500 in 2 dialogues with predicted history." in result.texts


def test_the_first_sentence_has_no_interval_if_all_dialogues_are_the_same() -> None:
    both = [Episode(key, key, {}, 1) for key in "ab"]
    for one in both:
        for gold in ("two", None):  # with a turn that has no right answer, success is not known
            one.observe([{"role": "user", "content": "how many?"}], gold=gold)
            one.act("two", (1,))
        one.end("done", None)

    assert "The share of right answers is 1.000 in 2 dialogues with predicted history." in shown(predicted=both).texts


def test_the_worst_dialogues_are_first_with_their_status() -> None:
    result = shown(
        predicted=[
            dialogue("right"),
            dialogue("unknown", gold=None),
            dialogue("wrong", answer="three", ok=False, target="two", rounds=1, metrics={"slots": 0.5}),
            dialogue("long", status="truncated", reason="turns", reward=0.25),
            dialogue("broken", status="failed", reason="environment: OSError: the desk is closed"),
        ]
    )
    lines = [text for text in result.texts if re.match(r"(right|unknown|wrong|long|broken): ", text)]

    assert lines == [
        "broken: failed (environment: OSError: the desk is closed)",
        "long: truncated (turns), reward 0.25",
        "wrong: done, checker: not ok, the right last answer is 'two', sent back 1 time, slots 0.5",
        "unknown: done",
        "right: done",
    ]


def test_messages_are_escaped() -> None:
    bad = '</td><script src="http://x">alert(1)</script><img src=x onerror=1>'
    one = dialogue(bad, answer=bad, gold=bad + "!", ok=False, target=bad, metrics={bad: 1.0})
    broken = dialogue("b", status="failed", reason=f"environment: {bad}")
    result = shown(predicted=[one, broken])

    assert not {"script", "img", "link", "iframe"} & set(result.tags)
    assert not [value for _, name, value in result.attributes if name in ("href", "src")]
    assert sum(bad in text for text in result.texts) >= 4


def test_the_number_of_dialogues_on_a_page_is_limited_and_every_kind_is_included() -> None:
    kinds = {
        "failed": [dialogue(f"f{number}", status="failed", reason="model: no") for number in range(3)],
        "without success": [dialogue(f"w{number}", answer="three") for number in range(40)],
        "success": [dialogue(f"s{number}") for number in range(900)],
    }
    dialogues = [dialogue for result in kinds.values() for dialogue in result]
    chosen = choose(dialogues, most=100)

    assert [kind_of(dialogue) for dialogue in chosen] == [
        *["failed"] * 3,
        *["without success"] * 40,
        *["success"] * 57,
    ]
    result = shown(predicted=dialogues)
    assert sum(text.startswith(("f", "w", "s")) and ": " in text for text in result.texts) >= 200
    assert "943 dialogues, the worst first; 200 of them are shown, all are in predicted.jsonl" in result.texts


def test_long_messages_and_dialogues_are_cut() -> None:
    long = dialogue("a", answer="x" * (LONGEST + 7))
    long.observe([{"role": "user", "content": "and?"}] * 150)
    result = shown(predicted=[long])

    assert f"{'x' * LONGEST} ... and 7 characters more" in result.texts
    assert "52 more messages" in result.texts
