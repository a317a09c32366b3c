"""Tests of the text of tokens that follow others, with a token for each byte of rare characters."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.generation.text_stream import TextStream
from partita.lm.batch_generation.generation import first_stop
from partita.lm.decoding.continuation import decode_continuation, decode_text
from partita.lm.decoding.grammar import token_bytes

from ....properties import examples
from ..byte_fallback import sentencepiece_like

TOKENIZER = sentencepiece_like()
BYTES = token_bytes(TOKENIZER, size=len(TOKENIZER))
[SPACE, *QUOTED] = TOKENIZER.encode('"日本', add_special_tokens=False)
TOKENS = st.one_of(
    st.text(alphabet="日本é😀\ufffd", min_size=1, max_size=3).map(
        lambda text: TOKENIZER.encode(text, add_special_tokens=False)
    ),
    st.sampled_from([[token] for token in range(len(TOKENIZER))]),
    st.sampled_from([[token] for token in TOKENIZER.all_special_ids]),
    st.just([len(TOKENIZER) + 3]),
)


def streamed(ids: Sequence[int]) -> str:
    """Return the joined pieces of an answer, one token at a time."""
    stream = TextStream(TOKENIZER)
    pieces = [stream.add(ids[: count + 1]) for count in range(len(ids))]
    return "".join([*pieces, stream.finish(ids, decode_continuation(TOKENIZER, ids))])


def text_of(ids: Sequence[int]) -> str:
    """Return the text of the bytes of tokens; those outside the vocabulary have none."""
    return b"".join(BYTES[token] for token in ids if token < len(BYTES)).decode(errors="replace")


@pytest.mark.parametrize("cut", range(8))
def test_an_answer_that_is_cut_within_a_character_keeps_the_others(cut: int) -> None:
    text = ["", '"', '"\ufffd', '"\ufffd', '"日', '"日\ufffd', '"日\ufffd', '"日本'][cut]
    assert (decode_continuation(TOKENIZER, QUOTED[:cut]), streamed(QUOTED[:cut])) == (text, text)
    assert decode_text(TOKENIZER, [SPACE, *QUOTED[:cut]]) == text, "of an encoder-decoder"


@examples(300)
@given(st.lists(TOKENS, max_size=8).map(lambda groups: [token for group in groups for token in group]))
def test_whole_and_streamed_answers_are_the_text_of_their_bytes(ids: list[int]) -> None:
    assert decode_continuation(TOKENIZER, ids) == text_of(ids)
    assert streamed(ids) == text_of(ids)


def test_a_stop_string_is_found_in_last_tokens_that_begin_within_a_character() -> None:
    assert first_stop(decode_continuation(TOKENIZER, QUOTED[3:]), ["本"]) == 1


def test_an_answer_with_complete_characters_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_continuation(TOKENIZER, QUOTED)
    monkeypatch.setattr("partita.lm.decoding.continuation.with_complete_characters", None)
    assert decode_continuation(TOKENIZER, QUOTED) == '"日本'
