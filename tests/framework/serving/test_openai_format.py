"""Tests of responses in the form of the OpenAI API."""

from tokenizers import AddedToken

from partita.lm.base import TokenLogprob
from partita.serving.openai_format import TextOffsets, TokenTexts, completion_logprobs
from partita.tokenizers.load import byte_tokenizer


def test_offsets_are_places_in_the_text_also_after_parts_of_characters_and_special_tokens() -> None:
    tokenizer = byte_tokenizer()
    offsets = TextOffsets(TokenTexts(tokenizer, size=len(tokenizer)))
    first, end, last = tokenizer.encode("aé쑞b"), tokenizer.eos_token_id, tokenizer.encode("c")
    entries = [TokenLogprob(token, -1.0, ()) for token in (*first, end, *last)]
    parts = [completion_logprobs(some, offsets=offsets) for some in (entries[:3], entries[3:])]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 1, 1, 2, 2, 2, 3, 4, 4]
    assert parts[1]["tokens"][-3:] == ["b", "</s>", "c"]


def test_special_tokens_without_a_role_are_left_out_of_offsets() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    ids = tokenizer.encode("a[TOOL_CALLS]b")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"

    offsets = TextOffsets(TokenTexts(tokenizer, size=len(tokenizer)))
    assert [offsets.next(token) for token in ids] == [0, 1, 1]


def test_tokens_that_are_parts_of_characters_are_named_by_their_bytes() -> None:
    tokenizer = byte_tokenizer()
    begin, end = tokenizer.encode("é")
    entry = TokenLogprob(begin, -1.0, ((begin, -1.0), (end, -2.0)))
    found = completion_logprobs([entry], offsets=TextOffsets(TokenTexts(tokenizer, size=len(tokenizer))))
    assert found["tokens"] == [r"bytes:\xc3"]
    assert found["top_logprobs"] == [{r"bytes:\xc3": -1.0, r"bytes:\xa9": -2.0}]


def test_a_character_that_is_not_continued_counts_as_one() -> None:
    tokenizer = byte_tokenizer()
    offsets = TextOffsets(TokenTexts(tokenizer, size=len(tokenizer)))
    whole = tokenizer.encode("쑞é")
    ids = [*whole[:2], *tokenizer.encode("a"), whole[0], whole[3], whole[4]]
    assert tokenizer.decode(ids) == "\ufffda\ufffdé"
    assert [offsets.next(token) for token in ids] == [0, 0, 1, 2, 3, 3]
