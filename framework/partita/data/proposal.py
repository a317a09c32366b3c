"""Propose features, types, labels and the task for columns, for `partita init --data`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from partita.data.columns import LABEL_NAMES, Column, Kind
from partita_schema.common.text import counted
from partita_schema.dump import scalar
from partita_schema.errors import shortened
from partita_schema.rules.features import NAMES_IN_USE
from partita_schema.sections.outputs.text import VERDICTS
from partita_schema.templates import LEARNED

FIRST_ROWS = 2000
"""Number of rows that are examined."""
OUTPUT_NAMES = (
    *("label", "labels", "class", "category", "target", "answer", "output", "response", "completion", "reply"),
    *("score", "rating", "sentiment", "intent", "team", "summary", "highlights", "translation"),
)
"""Names of columns that hold the prediction target, the likeliest first."""
DOCUMENT_NAMES = ("text", "content", "document", "body")
"""Names of columns that hold whole documents, the likeliest first."""
DOCUMENT_CHARACTERS = 200
"""Minimum mean number of characters of a text column that may hold documents although there are other columns."""
TASK_OF_KIND: Mapping[Kind, str] = {
    "category": "classify",
    "set": "tag",
    "json": "extract",
    "number": "score",
    "text": "answer",
    "tags": "entities",
}
PAIR = ("chosen", "rejected")
"""Columns of a better and a worse answer."""
PROMPT_NAMES = ("prompt", "question", "query")
"""Columns with the prompt of answers that are compared."""
ANSWER_NAMES = ("completion", "response", "answer")
"""Columns with an answer that is good or bad."""
VERDICT_NAMES = ("label", "kto_tag", "liked", "feedback")
"""Columns that say whether an answer is good."""
FORMATS_IN_COLUMNS = {
    "chosen_rejected": ("chosen", "rejected"),
    "alpaca": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
}
"""Formats of dialogues that are spread over columns, with the columns that identify them."""


@dataclass(frozen=True)
class Proposal:
    """Proposed task and features for a file of rows."""

    task: str
    """A task of partita_schema.templates.TASKS."""
    features: str
    """YAML of input_features, output_features and prompt."""
    summary: str
    """One line for the terminal."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of messages and columns that are not read as part of a dialogue."""
    warning: str = ""
    """Why a model would learn nothing from the rows; empty if there is no objection."""


MESSAGES = "messages"
"""Name of the input for dialogues that are spread over columns."""


def format_in_columns(columns: Sequence[Column]) -> str | None:
    """Return the format of dialogues that are spread over columns; None if the columns have none.

    A label for each answer, as for KTO, is a column to predict.
    """
    names = {column.name for column in columns}
    labelled = any(column.name in LABEL_NAMES for column in columns if column.kind == "category")
    return next(
        (format_name for format_name, needed in FORMATS_IN_COLUMNS.items() if names >= set(needed) and not labelled),
        None,
    )


def proposal_of(columns: Sequence[Column], *, task: str | None, complete: bool) -> Proposal | None:
    """Return features for these columns; `complete` says whether they hold all rows of the file."""
    if task in (None, *LEARNED) and (proposal := preference_proposal(columns, task=task)) is not None:
        return proposal
    if task in LEARNED:
        return None
    if task in (None, "chat") and (proposal := dialogue_proposal(columns)) is not None:
        return proposal
    document = document_of(columns, task=task)
    if document is not None:
        features = f"output_features:\n  - {{name: {scalar(document.name)}, type: text}}          # the document\n"
        unused = [column.name for column in columns if column is not document]
        rest = f"; not used: {', '.join(unused)}" if unused else ""
        return Proposal("continue", features, f"documents in {document.name} (language modelling){rest}")
    output = output_of(columns, task=task)
    if output is None:
        return None
    others = [column for column in columns if column.name != output.name]
    inputs = (
        [column for column in others if column.name == output.words]
        or [column for column in others if column.kind == "text"]
        or [column for column in others if column.kind in TASK_OF_KIND]
    )
    if not inputs:
        return None
    unused = [column.name for column in others if column not in inputs]
    task = task or TASK_OF_KIND[output.kind]
    features = "".join(
        (inputs_yaml(inputs, unused), output_yaml(output, complete=complete), prompt_yaml(inputs, output))
    )
    labels = f", {counted(len(output.labels), 'label')}" if output.kind in ("category", "set", "tags") else ""
    if output.largest_tag is not None:
        labels = f", numbers from 0 to {output.largest_tag}"
    rest = f"; not used: {', '.join(unused)}" if unused else ""
    return Proposal(
        task,
        features,
        f"input {', '.join(one.name for one in inputs)}, output {output.name} ({output.kind}{labels}){rest}",
        warning="; ".join(
            filter(None, (one_value_warning(output, complete=complete), numbers_warning(output, complete=complete)))
        ),
    )


