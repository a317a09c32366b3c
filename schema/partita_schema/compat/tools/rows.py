"""Features and sources for the rows of the tools' datasets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from partita_schema.compat.tools.conversion import Conversion
from partita_schema.yaml.tree import Node

UNREAD_SPLIT = "all rows of a file are read; write a file with those of the split"
"""Why a split of a file has no counterpart."""
REPLY = "reply"
"""Name of the output of dialogues."""

MESSAGE_FORMATS = {
    ("role", "content"): "messages",
    ("from", "value"): "sharegpt",
    ("speaker", "text"): "turns",
    ("speaker", "utterance"): "turns",
}
"""Formats of dialogues by the keys of the role and of the text of a message."""


@dataclass(frozen=True)
class RowFormat:
    """What the rows of a dataset are."""

    kind: str
    """dialogue, prompt or document."""
    column: str = "messages"
    """Column of a dialogue or of a document."""
    form: str = "auto"
    """Format of dialogues."""
    columns: tuple[tuple[str, str], ...] = ()
    """Columns of dialogues with another name in the data than in the format: the format's name, and the data's."""
    inputs: tuple[str, ...] = ()
    """Input columns of a prompt."""
    optional: tuple[str, ...] = ()
    """Input columns that may be empty."""
    output: str = ""
    """Column of the answer to a prompt."""
    chosen: str = ""
    """Column of the better answer of a pair; empty if rows have one answer."""
    rejected: str = ""
    """Column of the worse answer of a pair."""
    label: str = ""
    """Column that says whether an answer is good; empty if there is none."""
    template: str | None = None
    """Template of a prompt; None if the values are put one after the other."""
    chat: bool = True
    """Whether the model's chat template is put around a prompt."""
    system: str | None = None
    """System message of a prompt."""
    ignored: tuple[str, ...] = ()
    """Columns that dialogues may have and that are not read."""

    @property
    def alike(self) -> tuple[object, ...]:
        """What the formats of dialogues that are read together have in common."""
        return self.columns, self.chosen, self.rejected, self.label

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The columns of the texts of a row."""
        if self.kind != "prompt":
            alpaca = ("instruction", "output") if self.form == "alpaca" else (self.column,)
            return tuple(name for _, name in self.columns) or alpaca
        return tuple(name for name in (*self.inputs, self.output) if name)

    def ignores(self, column: str) -> bool:
        """Return whether a column is not read: only Alpaca's rows have an input and a history."""
        return column in self.ignored or (column in ("input", "history") and self.form != "alpaca")


@dataclass(frozen=True)
class FoundSource:
    """Where the rows of a dataset are."""

    value: str | Mapping[str, object]
    """A value of `data.source`."""
    at: Node | None
    """The value in the file that names it."""
    weight: float | None = None


def common_format(formats: Sequence[RowFormat]) -> RowFormat | None:
    """Return the format of all datasets, or None if one configuration cannot read them all.

    Dialogues and standard Alpaca rows are read together, row by row. Columns are ignored that no dataset reads.
    """
    first = formats[0]
    if all(one == first for one in formats):
        return first
    if all(one.kind == "dialogue" and one.alike == first.alike for one in formats):
        columns = {one.column for one in formats if one.form not in ("alpaca", "prompt_completion")}
        ignored = [name for one in formats for name in one.ignored if all(other.ignores(name) for other in formats)]
        if len(columns) <= 1 or columns <= {"messages", "conversations"}:
            column = next(iter(sorted(columns, reverse=True)), "messages")
            form = first.form if all(one.form == first.form for one in formats) else "auto"
            return replace(first, column=column, form=form, ignored=tuple(dict.fromkeys(ignored)))
    return None


def why_no_common_format(formats: Sequence[RowFormat]) -> str:
    """Return why one configuration cannot read the rows of all datasets."""
    kinds = list(dict.fromkeys(one.kind for one in formats))
    columns = list(dict.fromkeys(", ".join(one.columns_read) for one in formats))
    what, found = ("kinds", kinds) if len(kinds) > 1 else ("columns", columns) if len(columns) > 1 else ("formats", [])
    listed = f" ({'; '.join(found) if what == 'columns' else ', '.join(found)})" if found else ""
    fix = "rename the columns of the others" if what == "columns" else "bring the rows into one format"
    return (
        f"the datasets have rows of different {what}{listed}, and a configuration has one list of features; convert "
        f"the file with one of them, or {fix}"
    )


