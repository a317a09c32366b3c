"""Where rows come from: a union on `type`."""

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from partita_schema.base import Base, Flag, Name, Positive
from partita_schema.target import check_target


class FileSource(Base):
    """Rows in files."""

    type: Literal["csv", "tsv", "json", "jsonl", "parquet", "arrow", "txt", "parlai"]
    """Format of the files; parlai is ParlAI's dialogue text."""
    path: Name
    """A file, a glob, or a URL that fsspec opens. Relative paths start at the folder of the YAML file."""
    streaming: Flag = False
    """Read rows while they are used: for data larger than memory, or without end. A window of rows for each lane is in
    memory, and with workers the windows that are read ahead. Lanes are as many, up to 16, as divide the batches of a
    step."""


class HubSource(Base):
    """Rows of a data set on the Hugging Face Hub, or of a folder in its layout."""

    type: Literal["hub"]
    """A Hub data set."""
    name: Name
    """Data set id, or a folder."""
    subset: Name | None = None
    """Configuration of the data set."""
    split: Name = "train"
    """Split of the data set."""
    revision: Name | None = None
    """Branch, tag or commit."""
    streaming: Flag = False
    """Read rows while they are used: a window for each lane is in memory, as of files."""


class CustomSource(Base):
    """Rows from a class of yours."""

    type: Literal["custom"]
    """A class of yours."""
    target: Annotated[str, AfterValidator(check_target)]
    """`module:Class`."""
    options: dict[str, object] = {}
    """What the class is made with, as keyword arguments."""
    streaming: Flag = False
    """Read rows while they are used; the source may be without end."""


Select = Literal["corrected", "succeeded", "all"]
"""Dialogues to learn from. corrected: those that came to something else than they should, where that is known.
succeeded: those that came to what they should, as they are. all: both."""
Target = Literal["last_agent_turn", "every_agent_turn"]
"""Answers to learn of a dialogue, each in a row behind what was said before it, the model's own words included."""


class SimulationSource(Base):
    """Rows of dialogues that a simulation has had: the right answers in place of those that were wrong."""

    type: Literal["simulation"]
    """Transcripts of a simulation."""
    path: Name
    """A file of transcripts, such as runs/desk/transcripts/predicted.jsonl, or a glob."""
    select: Select = "corrected"
    """Dialogues to learn from. corrected: those that came to something else than they should, where that is known, with
    the right answer. succeeded: those that came to what they should, as they are. all: both."""
    target: Target = "last_agent_turn"
    """Answers to learn. last_agent_turn: the last one. every_agent_turn: each one whose right answer is known, in a row
    of its own. Before it stands what was really said, wrong answers included."""


Source = Annotated[FileSource | HubSource | CustomSource | SimulationSource, Field(discriminator="type")]
"""A source by its type; a plain text stands for a path whose ending tells the type, or a Hub id."""


class WeightedSource(Base):
    """One of several sources that are mixed."""

    source: Source | Name
    """A path, a glob, a Hub id, or a mapping with type."""
    weight: Positive = 1.0
    """Share of the rows that come from here, relative to the other weights."""
    name: Name | None = None
    """Name in keys of rows and in counts, without a slash. Default: the name of the file, its folder for a glob, the
    data set or the class."""


def default_name(source: Source | str) -> str:
    """What a source is called where the file does not say."""
    if isinstance(source, CustomSource):
        return source.target.partition(":")[2]
    text = source if isinstance(source, str) else source.name if isinstance(source, HubSource) else source.path
    parts = [part for part in re.split(r"[/\\]+", text) if part and not re.search(r"[*?\[]", part)]
    last = parts[-1] if parts else "rows"
    return last.partition(".")[0] or last


def mix_names(mix: Sequence[WeightedSource]) -> tuple[str, ...]:
    """A name for each source of a mix, as the file says or after what it reads; no two are the same."""
    taken = {part.name for part in mix if part.name is not None}
    last_numbers: dict[str, int] = {}
    found: list[str] = []
    for part in mix:
        if part.name is not None:
            found.append(part.name)
            continue
        wanted = default_name(part.source)
        number = last_numbers.get(wanted, 0) + 1
        while (name := wanted if number == 1 else f"{wanted}-{number}") in taken:
            number += 1
        last_numbers[wanted] = number
        taken.add(name)
        found.append(name)
    return tuple(found)
