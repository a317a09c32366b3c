"""Where rows are read from; a union on `type`."""

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from partita_schema.base import ConfigModel, Name, Positive, StrictBool, check_target, rule_error
from partita_schema.common.text import first_repeated

FORMATS_OF_OPTIONS = {
    "delimiter": ("csv", "tsv"),
    "quoting": ("csv", "tsv"),
    "header": ("csv", "tsv"),
    "encoding": ("csv", "tsv", "json", "jsonl", "txt", "parlai"),
    "sheet": ("xlsx",),
}
"""Formats that have an option of file sources."""


def check_delimiter(delimiter: str) -> str:
    if len(delimiter) != 1 or delimiter in '"\r\n\\ ':
        raise rule_error(f"got {delimiter!r}; write one character, such as ';', '|' or \"\\t\" for a tab")
    return delimiter


def check_encoding(encoding: str) -> str:
    try:
        "".encode(encoding)
    except LookupError:
        known = "utf-8, utf-16, cp1252 (Windows), latin-1, cp1250, gb18030, shift_jis, euc_kr"
        raise rule_error(f"no encoding is named {encoding!r}; write a name of Python, such as {known}") from None
    return encoding


def check_header(names: tuple[str, ...]) -> tuple[str, ...]:
    twice = first_repeated(names)
    if twice is not None:
        raise rule_error(f"{twice!r} occurs twice; rename one")
    return names


class FileSource(ConfigModel):
    """Rows in files."""

    type: Literal["csv", "tsv", "json", "jsonl", "parquet", "arrow", "txt", "parlai", "xlsx"]
    """Format of the files. parlai is ParlAI's dialogue text format, xlsx are Excel workbooks."""
    path: Name
    """File, glob, or URL that fsspec can open. Relative paths are relative to the folder of the YAML file."""
    delimiter: Annotated[str, AfterValidator(check_delimiter)] | None = None
    """Character between the cells of csv and tsv. Default: detected from the first rows: a comma (csv), a tab (tsv), a
    semicolon or |."""
    quoting: Literal["minimal", "none"] | None = None
    """Whether double quotes in csv and tsv enclose cells with delimiters or line breaks (minimal), or are text (none).
    Default: detected from the first rows."""
    header: Annotated[tuple[Name, ...], Field(min_length=1), AfterValidator(check_header)] | None = None
    """Names of the columns of csv and tsv without a header line, such as [review, label]: the first line is a row.
    Default: the first line."""
    encoding: Annotated[str, AfterValidator(check_encoding)] | None = None
    """Encoding of text files, such as utf-16, cp1252 or latin-1. Default: UTF-8; for csv and tsv, detected from the
    first rows: UTF-8, UTF-16 or cp1252."""
    sheet: Name | None = None
    """Sheet of xlsx files. Default: the first."""
    streaming: StrictBool = False
    """Read rows while training, for data that is larger than memory or endless. Memory holds one window of rows per
    shard group, plus the windows that loader workers read ahead. There are up to 16 shard groups, a number that divides
    the micro-batches of an optimizer step."""

    @model_validator(mode="after")
    def options_fit_the_format(self) -> "FileSource":
        for key, formats in FORMATS_OF_OPTIONS.items():
            if getattr(self, key) is not None and self.type not in formats:
                raise rule_error(f"{key} has no effect on {self.type}; it is for {' and '.join(formats)}", at=key)
        return self


class HubSource(ConfigModel):
    """A dataset on the Hugging Face Hub, or a local folder with the same layout."""

    type: Literal["hub"]
    """A Hugging Face dataset."""
    name: Name
    """Dataset id on the Hub, or a folder."""
    subset: Name | None = None
    """Configuration name (subset) of the dataset. Default: the default configuration."""
    split: Name = "train"
    """Split of the dataset."""
    revision: Name | None = None
    """Branch, tag or commit of the dataset. Default: the main branch."""
    streaming: StrictBool = False
    """Read rows while training. Memory holds one window of rows per shard group, as for files."""


