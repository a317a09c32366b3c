"""Prompts of a data set by index, in flat memory: lengths are learned in one pass, tokens are made when needed."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from partita.inference.record import KEY_BYTES, row_key
from partita_schema.rows import check_rows

if TYPE_CHECKING:
    from marshmallow import Schema

logger = logging.getLogger(__name__)

Lengths = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint8]


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

    @property
    def errors(self) -> Mapping[int, str]:
        """Rows whose prompt cannot be made, with the reason."""

    @property
    def skipped(self) -> Mapping[int, str]:
        """Rows that are unusable themselves, such as one without a needed value, with the reason."""

    def prompts(self, indices: Sequence[int]) -> list[list[int]]:
        """Tokens of these rows' prompts; only for rows with a length."""


class EncodedPrompts:
    """The prompts of `rows`: 20 bytes a row, and the reasons of rows that cannot be asked."""

    def __init__(
        self,
        rows: PromptRows,
        encoder: PromptEncoder,
        schema: "Schema",
        *,
        fingerprint: str = "",
        chunk: int = 1000,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Renders and encodes every row once, `chunk` rows at a time; `progress` is told their number.

        `fingerprint` becomes part of each row's key.
        """
        self._rows, self._encoder, self._schema = rows, encoder, schema
        self.lengths: Lengths = np.zeros(len(rows), dtype=np.int32)
        self.keys: Keys = np.zeros((len(rows), KEY_BYTES), dtype=np.uint8)
        self.errors: dict[int, str] = {}
        self.skipped: dict[int, str] = {}
        for start in range(0, len(rows), chunk):
            indices = range(start, min(start + chunk, len(rows)))
            self._learn(indices, fingerprint)
            if progress is not None:
                progress(len(indices))

    def __len__(self) -> int:
        return len(self._rows)

    def prompts(self, indices: Sequence[int]) -> list[list[int]]:
        """Tokens of these rows' prompts, made anew."""
        clean = check_rows(self._schema, self._rows.get(indices)).clean
        encoded = self._encode([indices[place] for place in clean], list(clean.values()))
        return [list(prompt.input_ids) for prompt in encoded]

    def _learn(self, indices: range, fingerprint: str) -> None:
        checked = check_rows(self._schema, self._rows.get(indices))
        for place, reasons in checked.bad.items():
            self.skipped[indices[place]] = "; ".join(reasons)
        clean = {indices[place]: row for place, row in checked.clean.items()}
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
            self.lengths[index] = len(prompt.input_ids)
        return prompt.text

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


def described(error: Exception) -> str:
    """An exception as its class and text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
