"""What generation asks of the prompts of a job, and of the rows and the tokenizer that they are made from."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint8]

PREFIX_GROUP_TOKENS = 64
"""Number of tokens after the common prefix of all prompts in which the prompts of a prefix group are equal."""


class PromptRows(Protocol):
    """Rows of user data by index."""

    def __len__(self) -> int:
        """Number of rows."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names."""

    def get(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows in the requested order."""

    def key(self, index: int) -> str:
        """Return the name of a row, the same in every run."""

    def sampling_key(self, index: int) -> str:
        """Return the key from which a row's random numbers are derived."""


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
        """Why the row has no prompt."""

    @property
    def cut_tokens(self) -> int:
        """Number of tokens removed by limits of features and of the context."""


class PromptTokenizer(Protocol):
    """Tokenizes the prompts of rows, given as values by feature name."""

    def encode_prompts(self, rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Sequence[EncodedPrompt]:
        """Return the prompts of rows, in order; each depends on its own row only."""


class OutputPromptTokenizer(PromptTokenizer, Protocol):
    """Tokenizes the prompts of rows whose outputs are answered in sequence."""

    def encode_next_output(
        self,
        row: Mapping[str, Any],
        answered: Mapping[str, str],
        *,
        key: str,
        earlier_ids: Sequence[int],
        earlier_text: str,
    ) -> EncodedPrompt:
        """Return the prompt of the next output of a row.

        Args:
            row: The row, by feature name.
            answered: The answers to the outputs before it, by name.
            key: Key of the row.
            earlier_ids: Token ids of the text so far; empty to tokenize all of it.
            earlier_text: The text so far: the prompt of the output before, and the answer to it.
        """


class PromptText(NamedTuple):
    """A text with its tokens, from which the next prompt may continue."""

    text: str = ""
    ids: Sequence[int] = ()


class PromptSource(Protocol):
    """The prompts of a job. Rows are numbered from 0."""

    def __len__(self) -> int:
        """Number of rows."""

    @property
    def lengths(self) -> Lengths:
        """Tokens of each prompt, [rows]; 0 for rows without a prompt."""

    @property
    def keys(self) -> Keys:
        """row_key of each row, [rows, 16]."""

    def sampling_key(self, row: int) -> bytes:
        """Return the key that, with the seed, determines a row's random numbers."""

    @property
    def prefix(self) -> Sequence[int]:
        """Tokens that all prompts begin with."""

    @property
    def digests(self) -> npt.NDArray[np.void]:
        """Digest of each prompt's tokens, [rows]: equal for equal prompts."""

    @property
    def prefix_groups(self) -> npt.NDArray[np.int32] | None:
        """Number of the prefix group of each prompt, [rows], -1 without one; None if there are none.

        The prompts of a prefix group begin alike for at least PREFIX_GROUP_TOKENS tokens after `prefix`.
        """

    @property
    def errors(self) -> Mapping[int, str]:
        """Why a row's prompt could not be made, by row."""

    @property
    def skipped(self) -> Mapping[int, str]:
        """Why a row is invalid, such as one without a required value, by row."""

    def prompts(self, indices: Sequence[int]) -> list[list[int]]:
        """Return the tokens of these rows' prompts; only for rows with a length."""

    def next_prompt(self, row: int, answered: Mapping[str, str], before: PromptText) -> EncodedPrompt:
        """Return the prompt of a row's next output, given the answers to those before it.

        Args:
            row: Index of the row.
            answered: The answers so far, by output.
            before: The prompt and the last answer, from which the next prompt continues if it can.
        """
