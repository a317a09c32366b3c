"""Tests of segments: they have the tokens of the joined text, and each answer starts at a token boundary."""

import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from partita.data.formatting.base import Segment
from partita.data.formatting.build import build_row_tokenizer
from partita.data.formatting.segments import SegmentTokenizer
from partita.tokenizers.load import END, PAD, UNKNOWN, byte_pair_backend, byte_tokenizer, wrap

from .tokenizers_of_tests import space_marking

Make = Callable[..., Any]
TEXTS = ["Once upon a time, there was a girl.", "The answer is 42.\nYes, no.\n\nWhat?", "état 日本 😀 hi  there"] * 20
PIECES = (
    *("Once", " upon", "a", " ", "\n", "time", " there", "\n\n", "42", ".", "é", "日", "😀", "x:", " ?", "  "),
    *(END, "<|turn|>", "<|end|>"),
)
TEXT = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)


def byte_pairs(*, prefix_space: bool = False, trim: bool = False) -> Any:
    from tokenizers import pre_tokenizers, processors

    backend = byte_pair_backend(TEXTS, vocab_size=400)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    if trim:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return wrap(backend, max_length=None)


def with_turns(tokenizer: Any) -> Any:
    from transformers import AddedToken

    turn = AddedToken("<|turn|>", special=True, normalized=False)
    absorbing = AddedToken("<|end|>", special=True, normalized=False, rstrip=True)
    tokenizer.add_special_tokens({"additional_special_tokens": [turn, absorbing]})
    return tokenizer


KINDS = {
    "bytes": with_turns(byte_tokenizer()),
    "byte pairs": with_turns(byte_pairs()),
    "byte pairs with trimmed offsets": with_turns(byte_pairs(trim=True)),
    "byte pairs after a prefix space": with_turns(byte_pairs(prefix_space=True)),
    "prepend": with_turns(space_marking(TEXTS)),
    "metaspace first": with_turns(space_marking(TEXTS, scheme="first")),
    "metaspace always": with_turns(space_marking(TEXTS, scheme="always")),
    "metaspace never": with_turns(space_marking(TEXTS, scheme="never")),
    "unigram": with_turns(space_marking(TEXTS, scheme="always", unigram=True)),
}


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=TEXT, answer=TEXT)
def test_prompt_and_answer_have_the_tokens_of_the_joined_text_if_those_of_the_prompt_are_a_prefix(
    kind: str, prompt: str, answer: str
) -> None:
    tokenizer = KINDS[kind]

    [parts] = SegmentTokenizer(tokenizer)([(Segment(prompt, False), Segment(answer, True))])

    alone, joined = ids_of(tokenizer, prompt), ids_of(tokenizer, prompt + answer)
    assert parts[0] == alone
    unknown = None if tokenizer.unk_token == END else tokenizer.unk_token_id
    if joined[: len(alone)] == alone and unknown not in joined:
        assert parts[0] + parts[1] == joined


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(st.tuples(TEXT, st.booleans()), min_size=1, max_size=6))
def test_joined_segments_are_encoded_once_and_split_by_characters(kind: str, texts: list[tuple[str, bool]]) -> None:
    # Trimmed offsets hide white space that an added token absorbs; no answer starts with such a token.
    assume("trimmed" not in kind or not any("<|end|>" in text for text, _ in texts))
    tokenizer = KINDS[kind]
    segments = [Segment(text, supervised, joined=True) for text, supervised in texts]

    [parts] = SegmentTokenizer(tokenizer)([segments])

    whole = "".join(text for text, _ in texts)
    assert [token for part in parts for token in part] == ids_of(tokenizer, whole)
    # A token is in the loss if it contains a character of a supervised segment. Offsets are taken from a tokenizer
    # that does not trim them, character by character.
    in_loss = [supervised for text, supervised in texts for _ in text]
    exact = untrimmed(tokenizer).encode(whole, add_special_tokens=False)
    expected = [any(in_loss[start:end]) for start, end in exact.offsets]
    found = [supervised for (_, supervised), part in zip(texts, parts, strict=True) for _ in part]
    widths = [end - start for start, end in exact.offsets]
    assert [flag for flag, width in zip(found, widths, strict=True) if width] == [
        flag for flag, width in zip(expected, widths, strict=True) if width
    ]


def test_a_space_after_a_first_segment_of_one_space_belongs_to_the_second_segment() -> None:
    tokenizer = KINDS["byte pairs with trimmed offsets"]
    segments = [Segment(" ", False, joined=True), Segment(" ?", True, joined=True)]
    assert [len(part) for part in SegmentTokenizer(tokenizer)([segments])[0]] == [1, 2]


def untrimmed(tokenizer: Any) -> Any:
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = processors.Sequence([])
    return backend


@pytest.mark.parametrize("kind", KINDS)
@given(turns=st.lists(TEXT, min_size=2, max_size=6))
def test_a_longer_prompt_starts_with_the_tokens_of_the_shorter_one(kind: str, turns: list[str]) -> None:
    encode = SegmentTokenizer(KINDS[kind])
    segments = [Segment(text, number % 2 == 1, ends=number % 2 == 1) for number, text in enumerate(turns)]

    wholes = [encode([segments[:size]])[0] for size in range(1, len(segments) + 1)]

    for shorter, longer in pairwise(wholes):
        assert longer[: len(shorter)] == shorter


def test_no_space_mark_is_put_before_an_answer_or_after_it() -> None:
    tokenizer = space_marking(TEXTS)
    segments = [Segment("x:\n", False), Segment("Once", True, ends=True), Segment("\nhi", False, joined=True)]

    [parts] = SegmentTokenizer(tokenizer)([segments])

    assert [tokenizer.convert_ids_to_tokens(part)[0] for part in parts] == ["\u2581", "On", "<0x0A>"]


def test_a_segment_tokenizer_can_be_pickled() -> None:
    rows = [(Segment("x: ", False), Segment("Once", True))]
    encode = SegmentTokenizer(KINDS["prepend"])

    assert pickle.loads(pickle.dumps(encode))(rows) == encode(rows)


@pytest.mark.parametrize("kind", KINDS)
@given(question=TEXT, answer=TEXT)
def test_a_prompt_in_prediction_has_the_tokens_before_the_answer_in_training(
    kind: str, question: str, answer: str
) -> None:
    row_tokenizer = build_row_tokenizer(make(), tokenizer=KINDS[kind], context_length=None)
    row = {"question": question, "answer": answer}

    example, prompt = row_tokenizer.encode(row, key="k"), row_tokenizer.encode_prompt(row, key="k")

    assert example.input_ids[: example.spans[0][0]] == prompt.input_ids
    if not question.rstrip().endswith((END, "<|turn|>", "<|end|>")):
        [(start, end)] = example.spans
        assert list(row_tokenizer.answer_ids(answer)) == example.input_ids[start : end - 1]


def make() -> Any:
    from partita_schema.config import Config

    return Config.model_validate(
        {
            "base_model": "unused",
            "input_features": [{"name": "question", "type": "text"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "trainer": {"type": "finetune"},
        }
    )


assert {PAD, UNKNOWN}.isdisjoint(PIECES)


def test_truncation_and_padding_of_an_earlier_call_have_no_effect() -> None:
    tokenizer = KINDS["prepend"]
    encode = SegmentTokenizer(tokenizer)
    rows = [(Segment("a long prompt of words", False), Segment("an answer", True)), (Segment("short", False),)]
    wanted = encode(rows)
    tokenizer(["one", "a much longer text"], truncation=True, max_length=3, padding="max_length")
    assert tokenizer.backend_tokenizer.truncation is not None
    assert encode(rows) == wanted
