"""Prompts of a data set by index, in flat memory: lengths are learned in one pass, tokens are made when needed."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from partita.inference.record import KEY_BYTES, row_key
from partita_schema.rows import check_rows
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup, synchronized_errors

if TYPE_CHECKING:
    from marshmallow import Schema

logger = logging.getLogger(__name__)

Lengths = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint8]

DIGEST_BYTES = 16
NONE_UNREADABLE: Mapping[int, str] = {}
KEPT_TOKENS = 16 * 2**20
"""Tokens that are kept from the first pass, 4 bytes each; rows beyond are encoded again when their turn comes."""


class PromptRows(Protocol):
    """Rows of user data by index."""

    def __len__(self) -> int:
        """Number of rows."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""

    def get(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Rows in the order asked for."""

    def key(self, index: int) -> str:
        """What names a row, the same in every run."""

    def sampling_key(self, index: int) -> str:
        """Return the key that a sampled answer to a row follows from."""


class EncodedPrompt(Protocol):
    """One prompt as text and tokens, or why there is none."""

    @property
    def text(self) -> str:
        """The rendered prompt."""

    @property
    def input_ids(self) -> Sequence[int]:
        """Its tokens."""

    @property
    def error(self) -> str | None:
        """Why the row cannot be asked."""


class PromptEncoder(Protocol):
    """From cleaned rows (values by feature name) to prompts."""

    def encode_prompts(self, rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Sequence[EncodedPrompt]:
        """The prompts of rows, in order; a row's does not depend on its neighbours."""


class PromptSource(Protocol):
    """What the engine generates for. Rows are counted from 0."""

    def __len__(self) -> int:
        """Number of rows."""

    @property
    def lengths(self) -> Lengths:
        """Tokens of each prompt, [rows]; 0 for rows that cannot be asked."""

    @property
    def keys(self) -> Keys:
        """row_key of each row, [rows, 16]."""

    def sampling_key(self, row: int) -> bytes:
        """What a row's random numbers follow from, next to the seed."""

    @property
    def prefix(self) -> Sequence[int]:
        """Tokens that all prompts begin with."""

    @property
    def digests(self) -> npt.NDArray[np.void]:
        """Of each prompt's tokens, [rows]: equal where those are."""

    @property
    def errors(self) -> Mapping[int, str]:
        """Rows whose prompt cannot be made, with the reason."""

    @property
    def skipped(self) -> Mapping[int, str]:
        """Rows that are unusable themselves, such as one without a needed value, with the reason."""

    def prompts(self, indices: Sequence[int]) -> list[list[int]]:
        """Tokens of these rows' prompts; only for rows with a length."""


class EncodedPrompts:
    """The prompts of `rows`: 44 bytes a row, a bounded number of tokens, the reasons of rows that cannot be asked."""

    def __init__(
        self,
        rows: PromptRows,
        encoder: PromptEncoder,
        schema: "Schema",
        *,
        fingerprint: str = "",
        chunk: int = 1000,
        progress: Callable[[int], None] | None = None,
        process_group: ProcessGroup = SINGLE_PROCESS,
        unreadable: Mapping[int, str] = NONE_UNREADABLE,
    ) -> None:
        """Renders and encodes every row once, `chunk` rows at a time; `progress` is told their number.

        `fingerprint` becomes part of each row's key. Each rank of `process_group` encodes a part of the rows, and is
        told of the others by those that did. Rows in `unreadable` become errors with these reasons.
        """
        self._rows, self._encoder, self._schema = rows, encoder, schema
        self._unreadable = unreadable
        self.lengths: Lengths = np.zeros(len(rows), dtype=np.int32)
        self.keys: Keys = np.zeros((len(rows), KEY_BYTES), dtype=np.uint8)
        self.digests = np.zeros(len(rows), dtype=f"V{DIGEST_BYTES}")
        self.prefix: list[int] = []
        self._kept = KeptTokens(len(rows), most=KEPT_TOKENS // process_group.world_size)
        self.errors: dict[int, str] = {}
        self.skipped: dict[int, str] = {}
        first, end = (
            len(rows) * place // process_group.world_size for place in (process_group.rank, process_group.rank + 1)
        )
        with synchronized_errors(process_group, "encoding the prompts"):
            for start in range(first, end, chunk):
                indices = range(start, min(start + chunk, end))
                self._learn(indices, fingerprint)
                if progress is not None:
                    progress(len(indices) * process_group.world_size)
        if process_group.world_size > 1:
            self._take_in(process_group.all_gather_object(self._learned(first, end), "the prompts"))

    def __len__(self) -> int:
        return len(self._rows)

    def sampling_key(self, row: int) -> bytes:
        """What a row's random numbers follow from: its own key, and its number among the rows that share it.

        Neither the prompt nor the job counts: `predict` and `evaluate` draw the same numbers for the same rows.
        """
        return bytes(self._sampling_keys[row])

    @cached_property
    def _sampling_keys(self) -> Keys:
        return sampling_keys(self._rows)

    def prompts(self, indices: Sequence[int]) -> list[list[int]]:
        """Tokens of these rows' prompts, those that were kept and others made anew."""
        missing = [index for index in indices if index not in self._kept]
        made: dict[int, list[int]] = {}
        if missing:
            clean = check_rows(self._schema, self._rows.get(missing)).clean
            places = [missing[place] for place in clean]
            encoded = self._encode(places, list(clean.values()))
            made = {index: list(prompt.input_ids) for index, prompt in zip(places, encoded, strict=True)}
        return [made[index] if index in made else self._kept[index] for index in indices]

    def _learned(self, first: int, end: int) -> "Learned":
        """What was learned of a part of the rows."""
        part = slice(first, end)
        known = (self.lengths[part], self.keys[part], self.digests[part])
        return Learned(part, *known, self.prefix, self._kept.record(part), self.errors, self.skipped)

    def _take_in(self, parts: "Sequence[Learned]") -> None:
        """Know what all ranks have learned."""
        self._kept = KeptTokens(len(self), most=KEPT_TOKENS)
        for learned in parts:
            self.lengths[learned.part], self.keys[learned.part] = learned.lengths, learned.keys
            self.digests[learned.part] = learned.digests
            self._kept.take_in(learned.part, *learned.tokens)
            self.errors |= learned.errors
            self.skipped |= learned.skipped
        begun = [list(learned.prefix) for learned in parts if learned.lengths.any()]
        self.prefix = common_beginning(begun) if begun else []

    def _learn(self, indices: range, fingerprint: str) -> None:
        self.errors |= {index: self._unreadable[index] for index in indices if index in self._unreadable}
        readable = [index for index in indices if index not in self._unreadable]
        checked = check_rows(self._schema, self._rows.get(readable))
        for place, reasons in checked.bad.items():
            self.skipped[readable[place]] = "; ".join(reasons)
        clean = {readable[place]: row for place, row in checked.clean.items()}
        texts = {index: self._measure(index, prompt) for index, prompt in self._try_encode(clean)}
        for index in indices:
            key = row_key(texts.get(index, ""), row=self._rows.key(index), fingerprint=fingerprint)
            self.keys[index] = np.frombuffer(key, dtype=np.uint8)

    def _measure(self, index: int, prompt: "EncodedPrompt | Exception") -> str:
        """Learn the length of a row's prompt, or why it has none; returns its text."""
        if isinstance(prompt, Exception):
            self.errors[index] = described(prompt)
            return ""
        if prompt.error is not None:
            self.errors[index] = prompt.error
        elif not len(prompt.input_ids):
            self.errors[index] = "the prompt is empty"
        else:
            self._note_tokens(index, prompt.input_ids)
        return prompt.text

    def _note_tokens(self, index: int, input_ids: Sequence[int]) -> None:
        ids = np.asarray(input_ids, dtype=np.int64)
        if not self.lengths.any():
            self.prefix = ids.tolist()
        elif len(self.prefix):
            common = ids[: len(self.prefix)]
            differ = np.flatnonzero(common != self.prefix[: len(common)])
            self.prefix = self.prefix[: int(differ[0]) if len(differ) else len(common)]
        self.lengths[index] = len(ids)
        self._kept.add(index, ids)
        self.digests[index] = hashlib.blake2b(ids.tobytes(), digest_size=DIGEST_BYTES).digest()

    def _try_encode(self, rows: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[int, "EncodedPrompt | Exception"]]:
        """Prompts by index; the exception in place of a prompt that cannot be made."""
        try:
            encoded = self._encode(list(rows), list(rows.values()))
        except Exception as error:
            # A chat template is code from outside and may refuse a row; the others are unharmed.
            logger.info("%s rows are encoded one by one: %s", len(rows), described(error))
        else:
            yield from zip(rows, encoded, strict=True)
            return
        for index, row in rows.items():
            try:
                yield index, self._encode([index], [row])[0]
            except Exception as error:
                yield index, error

    def _encode(self, indices: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> Sequence[EncodedPrompt]:
        return self._encoder.encode_prompts(rows, [self._rows.key(index) for index in indices])


@dataclass(frozen=True)
class Learned:
    """What one rank has learned of its part of the rows."""

    part: slice
    lengths: Lengths
    keys: Keys
    digests: npt.NDArray[np.void]
    prefix: Sequence[int]
    tokens: "tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]"
    """Tokens that were kept, and where those of each row lie."""
    errors: Mapping[int, str]
    skipped: Mapping[int, str]


class KeptTokens:
    """Tokens of rows, as long as there is room."""

    def __init__(self, rows: int, *, most: int) -> None:
        """Room for `most` tokens; the rows are added once each."""
        self._most, self._used = most, 0
        self._tokens = np.zeros(0, dtype=np.int32)
        self._ends = np.zeros((rows, 2), dtype=np.int32)

    def __contains__(self, row: int) -> bool:
        return bool(self._ends[row, 1])

    def __getitem__(self, row: int) -> list[int]:
        start, end = self._ends[row]
        found: list[int] = self._tokens[start:end].tolist()
        return found

    def record(self, part: slice) -> "tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]":
        """All tokens, and where those of the rows of a part lie among them."""
        return self._tokens[: self._used], self._ends[part]

    def take_in(self, part: slice, tokens: "npt.NDArray[np.int32]", ends: "npt.NDArray[np.int32]") -> None:
        """Keep what `record` gave of a part."""
        self._tokens = np.concatenate([self._tokens[: self._used], tokens])
        self._ends[part] = np.where(ends[:, 1:] > 0, ends + self._used, 0)
        self._used = len(self._tokens)

    def add(self, row: int, ids: npt.NDArray[np.integer]) -> None:
        """Keep a row's tokens, at least one, if there is room."""
        end = self._used + len(ids)
        if end > self._most:
            return
        if end > len(self._tokens):
            grown = np.zeros(min(self._most, max(2 * end, 4096)), dtype=np.int32)
            grown[: self._used] = self._tokens[: self._used]
            self._tokens = grown
        self._tokens[self._used : end] = ids
        self._ends[row] = self._used, end
        self._used = end


def sampling_keys(rows: PromptRows) -> Keys:
    """Return a hash of each row's sampling key, [rows, 16], and of its number among the rows with that key."""
    found = np.zeros((len(rows), KEY_BYTES), dtype=np.uint8)
    for row in range(len(rows)):
        found[row] = np.frombuffer(row_key("", row=rows.sampling_key(row), fingerprint=""), dtype=np.uint8)
    _, inverse, counts = np.unique(found.view(f"V{KEY_BYTES}")[:, 0], return_inverse=True, return_counts=True)
    seen: dict[int, int] = {}
    for row in np.flatnonzero(counts[inverse] > 1).tolist():
        number = seen[inverse[row]] = seen.get(inverse[row], -1) + 1
        if number:
            key = row_key("", row=rows.sampling_key(row), fingerprint=f"{number}")
            found[row] = np.frombuffer(key, dtype=np.uint8)
    return found


def common_beginning(prompts: Sequence[list[int]]) -> list[int]:
    """Tokens that all prompts begin with."""
    first, last = min(prompts), max(prompts)  # all others lie between them, and share what these do
    same = next((place for place, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), None)
    return first[: min(len(first), len(last)) if same is None else same]


def described(error: Exception) -> str:
    """An exception as its class and text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
