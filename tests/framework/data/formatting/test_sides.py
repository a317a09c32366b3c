"""Rows of encoder-decoders as tokens: both sides as the tokenizer writes them, and their limits."""

import pickle
from typing import Any

import pytest

from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.lm.base import AnswerContext
from partita_schema.config import Config
from partita_schema.errors import RowError

from ....encoder_decoders import SIZES, build_tokenizer

TOKENIZERS = {architecture: build_tokenizer(architecture) for architecture in SIZES}
FEATURES = {
    "base_model": "model",
    "input_features": [{"name": "text", "type": "text"}],
    "output_features": [{"name": "say", "type": "text"}],
    "trainer": {"type": "finetune"},
}
DIALOGUE = {"input_features": [{"name": "messages", "type": "dialogue"}]}
ROW = {"text": "I see the red ball", "say": "four and one"}


def build(
    architecture: str = "t5", *, reads: int | None = None, writes: int | None = None, **sections: Any
) -> RowTokenizer:
    config = Config.model_validate(FEATURES | sections)
    return build_row_tokenizer(
        config, tokenizer=TOKENIZERS[architecture], context_length=reads, answers=AnswerContext(writes)
    )


@pytest.mark.parametrize("architecture", SIZES)
def test_both_sides_are_those_of_the_tokenizer_with_its_special_tokens(architecture: str) -> None:
    rows = [ROW, {"text": "the box", "say": ""}, {"text": "one  two,\nred", "say": "I see"}]
    examples = build(architecture).encode_rows(rows, ["1", "2", "3"])
    for row, example in zip(rows, examples, strict=True):
        assert not isinstance(example, RowError)
        wanted = TOKENIZERS[architecture](row["text"], text_target=row["say"])
        assert example.input_ids == [*wanted["input_ids"], *wanted["labels"]]
        assert example.spans == ((len(wanted["input_ids"]), len(example.input_ids)),)
        assert example.cut_tokens == 0


@pytest.mark.parametrize("architecture", SIZES)
def test_a_prompt_is_the_same_in_training_and_in_prediction(architecture: str) -> None:
    row_tokenizer = build(architecture)
    example, prompt = row_tokenizer.encode(ROW, key="1"), row_tokenizer.encode_prompt({"text": ROW["text"]}, key="1")
    assert prompt.error is None
    assert prompt.input_ids == example.input_ids[: example.spans[0][0]]


def test_the_line_break_before_an_answer_is_not_read() -> None:
    row_tokenizer = build("bart", input_features=[{"name": name, "type": "text"} for name in ("text", "more")])
    prompt = row_tokenizer.encode_prompt({"text": "a", "more": "b"}, key="1")
    assert prompt.text == "text: a\nmore: b\n"
    assert prompt.input_ids == TOKENIZERS["bart"]("text: a\nmore: b")["input_ids"]


@pytest.mark.parametrize("architecture", SIZES)
def test_answer_ids_are_those_that_are_learned(architecture: str) -> None:
    row_tokenizer = build(architecture)
    example = row_tokenizer.encode(ROW, key="1")
    assert list(row_tokenizer.answer_ids(ROW["say"])) == example.input_ids[example.spans[0][0] :]


def test_an_answer_gets_an_end_token_if_the_tokenizer_adds_none() -> None:
    from partita.tokenizers.load import byte_tokenizer

    tokenizer = byte_tokenizer()
    config = Config.model_validate(FEATURES)
    row_tokenizer = build_row_tokenizer(config, tokenizer=tokenizer, context_length=None, answers=AnswerContext())
    example = row_tokenizer.encode(ROW, key="1")
    assert example.input_ids[-1] == tokenizer.eos_token_id
    assert example.input_ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize(("architecture", "first"), [("t5", 0), ("bart", 1), ("pegasus", 0)])
def test_an_answer_is_cut_at_the_limit_of_its_text_and_loses_its_end(architecture: str, first: int) -> None:
    features = [{"name": "say", "type": "text", "preprocessing": {"max_sequence_length": 2}}]
    row_tokenizer = build(architecture, output_features=features)
    whole = TOKENIZERS[architecture](text_target=ROW["say"])["input_ids"]
    example = row_tokenizer.encode(ROW, key="1")
    answer = example.input_ids[example.spans[0][0] :]
    assert answer == whole[: first + 2]
    assert example.cut_tokens == len(whole) - len(answer)