def dialogue_column(columns: Sequence[Column]) -> str | None:
    """Return the column of dialogues in which most rows have one; one of answers that are compared comes last."""
    dialogues = [column for column in columns if column.kind == "dialogue"]
    if not dialogues:
        return None
    return max(dialogues, key=lambda column: (column.name not in PAIR, column.present)).name


def dialogue_proposal(columns: Sequence[Column]) -> Proposal | None:
    """Return the features for dialogues, in a column or spread over columns; None if there are none."""
    format_name, column = format_in_columns(columns), dialogue_column(columns)
    if format_name == "chosen_rejected" or (format_name is not None and column is None):
        read = (*system_column(columns), *FORMATS_IN_COLUMNS[format_name])
        name, what = MESSAGES, f"{', '.join(read)} (dialogue in columns)"
    elif column is not None:
        name, what = column, f"{', '.join((*system_column(columns), column))} (dialogue)"
    else:
        return None
    features = (
        f"input_features:\n  - {{name: {scalar(name)}, type: dialogue}}\n"
        "output_features:\n  - {name: reply, type: text}         # what the assistant says in the dialogue\n"
    )
    warning = "only chosen is learned; --task pairs learns from both answers"
    return Proposal(
        "chat",
        features,
        f"input {what}, output: the assistant's replies",
        warning=warning if format_name == "chosen_rejected" else "",
    )


def system_column(columns: Sequence[Column]) -> list[str]:
    """Return the name of the column with the system message of a dialogue, if there is one."""
    return [column.name for column in columns if column.name == "system" and column.kind in ("text", "category")]


def preference_proposal(columns: Sequence[Column], *, task: str | None) -> Proposal | None:
    """Return the features for pairs of answers, or for answers that are good or bad; None if there are neither."""
    by_name = {column.name: column for column in columns}
    verdict = next((by_name[name] for name in VERDICT_NAMES if name in by_name and is_verdict(by_name[name])), None)
    answer = next((by_name[name] for name in ANSWER_NAMES if name in by_name), None)
    dialogue, system = dialogue_column(columns), system_column(columns)
    unused = f"; not used: {', '.join(system)}" if system else ""
    if {*PAIR} <= set(by_name) and task in (None, "pairs"):
        output = "output_features:\n  - {name: answer, type: preference}       # columns chosen and rejected\n"
        texts = all(by_name[name].kind in ("text", "category") for name in PAIR)
        prompt = next((name for name in PROMPT_NAMES if name in by_name and by_name[name].kind == "text"), None)
        is_dialogue = bool(system) and prompt == "prompt"  # only dialogues have a system message in each row
        if texts and dialogue is None and not is_dialogue and (prompt is not None or "instruction" not in by_name):
            inputs = f"input_features:\n  - {{name: {scalar(prompt)}, type: text}}\n" if prompt is not None else ""
            what = ("their common beginning" if prompt is None else prompt) + unused
        else:
            name = dialogue if dialogue not in (None, *PAIR) else MESSAGES
            inputs, what = (
                f"input_features:\n  - {{name: {scalar(name)}, type: dialogue}}\n",
                "the dialogue before them",
            )
        return Proposal("pairs", inputs + output, f"answers chosen and rejected, prompt: {what}")
    if verdict is None or task not in (None, "feedback"):
        return None
    prompt = next((name for name in PROMPT_NAMES if name in by_name and by_name[name].kind == "text"), None)
    if prompt is not None and answer is not None and answer.kind == "text" and dialogue is None:
        inputs, name = f"input_features:\n  - {{name: {scalar(prompt)}, type: text}}\n", answer.name
        rest = unused
    elif dialogue is not None and (answer is not None or verdict.name == "kto_tag"):
        inputs = f"input_features:\n  - {{name: {scalar(dialogue)}, type: dialogue}}\n"
        prompt, name, rest = dialogue, "reply", ""
    else:
        return None
    output = (
        f"output_features:\n  - {{name: {scalar(name)}, type: text, label: {scalar(verdict.name)}}}   # good or bad\n"
    )
    summary = f"input {prompt}, output {name}, good or bad by {verdict.name}{rest}"
    return Proposal("feedback", inputs + output, summary)


