"""What a section of a page consists of."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from partita.report.charts import Chart, Table

PieceKind = Literal["plain", "loss", "removed", "added"]
"""loss: tokens in the loss. removed: only in the reference. added: only in the answer."""


class Piece(NamedTuple):
    """A part of a text, which is marked by its kind."""

    text: str
    kind: PieceKind = "plain"


@dataclass(frozen=True)
class Paragraph:
    """A sentence or several."""

    part: ClassVar = "paragraph"
    text: str
    kind: Literal["plain", "note", "warning"] = "plain"


@dataclass(frozen=True)
class NamedTable:
    """A table with a caption."""

    part: ClassVar = "table"
    caption: str
    table: Table
    numbers: bool = True
    """Whether all columns but the first are aligned to the right."""
    folded: bool = False
    """Whether only the caption is shown at first."""
    note: str = ""
    """A sentence below the table."""


@dataclass(frozen=True)
class Charts:
    """Charts side by side where there is room."""

    part: ClassVar = "charts"
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Folded:
    """Text as it was written, of which only the caption is shown at first."""

    part: ClassVar = "folded"
    caption: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command to run."""

    part: ClassVar = "command"
    caption: str
    text: str


class Turn(NamedTuple):
    """A message of a dialogue."""

    speaker: str
    text: str
    note: str = ""
    """Shown below the text."""
    kind: Literal["", "right", "wrong"] = ""
    """Whether an answer is right; "" if that is not known, or for other speakers."""


class Dialogue(NamedTuple):
    """The messages of a dialogue, below a title."""

    title: str
    turns: Sequence[Turn]


@dataclass(frozen=True)
class Dialogues:
    """Dialogues of which only the titles are shown at first, except the first one."""

    part: ClassVar = "dialogues"
    caption: str
    dialogues: Sequence[Dialogue]


class Passage(NamedTuple):
    """A text with marks, below a title and before that a quiet text."""

    title: str
    pieces: Sequence[Piece]
    before: str = ""
    """Shown above the pieces, such as the prompt."""
    facts: Sequence[tuple[str, str]] = ()
    """Named values, shown below the pieces."""


@dataclass(frozen=True)
class Passages:
    """Texts with marks, such as rows of the data."""

    part: ClassVar = "passages"
    caption: str
    passages: Sequence[Passage]
    folded: bool = True
    """Whether only the titles are shown at first."""
    unfolded: int = 0
    """Number of passages that are shown at first nevertheless."""
    legend: Sequence[Piece] = ()
    """What the marks mean."""


@dataclass(frozen=True)
class Link:
    """A link to a file next to the page."""

    part: ClassVar = "link"
    before: str
    text: str
    path: str
    """Path relative to the page, chosen by partita and not by a user."""


Part = Paragraph | NamedTable | Charts | Folded | Command | Dialogues | Passages | Link


@dataclass(frozen=True)
class Section:
    """A section of a page."""

    title: str
    parts: Sequence[Part] = field(default_factory=tuple)
