"""Tokens of a row's segments, as they stand in the joined text.

A row is encoded in units. A unit begins where the row begins, where a model begins to answer, and after an inserted
end token; what follows in the same unit is one text with it. So a token begins with every answer, as it does when the
prompt stands alone, and everywhere else the tokens are those of the joined text
(docs/decisions/0026-joined-text.md). Which tokens of a unit belong to which segment follows from their offsets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from partita.data.shaping.formatter import Segment
from partita.lm.continuation import Continuation

CONTEXT = 256
"""Characters before a unit that are looked at."""
PLAIN = "."
"""Stands for what comes before a unit whose text before does not count."""


@dataclass(frozen=True)
class TokenizedUnit:
    """Segments that are encoded as one text."""

    segments: tuple[Segment, ...]
    before: str
    """The end of the text before; empty where the row begins."""

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
    """Encodes rows of segments. Can be sent to other processes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._continuation = Continuation(tokenizer)

    def __call__(self, rows: Sequence[Sequence[Segment]], *, before: str = "") -> list[list[list[int]]]:
        """Return the token ids of each segment of each row, encoded together. `before` is the text before.

        Raises TypeError or UnicodeEncodeError where a text is no Unicode.
        """
        units = [units_of(segments, before=before) for segments in rows]
        encoded = iter(self._encode([unit for row in units for unit in row]))
        return [[part for _ in row for part in next(encoded)] for row in units]

    def _encode(self, units: Sequence[TokenizedUnit]) -> list[list[list[int]]]:
        """Return the token ids of each unit by segment.

        Where the tokens of an anchor merge with the text that follows, the next anchor is tried.
        """
        anchors = [self._continuation.anchors(unit.before) if unit.before else ("",) for unit in units]
        texts, mixed = [unit.text for unit in units], [unit.is_mixed for unit in units]
        found: list[list[list[int]]] = [[] for _ in units]
        left, attempt = list(range(len(units))), 0
        while left:
            encodings = self._encodings(
                [anchors[place][attempt] + texts[place] for place in left],
                with_offsets=[mixed[place] for place in left],
            )
            merged: list[int] = []
            for place, encoding in zip(left, encodings, strict=True):
                anchor, ids, unit = anchors[place][attempt], encoding.ids, units[place]
                dropped = self._continuation.anchor_ids(anchor)
                if ids[: len(dropped)] != dropped:
                    merged.append(place)
                elif mixed[place]:
                    found[place] = parts_of(ids, encoding, unit, dropped=len(dropped), shift=len(anchor))
                else:
                    found[place] = [[] for _ in unit.segments]
                    found[place][first_filled(unit)] = ids[len(dropped) :] if dropped else ids
            left, attempt = merged, attempt + 1
        return found

    def _encodings(self, texts: Sequence[str], *, with_offsets: Sequence[bool]) -> list[Any]:
        """Return the encoding of each text, with offsets only where they are wanted: they take time."""
        self._tokenizer("", add_special_tokens=False, verbose=False)  # switches truncation and padding off
        backend = self._tokenizer.backend_tokenizer
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
        context, ended = (context + segment.text)[-CONTEXT:], segment.ends
    return units


def first_filled(unit: TokenizedUnit) -> int:
    """Return the place of the first segment with text."""
    return next((place for place, segment in enumerate(unit.segments) if segment.text), 0)


def parts_of(ids: list[int], encoding: Any, unit: TokenizedUnit, *, dropped: int, shift: int) -> list[list[int]]:
    """Return the tokens of each segment of a unit, whose text begins at character `shift` and token `dropped`."""
    cuts, border = [dropped], shift
    characters = shift + len(unit.text)
    for left, right in pairwise(unit.segments):
        border += len(left.text)
        cuts.append(first_token(encoding, border, characters, takes_straddler=right.supervised > left.supervised))
    cuts.append(len(ids))
    for place in range(len(cuts) - 2, 0, -1):
        cuts[place] = max(dropped, min(cuts[place], cuts[place + 1]))
    return [ids[start:end] for start, end in pairwise(cuts)]


def first_token(encoding: Any, border: int, characters: int, *, takes_straddler: bool) -> int:
    """Return the first token after a border between segments, in a text with this number of `characters`.

    A token on both sides of the border is the first one after it where the right segment `takes_straddler`, else the
    last one before it.
    """
    count = len(encoding)
    covering = (encoding.char_to_token(place) for place in range(border, characters))
    token = next((token for token in covering if token is not None), count)
    while token and start_of(encoding, token - 1) >= border:
        token -= 1
    while not takes_straddler and token < count and start_of(encoding, token) < border:
        token += 1
    return token


def start_of(encoding: Any, token: int) -> int:
    """Return where a token starts: where the one before ends, for offsets may leave out the space it begins with."""
    start: int = encoding.token_to_chars(token)[0]
    return min(start, encoding.token_to_chars(token - 1)[1]) if token else start