def text_prompt(
    question: str, *, template: str | None = None, label: str = "", answer: str, chosen: str = "", rejected: str = ""
) -> RowFormat:
    """Return the format of texts that nothing is put around: a prompt, and a labelled answer or two answers.

    Args:
        question: Column of the prompt.
        template: Template of the prompt; None for the text as it is.
        label: Column of the label; empty for pairs.
        answer: Column of a labelled answer.
        chosen: Column of the better answer of a pair.
        rejected: Column of the worse answer of a pair.
    """
    rows = RowFormat("prompt", inputs=(question,), output=answer, label=label, template=template, chat=False)
    return rows if label else replace(rows, output=REPLY, chosen=chosen or "chosen", rejected=rejected or "rejected")


def put_features(conversion: Conversion, rows: RowFormat, *, at: Node | None = None) -> None:
    """Write the features and the prompt for the format of the rows."""
    if rows.kind == "document":
        conversion.put("output_features", [{"name": rows.column, "type": "text"}], at=at)
        return
    if rows.kind == "dialogue":
        conversion.put("input_features", [{"name": rows.column, "type": "dialogue"}], at=at)
        name = REPLY if rows.column != REPLY else "answer"
        conversion.put("output_features", [{"name": name, **answers_of(rows)}], at=at)
        if rows.form != "auto":
            conversion.put("data.dialogue.format", rows.form, at=at)
        if rows.columns:
            conversion.put("data.dialogue.columns", dict(rows.columns), at=at)
        if rows.ignored:
            conversion.put("data.dialogue.ignore_keys", list(rows.ignored), at=at)
        return
    if not rows.inputs:  # two texts that begin with the prompt
        conversion.put("output_features", [{"name": rows.output, **answers_of(rows)}], at=at)
        return
    optional = {"preprocessing": {"missing_value_strategy": "fill_with_const"}}
    inputs = [{"name": name, "type": "text"} | (optional if name in rows.optional else {}) for name in rows.inputs]
    conversion.put("input_features", inputs, at=at)
    conversion.put("output_features", [{"name": rows.output, **answers_of(rows)}], at=at)
    if rows.template is not None:
        conversion.put("prompt.template", rows.template, at=at)
    if rows.system is not None:
        conversion.put("prompt.system", rows.system, at=at)
    if not rows.chat:
        conversion.put("prompt.chat", False, at=at)


def answers_of(rows: RowFormat) -> dict[str, object]:
    """Return the type of the output, with its columns."""
    if rows.chosen:
        return {"type": "preference", "chosen": rows.chosen, "rejected": rows.rejected}
    return {"type": "text", "label": rows.label} if rows.label else {"type": "text"}


def put_sources(conversion: Conversion, sources: Sequence[FoundSource]) -> None:
    """Write one source, or several as a mix in which each row occurs once, as if their rows were shuffled together."""
    if len(sources) == 1:
        conversion.put("data.source", sources[0].value, at=sources[0].at)
        return
    parts = [{"source": one.value} | ({"weight": one.weight} if one.weight is not None else {}) for one in sources]
    conversion.put("data.mix", parts, at=sources[0].at)
    if all(one.weight is None for one in sources):
        conversion.put("data.stop", "all_once")
        if is_stream(conversion):
            conversion.note(
                "the rows of the streams alternate until the shorter ones end; write weights of data.mix that fit "
                "their sizes to spread them over all steps"
            )


def note_repeated_turns(conversion: Conversion, rows: RowFormat) -> None:
    """Note that a dialogue may become several rows, unless rows have one answer. Called after the trainer's keys."""
    one_answer = rows.chosen or rows.label or rows.form in ("prompt_completion", "segments") or without_history(rows)
    if rows.kind != "dialogue" or one_answer or conversion.has("data.dialogue.mode"):
        return
    learned = conversion.value("trainer.completion_only_loss") is False
    conversion.note(
        "if the model has no chat template, or one that rewrites earlier turns, each answer of a dialogue becomes a "
        "row with all turns before it, "
        + ("which are in the loss of each of these rows" if learned else "so that an epoch has more rows and steps")
        + " (partita preview shows them)"
    )


