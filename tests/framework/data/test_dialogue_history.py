from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.dialogue import HistoryLimits, answers, history

Row = tuple[str, str]


def episode(exchanges: int, *, system: bool = False) -> list[dict[str, Any]]:
    """x1 y1 x2 y2 ..."""
    said: list[dict[str, Any]] = [{"role": "system", "content": "s"}] if system else []
    for number in range(1, exchanges + 1):
        said.append({"role": "user", "content": f"x{number}"})
        said.append({"role": "assistant", "content": f"y{number}", "train": True})
    return said


def squashed(messages: list[dict[str, Any]], context: HistoryLimits, count: Any = None) -> list[Row]:
    return [
        (
            " ".join(shown["content"] for shown in history(messages, index, context=context, count=count)),
            messages[index]["content"],
        )
        for index in answers(messages)
    ]


def test_a_tool_call_with_its_result_is_part_of_the_exchange_of_its_question() -> None:
    called = {"role": "assistant", "content": "", "train": True, "tool_calls": [{"function": {"name": "f"}}]}
    messages = [*episode(1), {"role": "user", "content": "x2"}, called, {"role": "tool", "content": "t"}]

    assert history(messages, 5, context=HistoryLimits(context_turns=1)) == messages[2:]
    counted = history(messages, 5, context=HistoryLimits(context_tokens=5), count=len)
    assert counted == messages[4:]


# The tables of ParlAI's document on squashed episodes: an episode of four exchanges.


def test_without_labels_and_context_limit_the_history_has_all_questions() -> None:
    assert squashed(episode(4), HistoryLimits(include_labels=False)) == [
        ("x1", "y1"),
        ("x1 x2", "y2"),
        ("x1 x2 x3", "y3"),
        ("x1 x2 x3 x4", "y4"),
    ]


def test_with_labels_the_context_length_counts_questions_and_answers() -> None:
    assert squashed(episode(4), HistoryLimits(include_labels=True, context_length=3)) == [
        ("x1", "y1"),
        ("x1 y1 x2", "y2"),
        ("x2 y2 x3", "y3"),
        ("x3 y3 x4", "y4"),
    ]


@pytest.mark.parametrize(
    ("context", "last"),
    [
        (HistoryLimits(), "x1 y1 x2 y2 x3 y3 x4"),
        (HistoryLimits(context_length=1), "x4"),
        (HistoryLimits(context_length=2), "y3 x4"),
        (HistoryLimits(context_length=99), "x1 y1 x2 y2 x3 y3 x4"),
        (HistoryLimits(include_labels=False, context_length=2), "x3 x4"),
        (HistoryLimits(context_turns=1), "x4"),
        (HistoryLimits(context_turns=2), "x3 y3 x4"),
        (HistoryLimits(context_turns=2, include_labels=False), "x3 x4"),
        (HistoryLimits(context_turns=3, context_length=2), "y3 x4"),
        (HistoryLimits(context_turns=9), "x1 y1 x2 y2 x3 y3 x4"),
        (HistoryLimits(context_tokens=6), "x3 y3 x4"),
        (HistoryLimits(context_tokens=7), "x3 y3 x4"),
        (HistoryLimits(context_tokens=1), "x4"),
    ],
)
def test_the_last_row_of_four_exchanges(context: HistoryLimits, last: str) -> None:
    assert squashed(episode(4), context, count=len)[-1] == (last, "y4")


def test_the_first_system_message_is_always_shown_and_not_counted() -> None:
    for context in (HistoryLimits(context_length=1), HistoryLimits(context_turns=1), HistoryLimits(context_tokens=2)):
        assert squashed(episode(3, system=True), context, count=len)[-1] == ("s x3", "y3")


def test_questions_in_several_messages_are_one_turn() -> None:
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "train": True},
        {"role": "user", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e", "train": True},
    ]
    assert squashed(said, HistoryLimits(context_turns=1))[-1] == ("c d", "e")
    assert squashed(said, HistoryLimits(context_length=1))[-1] == ("d", "e")


messages = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content, "train": role == "assistant"},
        st.sampled_from(["user", "assistant", "tool"]),
        st.text(alphabet="ab", min_size=1, max_size=5),
    ),
    max_size=12,
)
limits = st.none() | st.integers(1, 8)


@given(messages, st.booleans(), limits, limits, limits)
def test_a_history_is_a_suffix_within_the_limits(
    said: list[dict[str, Any]], include: bool, length: int | None, turns: int | None, tokens: int | None
) -> None:
    context = HistoryLimits(include, length, turns, tokens)
    for index in answers(said):
        shown = history(said, index, context=context, count=len)
        whole = [message for message in said[:index] if include or message["role"] != "assistant"]
        assert not shown or whole[-len(shown) :] == shown
        assert length is None or len(shown) <= length
        if tokens is not None and len(shown) > 1:
            assert sum(len(message["content"]) for message in shown) <= tokens
        if (length, turns, tokens) == (None, None, None):
            assert shown == whole
        # Rows are truncated when they are made and again when they are shown.
        assert history(shown, len(shown), context=context, count=len) == shown
        asked_at_last = whole and said[index - 1]["role"] != "assistant"
        assert not asked_at_last or shown[-1] == whole[-1]
