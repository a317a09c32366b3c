"""Checks that rows have the columns that a configuration needs."""

from partita.data.formats import format_of
from partita.data.formats.base import NAME_COLUMNS
from partita.data.formats.csv import other_separator
from partita.data.rows import Rows
from partita_schema.common.text import nearest
from partita_schema.config import Config
from partita_schema.dialogues.common_form import COMMON_FORM_KEYS
from partita_schema.dialogues.read import has_dialogues, renamed
from partita_schema.errors import DataError
from partita_schema.sections.dialogue import DialogueConfig
from partita_schema.sections.features import DialogueInput, TextInput
from partita_schema.sections.outputs.preference import PreferenceOutput

DIALOGUES_LOOKED_AT = 100
"""Number of dialogues that are checked for answers."""


def check_columns(rows: Rows, config: Config, *, supervised: bool) -> None:
    """Raise DataError if a column is missing that prompts show or, if `supervised`, answers are learned from."""
    if config.scores_answers and not supervised:
        check_scored_columns(rows, config)
        return
    if config.dialogue_input is not None and {*COMMON_FORM_KEYS, "rejected"} <= set(rows.columns):
        return  # pairs that were read already
    if config.dialogue_input is not None:
        for output in config.output_features if supervised else ():
            for column in (output.source_column, *output.more_columns) if output.has_pairs else output.more_columns:
                written = config.data.dialogue.columns.get(column, column)
                require_column(rows, written if column not in rows.columns else column, user=f"output {output.name}")
            if output.has_pairs:
                return
        require_dialogues(rows, config.dialogue_input, options=config.data.dialogue)
        return
    needed = needed_inputs(config)
    for output in config.output_features if supervised else ():
        if output.preprocessing.missing_value_strategy == "drop_row":
            needed[output.source_column] = f"output {output.name}"
            needed |= dict.fromkeys(output.more_columns, f"output {output.name}")
        elif not output.has_pairs:
            needed |= dict.fromkeys(output.more_columns, f"output {output.name}")
    for column, user in needed.items():
        require_column(rows, column, user=user)


def check_prompt_columns(rows: Rows, config: Config) -> None:
    """Raise DataError if a column is missing that the prompts of a file show."""
    if config.dialogue_input is not None:
        require_dialogues(rows, config.dialogue_input, options=config.data.dialogue)
        return
    for column, user in needed_inputs(config).items():
        require_column(rows, column, user=user)


def check_scored_columns(rows: Rows, config: Config) -> None:
    """Raise DataError if a column is missing that a reward model reads to score answers: a pair, or a single one."""
    output = config.output_features[0]
    assert isinstance(output, PreferenceOutput)
    names = {config.data.dialogue.columns.get(name, name) for name in output.answer_columns}
    is_pair = names <= set(rows.columns)
    if config.dialogue_input is not None:
        if not is_pair:
            require_dialogues(rows, config.dialogue_input, options=config.data.dialogue)
        return
    for column, user in needed_inputs(config).items():
        require_column(rows, column, user=user)
    if not is_pair and output.scored_column not in rows.columns:
        chosen, rejected = output.answer_columns
        raise DataError(
            f"{rows.keys.names[0]} has no answers to score: write one in the column {output.scored_column!r}, or two "
            f"in {chosen!r} and {rejected!r}; its columns are {', '.join(rows.columns)}"
        )


def needed_inputs(config: Config) -> dict[str, str]:
    """Return the columns that prompts need, and what needs them."""
    inputs = {feature.name: feature for feature in config.input_features if isinstance(feature, TextInput)}
    needed = {}
    for name in config.shown_columns:
        feature = inputs.get(name)
        if feature is None:
            needed[name] = "prompt.template"
        elif feature.preprocessing.missing_value_strategy == "drop_row":
            needed[feature.source_column] = f"input {name}"
    return needed


def has_answers(rows: Rows, config: Config) -> bool:
    """Return whether every output has a column; for dialogues, whether one of the first ones ends with an answer."""
    if config.dialogue_input is None:
        return all(output.source_column in rows.columns for output in config.output_features)
    from partita_schema.rows import check_rows, row_schema

    first = rows.get(range(min(len(rows), DIALOGUES_LOOKED_AT)))
    return bool(check_rows(row_schema(config, supervised=True), first).clean)


def require_dialogues(rows: Rows, feature: DialogueInput, *, options: DialogueConfig) -> None:
    """Raise DataError if both the feature's column and the columns of the format are missing."""
    column, format_name = feature.source_column, options.format
    columns = list(renamed(dict.fromkeys(rows.columns), options.columns))
    if not has_dialogues(columns, column=column, format_name=format_name):
        for name, written in options.columns.items():
            require_column(rows, written, user=f"data.dialogue.columns.{name}")
        near = nearest(column, rows.columns)
        raise DataError(
            f"{rows.keys.names[0]} has no column {column!r}, which dialogue {feature.name} needs, and not the columns "
            f"of {'another format' if format_name == 'auto' else format_name}; its columns are "
            f"{', '.join(rows.columns)}; write column: {near[0] if near else 'NAME'} at the input"
        )


def require_column(rows: Rows, column: str, *, user: str) -> None:
    if column not in rows.columns:
        near = nearest(column, rows.columns)
        raise DataError(
            f"{rows.keys.names[0]} has no column {column!r}, which {user} needs; its columns are "
            f"{', '.join(rows.columns)}" + (f"; did you mean {near[0]!r}?" if near else table_hint(rows))
        )


def table_hint(rows: Rows) -> str:
    """Return a hint if a table was parsed with the wrong separator, or may have no header line."""
    if separator := other_separator(rows.columns):
        return f"; the separator looks like {separator}, read the file with that one"
    advice = NAME_COLUMNS.get(format_of(rows.keys.names[0]) or "")
    return f"; if its first line is a row, {advice}" if advice else ""
