"""Tokenization of text that follows other text, and decoding of tokens that follow others.

SentencePiece-style tokenizers (Llama 2, Mistral 7B, TinyLlama, Phi-3) add a space mark before a text, and remove the
space when decoding. Neither is right for text that follows other text: `yes` after `Answer:` is not ` yes`. Such text
is encoded after an anchor, whose tokens are dropped. Both sides of a boundary that no token crosses are tokenized
independently, so the tokens are those that the joined text has there.

With byte fallback, a token may be one byte of a character. The tokenizers library decodes adjacent bytes together: if
one character is incomplete, it loses all of them. Here only the incomplete character is lost, as in Python.
"""

import json
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTROLS = "\x01\x02\x03"
"""Characters that no token of an ordinary vocabulary contains; byte fallback encodes each as one token."""
MAX_ANCHORS = 8
"""Maximum number of neutral characters to try before a text is encoded without an anchor."""
INCOMPLETE = "\ufffd"
"""What incomplete characters are decoded to."""


class Decoding(NamedTuple):
    """What decoding with a tokenizer needs."""

    anchor: list[int]
    """Tokens before completions; empty if leading spaces are kept."""
    byte_of: dict[int, int]
    """Bytes of tokens, by token; empty without byte fallback."""
    special: frozenset[int]
    """Tokens without text."""


_decodings: "WeakKeyDictionary[Any, Decoding]" = WeakKeyDictionary()


class Continuation:
    """Encodes a text as it follows other text, after an anchor."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self._anchor_ids: dict[str, list[int]] = {"": []}

    @cached_property
    def marks_beginnings(self) -> bool:
        """Whether the beginning of a text is encoded differently."""
        backend = self._tokenizer.backend_tokenizer
        return any(map(marks_beginning, (*steps(backend.normalizer), *steps(backend.pre_tokenizer))))

    @cached_property
    def is_needed(self) -> bool:
        """Whether some text is encoded differently where it follows other text; else `anchors` are only the empty
        text."""
        return self.marks_beginnings or bool(self._added_tokens)

    def anchors(self, before: str) -> Sequence[str]:
        """Return candidate anchors for a text that follows `before`, the best first, the empty text last.

        An added token ends the text before it, and some tokenizers mark the beginning of what follows it; some added
        tokens also absorb white space after them.
        """
        added = self._added_token(before) if before else ""
        neutral = self.neutral_anchors if before and self.marks_beginnings else ()
        return (*((added,) if added else ()), *neutral, "")

    @cached_property
    def neutral_anchors(self) -> Sequence[str]:
        """Single characters whose tokens do not merge with what follows, the least likely to merge first."""
        vocabulary = self._tokenizer.get_vocab()
        followed = Counter(character for token in vocabulary for character in token[:-1])
        single = [token for token in vocabulary if len(token) == 1 and unicodedata.category(token)[0] in "LNPS"]
        candidates = (*CONTROLS, *sorted(single, key=lambda token: (followed[token], token)))
        anchors: list[str] = []
        for candidate in candidates:
            ids = self.anchor_ids(candidate)
            if ids and self._tokenizer.unk_token_id not in ids and ids != self.anchor_ids(candidate * 2):
                anchors.append(candidate)
            if len(anchors) == MAX_ANCHORS:
                break
        return anchors

    def anchor_ids(self, anchor: str) -> list[int]:
        """Return the tokens of an anchor."""
        if anchor not in self._anchor_ids:
            ids = self._tokenizer(anchor, add_special_tokens=False, verbose=False)["input_ids"]
            self._anchor_ids[anchor] = ids
        return self._anchor_ids[anchor]

    @cached_property
    def _added_tokens(self) -> dict[str, bool]:
        """Added tokens that change what follows them, and whether they absorb white space."""
        added = self._tokenizer.added_tokens_decoder.values()
        return {
            token.content: token.rstrip
            for token in added
            if token.content and not token.single_word and (token.rstrip or self.marks_beginnings)
        }

    @cached_property
    def _added_ends(self) -> tuple[str, ...]:
        return tuple(self._added_tokens)

    def _added_token(self, before: str) -> str:
        """Return the added token that ends a text, including the white space it absorbs; else the empty text."""
        if not self._added_tokens:
            return ""
        stripped = before.rstrip()
        for text in dict.fromkeys((before, stripped)):
            if text.endswith(self._added_ends):
                content = max((token for token in self._added_ends if text.endswith(token)), key=len)
                if text == before or self._added_tokens[content]:
                    return before[len(text) - len(content) :]
        return ""


def decode_continuation(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode tokens as they follow other text, without special tokens."""
    anchor = decoding_of(tokenizer).anchor
    if not anchor or not ids:
        return decode_text(tokenizer, ids)
    before = len(tokenizer.decode(anchor, skip_special_tokens=True))
    return decode_text(tokenizer, [*anchor, *ids])[before:]


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode tokens as a whole text, without special tokens; a character that is incomplete becomes one U+FFFD."""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
    if INCOMPLETE not in text or not decoding_of(tokenizer).byte_of:
        return text
    return str(tokenizer.decode(with_complete_characters(tokenizer, ids), skip_special_tokens=True))


def with_complete_characters(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Return the tokens of a text, with the bytes of U+FFFD instead of those of each incomplete character."""
    _, byte_of, special = decoding_of(tokenizer)
    token_of = {byte: token for token, byte in byte_of.items()}
    has_token = tokenizer.backend_tokenizer.id_to_token
    shown = [token for token in ids if token not in special and has_token(token) is not None]
    complete = list[int]()
    for are_bytes, group in groupby(shown, key=byte_of.__contains__):
        if are_bytes:
            text = bytes(byte_of[token] for token in group).decode(errors="replace")
            complete += [token_of[byte] for byte in text.encode()]
        else:
            complete += group
    return complete


