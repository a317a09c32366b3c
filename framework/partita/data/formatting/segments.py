"""Tokenize a row's segments as they are in the joined text.

A row is tokenized in units. A unit starts at the start of the row, where a model starts to answer, and after an
inserted end token; what follows in the same unit is one text with it. So a token boundary precedes every answer, as it
does when the prompt stands alone, and all other tokens are those of the joined text
(docs/decisions/0026-joined-text.md). Offsets decide which tokens of a unit belong to which segment.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from partita.data.formatting.base import Segment
from partita.lm.decoding.continuation import Continuation

CONTEXT = 256
"""Number of characters before a unit that are considered."""
PLAIN = "."
"""Placeholder for the text before a unit that does not depend on it."""


class TokenizedUnit(NamedTuple):
    """Segments that are tokenized as one text."""

    segments: tuple[Segment, ...]
    before: str
    """The end of the preceding text; empty at the start of the row."""

    @property
    def text(self) -> str:
        """The joined text."""
        if len(self.segments) == 1:
            return self.segments[0].text
        return "".join(segment.text for segment in self.segments)

    @property
    def is_mixed(self) -> bool:
        """Whether it matters which segment a token belongs to."""
        if len(self.segments) == 1:
            return False
        filled = [segment for segment in self.segments if segment.text]
        return len(filled) > 1 and any(segment.supervised for segment in filled)


class SegmentTokenizer:
    """Tokenize rows of segments. Can be pickled for other processes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._continuation = Continuation(tokenizer)

    def __call__(self, rows: Sequence[Sequence[Segment]], *, before: str = "") -> list[list[list[int]]]:
        """Return the token ids of each segment of each row, in one tokenizer call. `before` is the preceding text.

        Raises:
            TypeError: If a text is not a string.
            UnicodeEncodeError: If a text is not valid Unicode.
        """
        units = [units_of(segments, before=before) for segments in rows]
        encoded = iter(self._encode([unit for row in units for unit in row]))
        return [[part for _ in row for part in next(encoded)] for row in units]

    def _encode(self, units: Sequence[TokenizedUnit]) -> list[list[list[int]]]:
        """Return the token ids of each unit by segment.

        If the tokens of an anchor merge with the text that follows, the next anchor is tried.
        """
        changes = self._continuation.is_needed
        anchors = [self._continuation.anchors(unit.before) if changes and unit.before else ("",) for unit in units]
        texts, mixed = [unit.text for unit in units], [unit.is_mixed for unit in units]
        results: list[list[list[int]]] = [[] for _ in units]
        left, attempt = list(range(len(units))), 0
        while left:
            encodings = self._encodings(
                [anchors[index][attempt] + texts[index] for index in left],
                with_offsets=[mixed[index] for index in left],
            )
            merged: list[int] = []
            for index, encoding in zip(left, encodings, strict=True):
                anchor, ids, unit = anchors[index][attempt], encoding.ids, units[index]
                dropped = self._continuation.anchor_ids(anchor) if anchor else []
                if dropped and ids[: len(dropped)] != dropped:
                    merged.append(index)
                elif mixed[index]:
                    results[index] = ids_by_segment(ids, encoding, unit, dropped=len(dropped), shift=len(anchor))
                elif len(unit.segments) == 1:
                    results[index] = [ids[len(dropped) :] if dropped else ids]
                else:
                    results[index] = [[] for _ in unit.segments]
                    results[index][first_filled(unit)] = ids[len(dropped) :] if dropped else ids
            left, attempt = merged, attempt + 1
        return results

    def _encodings(self, texts: Sequence[str], *, with_offsets: Sequence[bool]) -> list[Any]:
        """Return the encoding of each text, with offsets only where requested, since they take time."""
        self._tokenizer("", add_special_tokens=False, verbose=False)  # disables truncation and padding
        backend = self._tokenizer.backend_tokenizer
        if not any(with_offsets):
            return list(backend.encode_batch_fast(texts, add_special_tokens=False))
        slow = [text for text, wanted in zip(texts, with_offsets, strict=True) if wanted]
        fast = [text for text, wanted in zip(texts, with_offsets, strict=True) if not wanted]
        exact = iter(backend.encode_batch(slow, add_special_tokens=False) if slow else ())
        quick = iter(backend.encode_batch_fast(fast, add_special_tokens=False) if fast else ())
        return [next(exact if wanted else quick) for wanted in with_offsets]


def units_of(segments: Sequence[Segment], *, before: str) -> list[TokenizedUnit]:
    """Group segments into units."""
    units: list[TokenizedUnit] = []
    context, ended = before, False
    for segment in segments:
        if not units or not segment.joined or ended:
            units.append(TokenizedUnit((segment,), PLAIN if ended else context))
        else:
            units[-1] = TokenizedUnit((*units[-1].segments, segment), units[-1].before)
        text = segment.text
        context, ended = text[-CONTEXT:] if len(text) >= CONTEXT else (context + text)[-CONTEXT:], segment.ends
    return units


def first_filled(unit: TokenizedUnit) -> int:
    """Return the index of the first segment with text."""
    return next((index for index, segment in enumerate(unit.segments) if segment.text), 0)


def ids_by_segment(ids: list[int], encoding: Any, unit: TokenizedUnit, *, dropped: int, shift: int) -> list[list[int]]:
    """Return the tokens of each segment of a unit.

    Args:
        ids: Token ids of the anchor and the unit.
        encoding: Their encoding, with offsets.
        unit: The unit.
        dropped: Number of tokens of the anchor.
        shift: Number of characters of the anchor.
    """
    cuts, border = [dropped], shift
    characters = shift + len(unit.text)
    for left, right in pairwise(unit.segments):
        border += len(left.text)
        cuts.append(first_token(encoding, border, characters, takes_straddler=right.supervised > left.supervised))
    cuts.append(len(ids))
    for index in range(len(cuts) - 2, 0, -1):
        cuts[index] = max(dropped, min(cuts[index], cuts[index + 1]))
    return [ids[start:end] for start, end in pairwise(cuts)]


def first_token(encoding: Any, border: int, characters: int, *, takes_straddler: bool) -> int:
    """Return the first token after a border between segments.

    Args:
        encoding: The encoding of the text.
        border: Index of the first character after the border.
        characters: Number of characters in the text.
        takes_straddler: Whether a token across the border belongs to the right segment; else to the left one.
    """
    count = len(encoding)
    covering = (encoding.char_to_token(index) for index in range(border, characters))
    token = next((token for token in covering if token is not None), count)
    while token and start_of(encoding, token - 1) >= border:
        token -= 1
    while not takes_straddler and token < count and start_of(encoding, token) < border:
        token += 1
    return token


def start_of(encoding: Any, token: int) -> int:
    """Return the start of a token: the end of the previous one, since offsets may omit the token's leading space."""
    start: int = encoding.token_to_chars(token)[0]
    if not token:
        return start
    end_of_previous: int = encoding.token_to_chars(token - 1)[1]
    if token == 1:
        # Trimmed offsets of a first token of white space end at 0, although it has at least one character.
        end_of_previous = max(1, end_of_previous)
    return min(start, end_of_previous)
