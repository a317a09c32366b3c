"""Tests of the dialogue page: metrics, worst dialogues first, some of every kind, and no HTML from the model."""

import re
from html.parser import HTMLParser
from typing import Any

from partita.data.episode import Episode
from partita.report.transcript_page import LONGEST, choose, kind_of, page
from partita.simulation.report import outcomes_of


class Page(HTMLParser):
    """Parse tags, links and texts of a page; check that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str | None] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data)


def episode_of(
    key: str, *, answer: str = "two", gold: str | None = "two", status: Any = "done", **rest: Any
) -> Episode:
    result = Episode(key, key, {}, 1)
    result.observe([{"role": "user", "content": "how many?"}], gold=gold)
    result.act(answer, (1,))
    result.end(status, rest.pop("reason", None))
    for name, value in rest.items():
        setattr(result, name, value)
    return result


def shown(**dialogues: list[Episode]) -> Page:
    outcomes = {history: outcomes_of(result, repeats=1) for history, result in dialogues.items()}
    return Page(page(outcomes, dialogues, title="Dialogues of waiter"))


def test_answers_are_shown_next_to_correct_ones_and_both_histories_side_by_side() -> None:
    result = shown(
        gold=[episode_of("a"), episode_of("b")], predicted=[episode_of("a"), episode_of("b", answer="three")]
    )

    assert "right answer: two" in result.texts
    assert result.texts.count("right") == 3
    assert result.texts.count("model") == 4
    row = result.texts.index("exact_turns")
    assert result.texts[row + 1 : row + 3] == ["1.0000", "0.5000"]
    assert "exact_turns: 1.0000 with gold history, 0.5000 with its own: -0.5000." in result.texts


def test_a_single_history_has_no_comparison() -> None:
    assert not any("with gold history" in text for text in shown(predicted=[episode_of("a")]).texts)


def test_the_worst_dialogues_are_first_with_their_status() -> None:
    result = shown(
        predicted=[
            episode_of("right"),
            episode_of("unknown", gold=None),
            episode_of("wrong", answer="three", ok=False, target="two", rounds=1, metrics={"slots": 0.5}),
            episode_of("long", status="truncated", reason="turns", reward=0.25),
            episode_of("broken", status="failed", reason="environment: OSError: the desk is closed"),
        ]
    )
    lines = [text for text in result.texts if re.match(r"(right|unknown|wrong|long|broken): ", text)]

    assert lines == [
        "broken: failed (environment: OSError: the desk is closed)",
        "long: truncated (turns), reward 0.25",
        "wrong: done, checker: not ok, it should have ended with 'two', sent back 1 time, slots 0.5",
        "unknown: done",
        "right: done",
    ]


def test_messages_are_escaped() -> None:
    bad = '</td><script src="http://x">alert(1)</script><img src=x onerror=1>'
    one = episode_of(bad, answer=bad, gold=bad + "!", ok=False, target=bad, metrics={bad: 1.0})
    broken = episode_of("b", status="failed", reason=f"environment: {bad}")
    result = shown(predicted=[one, broken])

    assert not {"script", "img", "link", "iframe"} & set(result.tags)
    assert result.links == []
    assert sum(bad in text for text in result.texts) >= 4


def test_the_number_of_dialogues_on_a_page_is_limited_and_every_kind_is_included() -> None:
    kinds = {
        "failed": [episode_of(f"f{number}", status="failed", reason="model: no") for number in range(3)],
        "without success": [episode_of(f"w{number}", answer="three") for number in range(40)],
        "success": [episode_of(f"s{number}") for number in range(900)],
    }
    dialogues = [dialogue for result in kinds.values() for dialogue in result]
    chosen = choose(dialogues, most=100)

    assert [kind_of(dialogue) for dialogue in chosen] == [
        *["failed"] * 3,
        *["without success"] * 40,
        *["success"] * 57,
    ]
    result = shown(predicted=dialogues)
    assert result.tags.count("details") == 200
    assert any("743 of them are not on this page; all are in predicted.jsonl." in text for text in result.texts)


def test_long_messages_and_dialogues_are_cut() -> None:
    long = episode_of("a", answer="x" * (LONGEST + 7))
    long.observe([{"role": "user", "content": "and?"}] * 150)
    result = shown(predicted=[long])

    assert f"{'x' * LONGEST} ... and 7 characters more" in result.texts
    assert "52 more messages" in result.texts
