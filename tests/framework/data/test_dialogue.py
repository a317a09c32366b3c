import pickle
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from partita.data.dialogue import Expander, HistoryLimits, expanded, for_scores
from partita.data.rows import Rows
from partita.data.sources.sources import open_rows

EPISODE = {
    "episode": [
        {"text": "x1", "labels": ["y1"]},
        {"text": "x2", "labels": ["a", "b", "c"]},
        {"text": "x3", "labels": ["y3"]},
    ]
}


def expander(mode: Any, **changes: Any) -> Expander:
    return Expander(column="messages", format_name="auto", mode=mode, **changes)


def as_text(rows: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str, list[str]]]:
    return [
        (key, " ".join(m["content"] for m in row["messages"]["messages"]), row["messages"]["labels"])
        for key, row in rows
    ]


def test_each_mode_expands_a_dialogue_to_its_rows() -> None:
    assert as_text(expander("packed_dialogue").expand(EPISODE, "e:1")) == [("e:1", "x1 y1 x2 a x3", ["y3"])]
    assert as_text(expander("last_turn").expand(EPISODE, "e:1")) == [("e:1", "x1 y1 x2 a x3", ["y3"])]
    assert as_text(expander("squash").expand(EPISODE, "e:1")) == [
        ("e:1#1", "x1", ["y1"]),
        ("e:1#2", "x1 y1 x2", ["a"]),
        ("e:1#3", "x1 y1 x2 a x3", ["y3"]),
    ]


def test_every_correct_answer_may_have_a_separate_row() -> None:
    assert as_text(expander("squash", labels="all").expand(EPISODE, "e:1"))[1:4] == [
        ("e:1#2", "x1 y1 x2", ["a"]),
        ("e:1#3", "x1 y1 x2", ["b"]),
        ("e:1#4", "x1 y1 x2", ["c"]),
    ]


def test_a_random_answer_is_the_same_in_every_run_and_in_the_history() -> None:
    makers = [expander("squash", labels="random", seed=seed) for seed in range(30)]
    chosen = []
    for maker in makers:
        rows = as_text(maker.expand(EPISODE, "e:1"))
        assert rows == as_text(maker.expand(EPISODE, "e:1"))
        [answer] = rows[1][2]
        assert rows[2][1] == f"x1 y1 x2 {answer} x3"
        chosen.append(answer)
    assert set(chosen) == {"a", "b", "c"}


def test_rows_for_scoring_have_all_correct_answers_and_no_earlier_answer_in_the_loss() -> None:
    rows = for_scores(expander("packed_dialogue")).expand(EPISODE, "e:1")

    assert as_text(rows)[1] == ("e:1#2", "x1 y1 x2", ["a", "b", "c"])
    assert not any(row["messages"]["train_all"] for _, row in rows)


def test_expanded_rows_and_unreadable_rows_are_not_changed() -> None:
    maker = expander("squash")
    [_, (key, made), _] = maker.expand(EPISODE, "e:1")

    assert maker.expand(made, key) == [(key, made)]
    assert maker.expand({"other": 1}, "e:2") == [("e:2", {"other": 1})]
    silent = {"messages": [{"role": "user", "content": "x"}]}
    assert maker.expand(silent, "e:3") == [("e:3", silent)]


def test_an_expander_can_be_pickled() -> None:
    maker = expander("squash", context=HistoryLimits(context_length=2))

    assert pickle.loads(pickle.dumps(maker)).expand(EPISODE, "k") == maker.expand(EPISODE, "k")


def open_view(dialogues: list[dict[str, Any]], maker: Expander) -> Rows:
    return expanded(open_rows(dialogues, folder=None, name="chats"), maker)  # type: ignore[arg-type] # nothing relative


dialogues = st.lists(
    st.lists(st.integers(0, 3), max_size=5).map(
        lambda turns: {
            "episode": [
                {"text": f"x{index}", "labels": [f"y{index}{n}" for n in range(labels)]}
                for index, labels in enumerate(turns)
            ]
        }
    ),
    min_size=1,
    max_size=6,
)


@given(
    dialogues, st.sampled_from(["packed_dialogue", "squash", "last_turn"]), st.sampled_from(["first", "all", "random"])
)
def test_rows_by_index_are_in_the_order_of_the_dialogues(rows: list[dict[str, Any]], mode: Any, labels: Any) -> None:
    maker = expander(mode, labels=labels)
    expected = [made for number, row in enumerate(rows, start=1) for made in maker.expand(row, f"chats:{number}")]

    view = open_view(rows, maker)

    assert len(view) == len(expected)
    assert view.get(np.arange(len(view))) == [row for _, row in expected]
    order = np.arange(len(view))[::-2]
    assert view.select(order).get(range(len(order))) == [expected[index][1] for index in order]
    made = [view.key(index) for index in range(len(view))]
    assert len(set(made)) == len(made)
    for key, (wanted, row) in zip(made, expected, strict=True):
        assert key == wanted or "labels" not in row.get("messages", {})


@given(dialogues)
def test_squashed_rows_have_the_loss_tokens_of_the_packed_dialogue(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        packed = expander("packed_dialogue").expand(row, "k")[0][1]
        squashed = [made for _, made in expander("squash").expand(row, "k")]
        if "messages" not in packed:
            assert squashed == [packed]
            continue
        whole = packed["messages"]
        learned = [(n, m["content"]) for n, m in enumerate(whole["messages"]) if m.get("train")]
        learned.append((len(whole["messages"]), whole["labels"][0]))
        assert learned == [(len(r["messages"]["messages"]), r["messages"]["labels"][0]) for r in squashed]


def test_the_fingerprint_depends_on_the_expansion_of_rows() -> None:
    makers = [expander("squash"), expander("last_turn"), expander("squash", context=HistoryLimits(context_length=2))]

    assert len({open_view([EPISODE], maker).fingerprint for maker in makers}) == 3


def test_memory_of_a_view_does_not_grow_with_the_history() -> None:
    count = 50
    long = {"episode": [{"text": "x" * 1000, "labels": ["y" * 1000]} for _ in range(20)]}
    view = open_view([long] * count, expander("squash"))

    store = view._store
    held = sum(value.nbytes for value in vars(store).values() if isinstance(value, np.ndarray))
    assert len(view) == 20 * count
    assert held <= 12 * len(view)