def without_history(rows: RowFormat) -> bool:
    """Return whether rows are Alpaca's, without earlier turns."""
    return rows.form == "alpaca" and "history" in rows.ignored


def is_stream(conversion: Conversion) -> bool:
    """Return whether the converted file streams its rows, also those of a mix."""
    mix = conversion.root.find(("data", "mix"))
    parts = mix.plain() if mix is not None else []
    sources = [part.get("source") for part in parts] if isinstance(parts, list) else []
    streams = any(isinstance(source, dict) and source.get("streaming") for source in sources)
    return conversion.has("data.source.streaming") or streams


def put_split(conversion: Conversion, validation: float, *, at: Node | None = None, written: str | None = None) -> None:
    """Write a random split without test rows.

    Args:
        conversion: The conversion.
        validation: Share of validation rows.
        at: The value in the file that it comes from.
        written: The key in the file.
    """
    conversion.put("data.split.type", "random", at=at, written=written)
    shares = [round(1 - validation, 6), validation, 0]
    conversion.put("data.split.probabilities", shares, at=at, written=written)


def convert_validation_size(conversion: Conversion, key: str) -> None:
    """Convert the share of rows that are held out; without one, or with a number of rows, all rows are trained on."""
    named, size = key in conversion.left, conversion.get(key, 0)
    if conversion.has("data.validation") and size:
        conversion.miss(key, "there is a dataset for validation")
    is_share = isinstance(size, int | float) and not isinstance(size, bool) and 0 <= size < 1
    if key in conversion.left and is_share:
        node = conversion.take(key, "data.split")
        put_split(conversion, float(size), at=node, written=conversion.name(key))
        return
    put_split(conversion, 0.0)
    if not named:
        conversion.report.defaults.append((key, "data.split", 0))
    conversion.miss(
        key,
        "a number of rows is not available, so no rows are held out (data.split.probabilities: [1, 0, 0]); write the "
        "share of validation rows there",
    )


def hub_source(
    name: str, *, subset: object = None, split: object = None, revision: object = None, streaming: bool = False
) -> str | dict[str, object]:
    """Return the value of `data.source` for a dataset on the Hub: its id, or a mapping if more is set.

    Args:
        name: Id of the dataset.
        subset: Its configuration.
        split: Its split.
        revision: Its revision.
        streaming: Whether rows are streamed.
    """
    extra = {"subset": subset, "split": split if split != "train" else None, "revision": revision}
    options: dict[str, object] = {key: value for key, value in extra.items() if value is not None}
    options |= {"streaming": True} if streaming else {}
    return {"type": "hub", "name": name, **options} if options else name


def has_unread_split(source: str | Mapping[str, object], split: object) -> bool:
    """Return whether a value of `data.source` is a file, of which a part is named: all of its rows are read."""
    kind = source if isinstance(source, str) else source["type"]
    is_file = kind != "hub" and not is_hub_id(kind)
    return is_file and split not in (None, "train")


def is_hub_id(name: object) -> bool:
    """Return whether a value of `data.source` is the id of a dataset on the Hub."""
    return isinstance(name, str) and "." not in name.rsplit("/", 1)[-1] and not name.startswith((".", "/", "~"))


def file_source(path: str, *, kind: str | None = None, streaming: bool = False) -> str | dict[str, object]:
    """Return the value of `data.source` for a file: its path, or a mapping if more is set."""
    if kind is None and not streaming:
        return path
    found = kind or next((name for name in FILE_KINDS if f".{name}" in path), "jsonl")
    return {"type": "txt" if found == "text" else found, "path": path} | ({"streaming": True} if streaming else {})


FILE_KINDS = ("jsonl", "json", "csv", "tsv", "parquet", "arrow", "txt")
"""File extensions of formats."""