def is_verdict(column: Column) -> bool:
    """Return whether the values of a column say good or bad."""
    return column.kind == "category" and all(label.lower() in VERDICTS for label in column.labels)


def document_of(columns: Sequence[Column], *, task: str | None) -> Column | None:
    """Return the column of documents for language modelling: the only text, or a long one with a usual name next to
    columns that are no answer."""
    texts = [column for column in columns if column.kind == "text"]
    named = [column for name in DOCUMENT_NAMES for column in texts if column.name.lower() == name]
    if task == "continue":
        return next(iter([*named, *sorted(texts, key=lambda one: -one.characters)]), None)
    others = [column for column in columns if column.kind in TASK_OF_KIND or column.kind in ("dialogue", "tags")]
    if task is not None or not texts:
        return None
    if len(others) == 1:
        return texts[0]
    is_alone = not any(column.name.lower() in OUTPUT_NAMES or column.kind == "category" for column in others)
    long = [column for column in named if column.characters >= DOCUMENT_CHARACTERS]
    return long[0] if long and is_alone else None


def one_value_warning(output: Column, *, complete: bool) -> str:
    if output.only_value is None:
        return ""
    rows = examined(complete)
    return (
        f"the output {output.name} is {shortened(output.only_value)!r} in {rows}, so there is nothing to learn; "
        "name another output column, or use rows with different answers"
    )


def numbers_warning(output: Column, *, complete: bool) -> str:
    """Return what is missing in the file if tags are numbers; empty if they are text."""
    if output.largest_tag is None:
        return ""
    return (
        f"the tags in {output.name} are numbers, from 0 to {output.largest_tag} in {examined(complete)}; before you "
        "train, write their names in the order of the numbers, as decoder: {labels: [...]}"
    )


def examined(complete: bool) -> str:
    """Return which rows were examined: all rows, or the first ones."""
    return "all rows" if complete else f"the first {FIRST_ROWS:,} rows"


def output_of(columns: Sequence[Column], *, task: str | None) -> Column | None:
    """Return the column to predict: by name, else by kind, else the last one."""
    usable = [column for column in columns if column.kind in TASK_OF_KIND]
    if task == "score":
        usable = [replace(column, kind="number") for column in usable if column.bounds]
    elif task == "extract":
        lists = [
            column
            for column in usable
            if (column.kind == "set" and column.separator is None) or column.largest_tag is not None
        ]
        usable = [
            replace(column, kind="json", largest_tag=None)
            for column in usable
            if column.kind == "json" or column in lists
        ]
    elif task in ("answer", "chat"):
        usable = [replace(column, kind="text", largest_tag=None) for column in usable]
    elif task is not None:
        usable = [column for column in usable if TASK_OF_KIND[column.kind] == task]
    if not usable or len(columns) < 2:
        return None
    named = [column for name in OUTPUT_NAMES for column in usable if column.name.lower() == name]
    numbers = [column for column in usable if column.largest_tag is not None]
    written = [column for column in usable if column not in numbers]
    by_kind = [
        column
        for kind in ("tags", "category", "set", "number", "json")
        for column in (*reversed(written), *reversed(numbers))
        if column.kind == kind
    ]
    return (named or by_kind or usable[-1:])[0]


