"""Tests of sampling: answers depend only on seed and row, so `evaluate` scores the answers of `predict`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita import Model
from partita.data.dialogue import Expander, expanded
from partita.data.rows import ListStore, RowKeys, Rows
from partita.data.sources.sources import open_rows
from partita.generation.encoded_prompts import sampling_keys
from partita.tokenizers.load import read_tokenizer
from partita_trainers.checkpoints.file_sums import FILE as SUMS

from ..properties import ends, first

OUTPUTS = [{"name": "colour", "type": "text"}]


def sampling(colours: Any, **generation: Any) -> Model:
    """Return an untrained model, whose answers are random."""
    settings = {"do_sample": True, "temperature": 1.4, "max_new_tokens": 6, **generation}
    data = {"max_bad_rows": 0.5}
    config = colours.config(trainer={"type": "none"}, output_features=OUTPUTS, generation=settings, data=data)
    return Model(config, quiet=True)


def with_answers(rows: Sequence[dict[str, Any]], predictions: Any) -> list[dict[str, Any]]:
    """Return the rows with the predicted answers as the correct ones."""
    return [{**row, "colour": answered["colour"]} for row, answered in zip(rows, predictions, strict=True)]


@pytest.mark.parametrize("slots", first([True, False]), ids=["slots", "batches"])
def test_evaluate_scores_the_answers_that_predict_gives(colours: Any, slots: bool) -> None:
    rows = [*colours.rows(20), *colours.rows(20)]  # some prompts are equal
    model = sampling(colours, slots=slots)
    predictions = model.predict(rows, batch_size=5)
    answers = [row["colour"] for row in predictions]
    assert all(answers)
    assert answers[:20] != answers[20:], "rows with equal prompts are sampled independently"
    examined = with_answers(rows, predictions)
    for batch_size in (5, 3, 40):
        assert model.evaluate(examined, batch_size=batch_size)["colour"]["exact_match"] == 1
    assert sampling(colours, slots=slots, seed=43).evaluate(examined)["colour"]["exact_match"] < 0.5


def test_slots_and_batches_sample_the_same_answers(colours: Any) -> None:
    rows = colours.rows(20)
    in_slots, in_batches = ([*sampling(colours, slots=slots).predict(rows)] for slots in (True, False))
    assert [row["colour"] for row in in_slots] == [row["colour"] for row in in_batches]


def test_unusable_rows_do_not_change_the_samples_of_other_rows(colours: Any) -> None:
    rows = colours.rows(12)
    rows[3]["text"] = ""
    model = sampling(colours)
    examined = with_answers(rows, model.predict(rows))
    assert model.evaluate(examined)["colour"]["exact_match"] == 1


def test_samples_of_generate_depend_on_the_position_of_the_prompt(colours: Any) -> None:
    model = sampling(colours)
    texts = model.generate(["I see"] * 6, max_new_tokens=6)
    assert len(set(texts)) > 3
    assert model.generate(["I see"] * 3, max_new_tokens=6, batch_size=1) == texts[:3]
    assert sampling(colours, slots=False).generate(["I see"] * 6, max_new_tokens=6, batch_size=4) == texts


def test_rows_with_equal_content_get_keys_with_a_counter() -> None:
    def keys(numbers: Sequence[int]) -> list[bytes]:
        count = len(numbers)
        named = RowKeys(["rows"], np.zeros(count), np.array(numbers))
        rows = Rows(ListStore([{"text": "x"}] * count), columns=["text"], keys=named, fingerprint="f")
        return [bytes(key) for key in sampling_keys(rows)]

    result = keys([1, 2, 1, 3, 1])
    assert len(set(result)) == 5
    assert [result[place] for place in (0, 1, 3)] == keys([1, 2, 3]), "the first of them has the key that it has alone"
    assert keys([1, 1, 1]) == [result[place] for place in (0, 2, 4)]
    assert keys([]) == []


def test_neither_prompt_nor_selection_changes_the_key_of_a_row(colours: Any) -> None:
    rows = open_rows(colours.rows(9), folder=Path())
    assert np.array_equal(sampling_keys(rows.select([7, 2])), sampling_keys(rows)[[7, 2]])


TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A: {{ m['content'] }}</s>\n"
    "{% else %}U: {{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
)


@pytest.fixture(scope="module")
def chat_colours(colours: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an untrained model whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    sampling(colours).save(folder)
    tokenizer = read_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / SUMS).unlink()
    return folder


def dialogue(*texts: str) -> dict[str, Any]:
    """Return a dialogue that starts with the user."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]}


@pytest.mark.parametrize("slots", ends([True, False]), ids=["slots", "batches"])
@pytest.mark.parametrize("mode", ends(["packed_dialogue", "squash", "last_turn"]))
def test_evaluate_scores_the_last_answers_of_dialogues_that_predict_returns(
    chat_colours: Path, mode: str, slots: bool
) -> None:
    def model() -> Model:
        config = {
            "base_model": str(chat_colours),
            "input_features": [{"name": "messages", "type": "dialogue"}],
            "output_features": [{"name": "reply", "type": "text"}],
            "generation": {
                "do_sample": True,
                "temperature": 1.4,
                "min_new_tokens": 2,
                "max_new_tokens": 6,
                "slots": slots,
            },
            "data": {"dialogue": {"mode": mode}},
            "trainer": {"type": "none"},
        }
        return Model(config, quiet=True)

    asked = [dialogue("red", "one", "blue"), dialogue("red"), dialogue("red", "one", "blue", "two", "red")] * 4
    replies = [row["reply"] for row in model().predict(asked, batch_size=5)]
    assert len(set(replies)) > 6
    answered = [
        {"messages": [*row["messages"], {"role": "assistant", "content": reply}]}
        for row, reply in zip(asked, replies, strict=True)
    ]
    assert [row["reply"] for row in model().predict(answered)] == replies, "existing answers are not shown"
    for batch_size in (3, 40):
        scores = model().evaluate(answered, batch_size=batch_size)["reply"]
        assert scores["n"] == 24, "one row per answer"
        assert scores["exact_match"] == pytest.approx(12 / 24), "only the last answers"


def test_the_answers_of_a_dialogue_are_sampled_independently() -> None:
    rows = open_rows([dialogue("a", "b", "c", "d", "e", "f"), dialogue("a", "b")], folder=Path())
    expander = Expander(column="messages", format_name="auto", mode="squash")
    made = expanded(rows, expander)
    keys = [made.sampling_key(place) for place in range(4)]
    assert keys == [f"{rows.key(0)}#1", f"{rows.key(0)}#2", rows.key(0), rows.key(1)]
    assert len(set(map(bytes, sampling_keys(made)))) == 4
    assert np.array_equal(sampling_keys(made.select([3, 2])), sampling_keys(rows)[[1, 0]])