def test_each_side_has_its_own_limit_and_the_row_has_one_for_both() -> None:
    prompt, answer = (len(TOKENIZERS["t5"](text)["input_ids"]) for text in (ROW["text"], ROW["say"]))
    assert len(build(reads=prompt, writes=answer).encode(ROW, key="1").input_ids) == prompt + answer
    short = build(reads=prompt, writes=answer - 1).encode(ROW, key="1")
    assert (short.spans, short.cut_tokens) == (((prompt, prompt + answer - 1),), 1)
    total = {"preprocessing": {"global_max_sequence_length": prompt + 1}}
    both = build(**total).encode(ROW, key="1")
    assert (both.spans, both.cut_tokens) == (((prompt, prompt + 1),), answer - 1)


def test_a_prompt_that_does_not_fit_is_an_error_that_says_so() -> None:
    message = "the prompt is longer than the 5 tokens that the encoder reads; preprocessing: {max_sequence_length: ..."
    row_tokenizer = build(reads=5)
    with pytest.raises(RowError, match=message):
        row_tokenizer.encode(ROW, key="1")
    assert message in (row_tokenizer.encode_prompt(ROW, key="1").error or "")
    whole = build(preprocessing={"global_max_sequence_length": 6})
    with pytest.raises(RowError, match="the prompt leaves no room for an answer within 6 tokens"):
        whole.encode(ROW, key="1")
    cut = [{"name": "text", "type": "text", "preprocessing": {"max_sequence_length": 4}}]
    example = build(reads=5, input_features=cut).encode(ROW, key="1")
    assert example.spans[0][0] == 5
    assert example.cut_tokens == 1


def test_an_empty_prompt_is_an_error_although_the_tokenizer_adds_an_end() -> None:
    row_tokenizer = build()
    with pytest.raises(RowError, match="the prompt is empty"):
        row_tokenizer.encode({"text": " ", "say": "one"}, key="1")
    assert row_tokenizer.encode_prompt({"text": ""}, key="1").error == "the prompt is empty"


def test_text_that_is_not_unicode_is_an_error_of_its_row() -> None:
    good, bad = build().encode_rows([ROW, {"text": "\ud800", "say": "one"}], ["1", "2"])
    assert not isinstance(good, RowError)
    assert str(bad) == "not Unicode: half of a surrogate pair"


def test_each_answer_of_a_dialogue_is_a_row_with_the_history_for_the_encoder() -> None:
    row_tokenizer = build(**DIALOGUE)
    assert row_tokenizer.expander is not None
    assert row_tokenizer.expander.mode == "squash"
    messages = [
        {"role": role, "content": text}
        for role, text in [("user", "one"), ("assistant", "red"), ("user", "two"), ("assistant", "blue")]
    ]
    rows = [row for _, row in row_tokenizer.expander.expand({"messages": messages}, "1")]
    from partita_schema.rows import check_rows, row_schema

    clean = check_rows(row_schema(row_tokenizer.formatter.config, supervised=True), rows).clean
    first, second = (row_tokenizer.encode(row, key="1") for row in clean.values())
    history = row_tokenizer.formatter.format_all([{"messages": {"messages": messages[:3]}}], ["1"], supervised=False)[
        0
    ].text
    assert history.index("one") < history.index("red") < history.index("two")
    wanted = TOKENIZERS["t5"](history, text_target="blue")
    assert second.input_ids == [*wanted["input_ids"], *wanted["labels"]]
    assert len(first.input_ids) < len(second.input_ids)


def test_a_chat_template_is_not_used_because_the_tokenizer_adds_the_special_tokens() -> None:
    tokenizer = build_tokenizer("t5")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    config = Config.model_validate(FEATURES)
    row_tokenizer = build_row_tokenizer(config, tokenizer=tokenizer, context_length=None, answers=AnswerContext())
    assert row_tokenizer.encode_prompt(ROW, key="1").input_ids == TOKENIZERS["t5"](ROW["text"])["input_ids"]


def test_the_row_tokenizer_can_be_pickled_and_its_parts_name_the_limits() -> None:
    row_tokenizer = build(reads=9, writes=7)
    row_tokenizer.encode(ROW, key="1")
    copy = pickle.loads(pickle.dumps(row_tokenizer))
    assert copy.encode(ROW, key="1") == row_tokenizer.encode(ROW, key="1")
    assert row_tokenizer.fingerprint_inputs()["encoder and decoder"] == "9 and 7 tokens"
    assert row_tokenizer.fingerprint_inputs() != build(reads=9, writes=8).fingerprint_inputs()