def inputs_yaml(inputs: Sequence[Column], unused: Sequence[str]) -> str:
    lines = [
        f"  - {{name: {scalar(one.name)}, type: text"
        + (
            ", preprocessing: {missing_value_strategy: fill_with_const}}    # some rows have none"
            if one.missing
            else "}"
        )
        for one in inputs
    ]
    note = [f"  # not used: {', '.join(map(scalar, unused))}"] if unused else []
    return "\n".join(["input_features:", *lines, *note, ""])


def output_yaml(output: Column, *, complete: bool) -> str:
    lines = ["output_features:", f"  - name: {scalar(output.name)}", f"    type: {output.kind}"]
    if output.name in NAMES_IN_USE:
        lines[1] = f"  - name: {output.name}_value     # the name {output.name} has another meaning in results"
        lines.append(f"    column: {output.name}")
    if output.kind == "set" and output.separator not in (None, ","):
        lines.append(f"    preprocessing: {{separator: {scalar(output.separator)}}}")
    elif output.kind == "set" and output.missing:
        lines.append("    # preprocessing: {missing_value_strategy: fill_with_const}   # if no value means no label")
    if output.largest_tag is not None:
        numbers = f"0 to {output.largest_tag} in {examined(complete)}"
        lines.append(f"    # decoder: {{labels: [O, B-PER, I-PER]}}   # write the names of the numbers, {numbers}")
    elif output.kind in ("category", "set", "tags"):
        labels = f"labels: [{', '.join(map(scalar, output.labels))}]"
        if complete and len(output.labels) > 1:
            lines += ["    decoder:", f"      {labels}"]
        else:  # other labels may follow later in the file; without a list, those of the training rows are used
            lines += [f"    # decoder: {{{labels}}}   # labels of {examined(complete)}"]
    if output.kind == "number" and output.bounds:
        low, high = output.bounds
        lines += [f"    # decoder: {{minimum: {low:g}, maximum: {high:g}}}   # as in the first rows"]
    if output.kind == "json" and output.example:
        properties = ", ".join(f"{scalar(key)}: {{type: {json_type(value)}}}" for key, value in output.example.items())
        lines += ["    decoder:", "      json_schema:", "        type: object", f"        properties: {{{properties}}}"]
    return "\n".join([*lines, ""])


def prompt_yaml(inputs: Sequence[Column], output: Column) -> str:
    """Return a first version of the task in words, for the user to improve; empty for tags, which need none."""
    if output.kind == "tags":
        return ""
    sources = " and the ".join(one.name for one in inputs)
    if output.kind == "category":
        choice = f" as {', '.join(output.labels[:-1])} or {output.labels[-1]}" if 1 < len(output.labels) <= 10 else ""
        task = f"Classify the {sources}{choice}."
    elif output.kind == "set":
        task = f"Write those of the labels {', '.join(output.labels)} that apply to the {sources}, as a JSON array."
    elif output.kind == "number":
        task = f"Write the {output.name} of the {sources} as a number."
    elif output.kind == "json":
        task = f"Write the {output.name} in the {sources} as JSON."
    elif len(inputs) == 1 and output.name.lower() in ("summary", "highlights"):
        task = f"Summarize the {sources}."
    elif len(inputs) == 1 and inputs[0].name.lower() in ("question", "query") and output.name.lower() == "answer":
        task = "Answer the question."
    else:
        task = f"Write the {output.name} for the {sources}."
    return f"prompt:\n  task: {scalar(task)}\n"


def json_type(value: Any) -> str:
    """Return the JSON schema name of a value's type."""
    names = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))
    return next((name for kind, name in names if isinstance(value, kind)), "'null'")