def decoding_of(tokenizer: Any) -> Decoding:
    """Return what decoding with a tokenizer needs, which is found once."""
    if tokenizer not in _decodings:
        kinds = {step.get("type") for step in steps(tokenizer.backend_tokenizer.decoder)}
        strips = not kinds.isdisjoint({"Strip", "Metaspace"})
        anchor = decoding_anchor(Continuation(tokenizer)) if strips else []
        special = frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
        byte_of = byte_tokens(tokenizer, without=special) if "ByteFallback" in kinds else {}
        _decodings[tokenizer] = Decoding(anchor, byte_of, special)
    return _decodings[tokenizer]


def byte_tokens(tokenizer: Any, *, without: Collection[int]) -> dict[int, int]:
    """Return the bytes of the tokens of byte fallback; empty if those of U+FFFD are missing."""
    tokens = [tokenizer.backend_tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    known = {token: byte for byte, token in enumerate(tokens) if token is not None and token not in without}
    return known if set(INCOMPLETE.encode()) <= set(known.values()) else {}


def decoding_anchor(continuation: Continuation) -> list[int]:
    """Return tokens of some text, to decode other tokens after them."""
    return continuation.anchor_ids(next(iter(continuation.neutral_anchors), ""))


def steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield all steps of a normalizer, pre-tokenizer or decoder of the tokenizers library, as settings."""
    if part is not None:
        yield from nested_steps(json.loads(part.__getstate__()))


def nested_steps(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a step, or the steps of a sequence."""
    inner = next((value for key in ("normalizers", "pretokenizers", "decoders") if (value := settings.get(key))), None)
    if inner is None:
        yield settings
        return
    for step in inner:
        yield from nested_steps(step)


def marks_beginning(step: dict[str, Any]) -> bool:
    """Return whether a step of a tokenizer treats the beginning of a text differently."""
    kind = step.get("type")
    if kind == "Replace":
        return str(step.get("pattern", {}).get("Regex", "")).startswith(("^", "\\A"))
    return (
        kind == "Prepend"
        or (kind == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        or (kind == "ByteLevel" and bool(step.get("add_prefix_space")))
        or (kind == "Strip" and bool(step.get("strip_left")))
    )
