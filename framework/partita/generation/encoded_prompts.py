"""The prompts of a dataset: one pass records their lengths, and tokens are computed again when needed."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from partita.generation.held_tokens import HeldTokens
from partita.generation.prompts import (
    PREFIX_GROUP_TOKENS,
    EncodedPrompt,
    Keys,
    Lengths,
    OutputPromptTokenizer,
    PromptRows,
    PromptText,
    PromptTokenizer,
)
from partita.generation.record import KEY_BYTES, row_key
from partita_schema.common.text import describe_error
from partita_schema.rows import RowSchema, check_rows
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup, synchronized_errors

logger = logging.getLogger(__name__)

DIGEST_BYTES = 16
NONE_UNREADABLE: Mapping[int, str] = {}
MAX_HELD_TOKENS = 16 * 2**20
"""Tokens kept from the first pass, 4 bytes each; rows beyond them are tokenized again when needed."""


class EncodedPrompts:
    """The prompts of a dataset: 56 bytes per row, a bounded number of tokens, and why rows have no prompt."""

    def __init__(
        self,
        rows: PromptRows,
        row_tokenizer: PromptTokenizer,
        schema: RowSchema,
        *,
        fingerprint: str = "",
        chunk: int = 1000,
        progress: Callable[[int], None] | None = None,
        process_group: ProcessGroup = SINGLE_PROCESS,
        unreadable: Mapping[int, str] = NONE_UNREADABLE,
    ) -> None:
        """Render and tokenize every row once.

        Each rank of `process_group` tokenizes a part of the rows, and the results are gathered on all ranks.

        Args:
            rows: The rows.
            row_tokenizer: Tokenizes prompts.
            schema: Converts a row to values by feature name.
            fingerprint: Included in each row's key.
            chunk: Rows tokenized at a time.
            progress: Called with the number of rows of each chunk.
            process_group: The ranks that share the work.
            unreadable: Reasons of rows that become errors, by row.
        """
        self._rows, self._row_tokenizer, self._schema = rows, row_tokenizer, schema
        self._unreadable = unreadable
        self.lengths: Lengths = np.zeros(len(rows), dtype=np.int32)
        self.cut_tokens: Lengths = np.zeros(len(rows), dtype=np.int32)
        """Tokens of each row that limits of features and of the context removed, [rows]."""
        self.keys: Keys = np.zeros((len(rows), KEY_BYTES), dtype=np.uint8)
        self.digests = np.zeros(len(rows), dtype=f"V{DIGEST_BYTES}")
        self._beginnings = np.zeros(len(rows), dtype=np.uint64)
        """Digest of the beginning of each prompt whose tokens are not held; 0 of others."""
        self._prefix: npt.NDArray[np.int64] | None = None
        self._held = HeldTokens(len(rows), most=MAX_HELD_TOKENS // process_group.world_size)
        self.errors: dict[int, str] = {}
        self.skipped: dict[int, str] = {}
        first, end = (
            len(rows) * rank // process_group.world_size for rank in (process_group.rank, process_group.rank + 1)
        )
        with synchronized_errors(process_group, "encoding the prompts"):
            for start in range(first, end, chunk):
                indices = range(start, min(start + chunk, end))
                self._encode_rows(indices, fingerprint)
                if progress is not None:
                    progress(len(indices) * process_group.world_size)
        self.prefix: list[int] = [] if self._prefix is None else self._prefix.tolist()
        """The tokens that all prompts begin with."""
        if process_group.world_size > 1:
            self._merge(process_group.all_gather_object(self._encoded_part(first, end), "the prompts"))

    def __len__(self) -> int:
        return len(self._rows)

    def sampling_key(self, row: int) -> bytes:
        """Return the key of a row's random numbers: the row's own key, and its number among rows with the same key.

        It does not depend on the prompt or the job, so `predict` and `evaluate` sample with the same numbers.
        """
        return bytes(self._sampling_keys[row])

    @cached_property
    def _sampling_keys(self) -> Keys:
        return sampling_keys(self._rows)

    @cached_property
    def prefix_groups(self) -> npt.NDArray[np.int32] | None:
        """Number of the prefix group of each prompt, [rows], -1 without one; None if there are none."""
        tokens, digests = len(self.prefix) + PREFIX_GROUP_TOKENS, self._beginnings.copy()
        for row in np.flatnonzero(self.lengths >= tokens).tolist():
            if row in self._held:
                digests[row] = beginning_digest(self._held[row], tokens=tokens)
        _, numbers, counts = np.unique(digests, return_inverse=True, return_counts=True)
        prefix_groups = np.where((digests > 0) & (counts[numbers] > 1), numbers, -1).astype(np.int32)
        return prefix_groups if len(prefix_groups) and prefix_groups.max() >= 0 else None

    def prompts(self, indices: Sequence[int]) -> list[list[int]]:
        """Return the tokens of these rows' prompts, from memory or tokenized again."""
        missing = [index for index in indices if index not in self._held]
        tokenized: dict[int, list[int]] = {}
        if missing:
            clean = check_rows(self._schema, self._rows.get(missing)).clean
            present = [missing[number] for number in clean]
            encoded = self._encode(present, list(clean.values()))
            tokenized = {index: list(prompt.input_ids) for index, prompt in zip(present, encoded, strict=True)}
        return [tokenized[index] if index in tokenized else self._held[index] for index in indices]

    def next_prompt(self, row: int, answered: Mapping[str, str], before: PromptText) -> EncodedPrompt:
        """Return the prompt of a row's next output, given the answers to those before it; see `PromptSource`."""
        clean = check_rows(self._schema, self._rows.get([row])).clean[0]
        row_tokenizer = cast("OutputPromptTokenizer", self._row_tokenizer)
        return row_tokenizer.encode_next_output(
            clean, answered, key=self._rows.key(row), earlier_ids=before.ids, earlier_text=before.text
        )

    def _encoded_part(self, first: int, end: int) -> "EncodedPart":
        """Return the results for a part of the rows."""
        rows = slice(first, end)
        known = (self.lengths[rows], self.cut_tokens[rows], self.keys[rows], self.digests[rows], self._beginnings[rows])
        return EncodedPart(rows, *known, self.prefix, self._held.record(rows), self.errors, self.skipped)

    def _merge(self, parts: "Sequence[EncodedPart]") -> None:
        """Merge the results of all ranks."""
        self._held = HeldTokens(len(self), most=MAX_HELD_TOKENS)
        for encoded in parts:
            self.lengths[encoded.rows], self.cut_tokens[encoded.rows] = encoded.lengths, encoded.cut_tokens
            self.keys[encoded.rows] = encoded.keys
            self.digests[encoded.rows], self._beginnings[encoded.rows] = encoded.digests, encoded.beginnings
            self._held.take_in(encoded.rows, *encoded.tokens)
            self.errors |= encoded.errors
            self.skipped |= encoded.skipped
        prefixes = [list(encoded.prefix) for encoded in parts if encoded.lengths.any()]
        self.prefix = common_beginning(prefixes) if prefixes else []

    def _encode_rows(self, indices: range, fingerprint: str) -> None:
        self.errors |= {index: self._unreadable[index] for index in indices if index in self._unreadable}
        readable = [index for index in indices if index not in self._unreadable]
        checked = check_rows(self._schema, self._rows.get(readable))
        for number, reasons in checked.bad.items():
            self.skipped[readable[number]] = "; ".join(reasons)
        clean = {readable[number]: row for number, row in checked.clean.items()}
        texts = {index: self._measure(index, prompt) for index, prompt in self._try_encode(clean)}
        for index in indices:
            key = row_key(texts.get(index, ""), row=self._rows.key(index), fingerprint=fingerprint)
            self.keys[index] = np.frombuffer(key, dtype=np.uint8)

    def _measure(self, index: int, prompt: "EncodedPrompt | Exception") -> str:
        """Record the length of a row's prompt, or why it has none; return its text."""
        if isinstance(prompt, Exception):
            self.errors[index] = describe_error(prompt)
            return ""
        if prompt.error is not None:
            self.errors[index] = prompt.error
        elif not len(prompt.input_ids):
            self.errors[index] = "the prompt is empty"
        else:
            self._note_tokens(index, prompt.input_ids)
            self.cut_tokens[index] = prompt.cut_tokens
        return prompt.text

    def _note_tokens(self, index: int, input_ids: Sequence[int]) -> None:
        ids = np.asarray(input_ids, dtype=np.int64)
        if self._prefix is None:
            self._prefix = ids
        elif len(self._prefix):
            common = ids[: len(self._prefix)]
            differ = np.flatnonzero(common != self._prefix[: len(common)])
            self._prefix = common[: int(differ[0]) if len(differ) else len(common)]
        self.lengths[index] = len(ids)
        if not self._held.add(index, ids):
            # By now, few rows shorten the prefix.
            self._beginnings[index] = beginning_digest(ids, tokens=len(self._prefix) + PREFIX_GROUP_TOKENS)
        self.digests[index] = hashlib.blake2b(ids.tobytes(), digest_size=DIGEST_BYTES).digest()

    def _try_encode(self, rows: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[int, "EncodedPrompt | Exception"]]:
        """Yield prompts by index; an exception replaces a prompt that could not be made."""
        try:
            encoded = self._encode(list(rows), list(rows.values()))
        except Exception as error:
            # A chat template is external code and may reject a row; the other rows are not affected.
            logger.info("%s rows are encoded one by one: %s", len(rows), describe_error(error))
        else:
            yield from zip(rows, encoded, strict=True)
            return
        for index, row in rows.items():
            try:
                yield index, self._encode([index], [row])[0]
            except Exception as error:
                yield index, error

    def _encode(self, indices: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> Sequence[EncodedPrompt]:
        return self._row_tokenizer.encode_prompts(rows, [self._rows.key(index) for index in indices])


@dataclass(frozen=True)
class EncodedPart:
    """The results of one rank for its part of the rows."""

    rows: slice
    lengths: Lengths
    cut_tokens: Lengths
    keys: Keys
    digests: npt.NDArray[np.void]
    beginnings: npt.NDArray[np.uint64]
    prefix: Sequence[int]
    tokens: "tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]"
    """The held tokens, and the start and end of each row's tokens."""
    errors: Mapping[int, str]
    skipped: Mapping[int, str]


def sampling_keys(rows: PromptRows) -> Keys:
    """Return a digest of each row's sampling key and of its number among the rows with that key, [rows, 16]."""
    keys = np.zeros((len(rows), KEY_BYTES), dtype=np.uint8)
    for row in range(len(rows)):
        keys[row] = np.frombuffer(row_key("", row=rows.sampling_key(row), fingerprint=""), dtype=np.uint8)
    _, inverse, counts = np.unique(keys.view(f"V{KEY_BYTES}")[:, 0], return_inverse=True, return_counts=True)
    seen: dict[int, int] = {}
    for row in np.flatnonzero(counts[inverse] > 1).tolist():
        number = seen[inverse[row]] = seen.get(inverse[row], -1) + 1
        if number:
            key = row_key("", row=rows.sampling_key(row), fingerprint=f"{number}")
            keys[row] = np.frombuffer(key, dtype=np.uint8)
    return keys


def beginning_digest(ids: Sequence[int] | npt.NDArray[np.integer], *, tokens: int) -> int:
    """Return a digest of the first `tokens` tokens, above 0; 0 if there are fewer."""
    if len(ids) < tokens:
        return 0
    beginning = np.asarray(ids[:tokens], dtype=np.int64)
    return int.from_bytes(hashlib.blake2b(beginning.tobytes(), digest_size=8).digest(), "little") or 1


def common_beginning(prompts: Sequence[list[int]]) -> list[int]:
    """Return the tokens that all prompts begin with."""
    first, last = min(prompts), max(prompts)  # all others sort between these two and share their common prefix
    same = next((index for index, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), None)
    return first[: min(len(first), len(last)) if same is None else same]