class CustomSource(ConfigModel):
    """Rows from your own source class."""

    type: Literal["custom"]
    """Your own source class."""
    target: Annotated[str, AfterValidator(check_target)]
    """The class, as `module:Class`."""
    options: dict[str, object] = {}
    """Keyword arguments for the class."""
    streaming: StrictBool = False
    """Read rows while training; the source may be endless."""


Select = Literal["corrected", "succeeded", "all", "best_and_worst"]
"""Which dialogues of a simulation to learn from: unsuccessful ones with a known correct answer (corrected), successful
ones (succeeded), both (all), or the best and the worst of several attempts at a task (best_and_worst)."""
Target = Literal["last_agent_turn", "every_agent_turn"]
"""Which answers of a dialogue to learn, each in a row with the messages before it, including what the model said."""


class SimulationSource(ConfigModel):
    """Training rows from the transcripts of a simulation: correct answers in place of wrong ones, or pairs of answers
    to compare."""

    type: Literal["simulation"]
    """Transcripts of a simulation."""
    path: Name
    """Transcript file, such as runs/desk/transcripts/predicted.jsonl, or a glob."""
    select: Select = "corrected"
    """Which dialogues to learn from. corrected: unsuccessful ones with a known correct answer, which replaces the
    model's. succeeded: successful ones, unchanged. all: both. For pairs of answers (preference) there are two values.
    corrected: the correct answer is chosen, and the model's is rejected. best_and_worst: of the attempts at a task, the
    first answer of the best that differs from the worst is chosen, and that of the worst is rejected. For labelled
    answers (kto) write all: the answers of all dialogues as they were generated, labelled by success."""
    target: Target = "last_agent_turn"
    """Which answers to learn. last_agent_turn: the last one; in pairs, the last wrong one. every_agent_turn: every
    answer whose correct version or label is known, one row each. The prompt holds what was actually said, wrong answers
    included. It has no effect on best_and_worst."""


Source = Annotated[FileSource | HubSource | CustomSource | SimulationSource, Field(discriminator="type")]
"""A source, selected by its type. A string is a path, whose extension gives the type, or a Hub dataset id."""


class WeightedSource(ConfigModel):
    """One source of a mix."""

    source: Source | Name
    """Path, glob, Hub dataset id, or mapping with `type`."""
    weight: Positive | None = None
    """Sampling weight, relative to the weights of the other sources. Default: 1; with `stop: all_once` and no weight at
    any source, the number of its rows, unless the sources are streams."""
    name: Name | None = None
    """Name used in row keys and counts, without a slash. Default: the name of the file (for a glob, of its folder),
    dataset or class."""


def default_name(source: Source | str) -> str:
    """Return the name of a source that has none in the file."""
    if isinstance(source, CustomSource):
        return source.target.partition(":")[2]
    text = source if isinstance(source, str) else source.name if isinstance(source, HubSource) else source.path
    parts = [part for part in re.split(r"[/\\]+", text) if part and not re.search(r"[*?\[]", part)]
    last = parts[-1] if parts else "rows"
    return last.partition(".")[0] or last


def numbered_name(name: str, number: int) -> str:
    """Return the name of the source with this number, from 1, of those that would have the same name."""
    return name if number == 1 else f"{name}-{number}"


def mix_names(mix: Sequence[WeightedSource]) -> tuple[str, ...]:
    """Return a unique name for each source of a mix: the name in the file, or one derived from what it reads."""
    taken = {part.name for part in mix if part.name is not None}
    last_numbers: dict[str, int] = {}
    names: list[str] = []
    for part in mix:
        if part.name is not None:
            names.append(part.name)
            continue
        wanted = default_name(part.source)
        number = last_numbers.get(wanted, 0) + 1
        while (name := numbered_name(wanted, number)) in taken:
            number += 1
        last_numbers[wanted] = number
        taken.add(name)
        names.append(name)
    return tuple(names)
