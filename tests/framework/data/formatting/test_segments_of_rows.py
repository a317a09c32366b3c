"""Tests of rows that are a text in segments, or a text in ChatML."""

from collections.abc import Callable
from typing import Any

import pytest

from partita.data.dialogue import for_scores
from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.row_tokenizer import Example, RowTokenizer
from partita_schema.errors import RowError
from partita_schema.rows import check_rows, row_schema

Make = Callable[..., Any]
ROW = {
    "segments": [
        {"label": True, "text": "<|im_start|>Hello\n"},
        {"label": False, "text": "my name is "},
        {"label": True, "text": "Ann."},
        {"label": False, "text": " And "},
        {"label": True, "text": "yours?<|im_end|>"},
    ]
}
TEXT = "<|im_start|>Hello\nmy name is Ann. And yours?<|im_end|>"


def encoder_of(make_config: Make, tokenizer: Any, **sections: Any) -> RowTokenizer:
    features = {
        "input_features": [{"name": "segments", "type": "dialogue"}],
        "output_features": [{"name": "reply", "type": "text"}],
    }
    return build_row_tokenizer(make_config(**(features | sections)), tokenizer=tokenizer, context_length=None)


def rows_of(row_tokenizer: RowTokenizer, row: dict[str, Any], *, scored: bool = False) -> list[Example | RowError]:
    expander = row_tokenizer.expander
    assert expander is not None
    expanded = (for_scores(expander) if scored else expander).expand(row, "k")
    assert (for_scores(expander) if scored else expander).count(row) == len(expanded)
    checked = check_rows(row_schema(row_tokenizer.formatter.config, supervised=True), [made for _, made in expanded])
    assert not checked.bad
    return row_tokenizer.encode_rows(list(checked.clean.values()), [key for key, _ in expanded])


def texts(example: Example | RowError, tokenizer: Any) -> tuple[str, list[str]]:
    assert isinstance(example, Example), example
    spans = [tokenizer.decode(example.input_ids[start:end]) for start, end in example.spans]
    return tokenizer.decode(example.input_ids), spans


@pytest.mark.parametrize("mode", ["auto", "packed_dialogue"])
def test_segments_are_one_row_of_their_text_alone(make_config: Make, chat_tokenizer: Any, mode: str) -> None:
    row_tokenizer = encoder_of(make_config, chat_tokenizer, data={"dialogue": {"mode": mode}})

    [example] = rows_of(row_tokenizer, ROW)

    assert texts(example, chat_tokenizer) == (TEXT, ["<|im_start|>Hello\n", "Ann.", "yours?<|im_end|>"])


def test_segments_are_evaluated_and_predicted_after_the_text_before_them(
    make_config: Make, chat_tokenizer: Any
) -> None:
    row_tokenizer = encoder_of(make_config, chat_tokenizer)

    scored = [texts(example, chat_tokenizer) for example in rows_of(row_tokenizer, ROW, scored=True)]

    assert scored == [
        ("<|im_start|>Hello\nmy name is Ann.", ["Ann."]),
        (TEXT, ["yours?<|im_end|>"]),
    ]
    asked = row_schema(row_tokenizer.formatter.config, supervised=False).load(ROW)
    [example] = rows_of(row_tokenizer, ROW)
    assert isinstance(example, Example)
    assert row_tokenizer.encode_prompt(asked, key="k").input_ids == example.input_ids[: example.spans[-1][0]]


def test_a_text_that_is_all_in_the_loss_is_learned_but_is_no_prompt(make_config: Make, tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, tokenizer)
    row = {"segments": [{"label": True, "text": "abc"}]}

    [example] = rows_of(row_tokenizer, row)

    assert texts(example, tokenizer) == ("abc", ["abc"])
    checked = check_rows(row_schema(row_tokenizer.formatter.config, supervised=False), [row])
    assert checked.bad == {0: ("column segments: there is no prompt: all of its text is in the loss",)}


def test_squash_gives_a_row_for_each_segment_in_the_loss(make_config: Make, tokenizer: Any) -> None:
    row_tokenizer = encoder_of(make_config, tokenizer, data={"dialogue": {"mode": "squash"}})

    assert [texts(example, tokenizer)[1] for example in rows_of(row_tokenizer, ROW)] == [["Ann."], ["yours?<|im_end|>"]]


def test_options_that_segments_have_no_place_for_are_reasons(make_config: Make, tokenizer: Any) -> None:
    for sections, key in (
        ({"prompt": {"system": "Be brief."}}, "prompt.system"),
        (
            {"data": {"dialogue": {"context_turns": 1}}},
            "data.dialogue.context_length, context_turns, context_tokens or include_labels",
        ),
    ):
        [example] = rows_of(encoder_of(make_config, tokenizer, **sections), ROW)
        assert str(example) == f"segments are used as they are; remove {key}, or the row"


def test_text_in_chatml_has_the_tokens_of_its_messages(make_config: Make, chat_tokenizer: Any) -> None:
    text = "".join(
        f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in (("user", "a"), ("assistant", "b"), ("user", "c"))
    )
    row_tokenizer = encoder_of(make_config, chat_tokenizer)

    [example] = rows_of(row_tokenizer, {"segments": text})

    shown, spans = texts(example, chat_tokenizer)
    assert shown == text.split("<|im_start|>user\nc")[0]
    assert spans == ["b<|im_end|>"]
