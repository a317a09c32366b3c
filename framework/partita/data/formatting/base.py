"""A row as text: what every formatter returns.

The text consists of segments that are in the loss or not (docs/decisions/0003-loss-mask.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Row = Mapping[str, Any]
"""A cleaned row: values by feature name, as `partita_schema.rows.row_schema` returns them."""


class Segment(NamedTuple):
    """A piece of a row's text."""

    text: str
    supervised: bool
    """Whether its tokens are in the loss."""
    ends: bool = False
    """Whether an end-of-text token follows it."""
    joined: bool = False
    """Whether it is tokenized as one text with the previous segment.

    Else a token boundary precedes it, as where a model starts to answer.
    """


@dataclass(frozen=True)
class FormattedText:
    """A row as text."""

    segments: tuple[Segment, ...]
    """The prompt, then the answer, then what the chat template adds after it. In prediction, only the prompt.

    A dialogue may have answers between pieces of its prompt, in the loss or not.
    """
    begins: bool
    """Whether the tokenizer's BOS token precedes it; a chat template writes its own."""
    ends: bool = False
    """Whether the end-of-text token follows it."""
    needs_prompt: bool = True
    """Whether the row is unusable if its first token is in the loss."""
    cut_tokens: int = 0
    """Tokens of inputs and outputs truncated to a feature's max_sequence_length."""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment.text for segment in self.segments)


class Retriever(Protocol):
    """Selects worked examples for rows."""

    @property
    def fingerprint(self) -> str:
        """A hash of the rows to select from."""

    def choose(self, rows: Sequence[Row], keys: Sequence[str]) -> list[list[Row]]:
        """Return examples for each row, the least similar first; never the row itself."""
