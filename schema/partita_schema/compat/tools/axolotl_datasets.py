"""Conversion of the datasets of axolotl's files."""

import re
from dataclasses import replace

from partita_schema.compat.tools.axolotl_preferences import preference_rows
from partita_schema.compat.tools.conversion import By, Conversion, Missing, Report, Table, Unneeded, names_of
from partita_schema.compat.tools.rows import (
    MESSAGE_FORMATS,
    UNREAD_SPLIT,
    FoundSource,
    RowFormat,
    file_source,
    has_unread_split,
    hub_source,
)
from partita_schema.dialogues.messages import SAME_ROLES
from partita_schema.yaml.tree import Node

ALPACA_TEXT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{{{instruction}}}\n\n### Input:\n"
    "{{{input}}}\n\n### Response:\n"
)
"""The prompt of Alpaca (Taori et al. 2023), with the columns to fill in."""

COLUMNS = {
    "alpaca": ("instruction", "input", "output"),
    "alpaca_w_system": ("instruction", "input", "output"),
    "gpteacher": ("instruction", "input", "response"),
    "context_qa": ("question", "article", "answer"),
    "jeopardy": ("question", "category", "answer"),
    "oasst": ("INSTRUCTION", None, "RESPONSE"),
    "summarizetldr": ("article", None, "summary"),
    "alpaca_qa": ("question", None, "answer"),
    "camel_ai": ("message_1", None, "message_2"),
}
"""Columns of an instruction, its input and the answer, by type of dataset. What follows a dot or colon in the type
chooses the wording of the prompt."""

ALPACA_WORDING = ("alpaca", "alpaca_w_system", "gpteacher")
"""Types whose prompt has the wording of Alpaca."""

DIALOGUES = ("chat_template", "sharegpt", "chat_template.default", "llama3")
DOCUMENTS = ("completion", "pretrain")

TEMPLATE = Missing("the chat template of base_model's tokenizer is used; save another one with the tokenizer")
LOSS = Missing("all answers of a dialogue are in the loss, with the token that ends a turn")

TABLE: Table = {
    "path": By("data.source"),
    "data_files": By("data.source"),
    "name": By("data.source: {type: hub, subset: ...}"),
    "split": By("data.source: {type: hub, split: ...}"),
    "revision": By("data.source: {type: hub, revision: ...}"),
    "ds_type": By("data.source: {type: ...}"),
    "type": By("the features"),
    "field": By("output_features[0].name"),
    "text_column": By("output_features[0].name"),
    "field_messages": By("input_features[0].name"),
    "message_property_mappings": By("data.dialogue.format"),
    "message_field_role": By("data.dialogue.format"),
    "message_field_content": By("data.dialogue.format"),
    "roles": By("nothing: the usual names of roles are known"),
    "roles_to_train": By("nothing: answers of the assistant are in the loss"),
    "train_on_eos": By("nothing: the token that ends a turn is in the loss"),
    "trust_remote_code": Unneeded("datasets run no code"),
    "chat_template": By("nothing: the chat template of the model"),
    "chat_template_jinja": TEMPLATE,
    "conversation": TEMPLATE,
    "field_system": By("data.dialogue.columns: {system: ...}"),
    "field_human": Missing("messages have the keys role and content, from and value, or speaker and text"),
    "field_model": Missing("messages have the keys role and content, from and value, or speaker and text"),
    "field_tools": By("data.dialogue.columns: {tools: ...}"),
    "field_chosen": By("output_features[0].chosen"),
    "field_rejected": By("output_features[0].rejected"),
    "field_thinking": By("nothing: the keys reasoning_content, thinking and reasoning are read"),
    "template_thinking_key": Unneeded("the reasoning is written as the chat template does"),
    "split_thinking": Missing("reasoning is a key of the message, reasoning_content; move it there"),
    "message_field_training": LOSS,
    "message_field_training_detail": LOSS,
    "drop_system_message": Missing("system messages are part of the prompt"),
    "shards": Missing("write preprocessing.sample_ratio for a part of the rows"),
    "shards_idx": Missing("write preprocessing.sample_ratio for a part of the rows"),
    "preprocess_shards": Unneeded("rows are tokenized as they are needed"),
    "skip": Missing("rows are read from the first one"),
    "input_transform": Missing("columns are read as they are"),
    "input_format": Missing("columns are read as they are"),
    "storage_options": Missing("set the options of fsspec in the environment"),
    "logprobs_field": Missing("answers are texts"),
    "temperature": Missing("answers are texts"),
}
"""Keys of a dataset in axolotl's files."""


def convert_dataset(
    conversion: Conversion, node: Node, *, prefix: str, streaming: bool, rl: str = ""
) -> tuple[FoundSource, RowFormat]:
    """Return the source and the format of a dataset.

    Args:
        conversion: The conversion of the file.
        node: The dataset: a mapping, or a name.
        prefix: Its path in the file.
        streaming: Whether it is read as a stream, as a dataset for pretraining.
        rl: How preferences are trained on; empty without.

    Raises:
        ConfigError: Rows of its type cannot be read.
    """
    named = not isinstance(node.value, dict)
    mapping = Node({"path": node}, node.position, node.key_position) if named else node
    inner = conversion.within(mapping, table=TABLE, prefix=prefix)
    if named:
        inner.report = Report(notes=conversion.report.notes)  # the file has no key for its path
    rows = format_of(inner, streaming=streaming, rl=rl)
    source = FoundSource(source_of(inner, streaming=streaming), node)
    if has_unread_split(source.value, inner.get("split")):
        inner.miss("split", UNREAD_SPLIT)
    elif "split" in inner.left:
        inner.take("split", "data.source")
    inner.apply_table()
    return source, rows


def source_of(inner: Conversion, *, streaming: bool) -> str | dict[str, object]:
    """Return the value of `data.source` of a dataset."""
    path = str(inner.get("path", ""))
    files, kind, split = inner.get("data_files"), inner.get("ds_type"), inner.get("split")
    for key in ("path", "data_files", "ds_type"):
        if key in inner.left:
            inner.take(key, "data.source")
    names = files if isinstance(files, list) else [files] if files else []
    if len(names) > 1:
        inner.note("of several data_files the first is used; write a glob for all of them")
    for text in (path, *map(str, names[:1])):
        local = inner.local(text)
        if local is not None and re.search(r"\.\w+$", local):
            return file_source(local, kind=None if kind in (None, "json") else str(kind), streaming=streaming)
    if names and path in ("json", "csv", "parquet", "text", "arrow", ""):
        return file_source(str(names[0]), kind=path or None, streaming=streaming)
    if re.search(r"\.(jsonl?|csv|tsv|parquet|arrow|txt)(\.gz|\.zst|\.bz2|\.xz)?$", path):
        return file_source(path, streaming=streaming)
    if names:
        inner.note(f"data_files of {path} are not chosen; write data.source with the file")
    subset, revision = inner.get("name"), inner.get("revision")
    for key in ("name", "revision"):
        if key in inner.left:
            inner.take(key, "data.source")
    return hub_source(inner.local(path) or path, subset=subset, split=split, revision=revision, streaming=streaming)


def format_of(inner: Conversion, *, streaming: bool, rl: str = "") -> RowFormat:
    """Return the format of the rows from the type of the dataset, and convert the keys that describe it."""
    kind = inner.get("type", "pretrain" if streaming else None)
    if rl:
        return compared_rows(inner, kind, rl=rl)
    if isinstance(kind, dict):
        return custom_prompt(inner, kind)
    name = re.split(r"[.:]", str(kind))[0]
    if name in DIALOGUES or (kind is None and "field_messages" in inner.left):
        return dialogue_of(inner, form="sharegpt" if name == "sharegpt" else None)
    if name == "input_output":
        inner.take("type", "data.dialogue.format")
        return RowFormat("dialogue", column="segments", form="segments")
    if name in DOCUMENTS:
        column = inner.get("field", inner.get("text_column", "text"))
        for key in ("type", "field", "text_column"):
            if key in inner.left:
                inner.take(key, "output_features")
        return RowFormat("document", column=str(column))
    if name in COLUMNS:
        inner.take("type", "prompt.template")
        return instruction_of(inner, name, chat=str(kind))
    raise refusal(inner, kind)


def compared_rows(inner: Conversion, kind: object, *, rl: str) -> RowFormat:
    """Return the format of rows to compare. Raise ConfigError if it is not known."""
    rows = preference_rows(inner, kind, rl=rl)
    if rows is None:
        message = f"rows of type {kind} are not known for rl: {rl}; write a mapping with the names of their columns"
        known = "field_prompt, field_completion and field_label" if rl == "kto" else "field_prompt, field_chosen and "
        known += "" if rl == "kto" else "field_rejected"
        raise inner.refusal("type" if "type" in inner.left else "path", f"{message}, {known}")
    if not str(kind).startswith("chat_template"):
        return rows
    dialogue = dialogue_of(inner, form=None)
    return replace(rows, form=dialogue.form if rows.form != "auto" else "auto", columns=dialogue.columns)


def refusal(inner: Conversion, kind: object) -> Exception:
    """Return the error for a dataset whose rows cannot be read."""
    known = ", ".join([*COLUMNS, *DIALOGUES[:2], "input_output", *DOCUMENTS])
    if "type" not in inner.left:
        message = "the dataset has no type, so it holds tokens, and rows are texts here; convert it to texts first"
        return inner.refusal("path", message)
    message = f"the columns of type {kind} are not known; write a mapping with field_instruction and field_output"
    return inner.refusal("type", f"{message}, or one of {known}")


def dialogue_of(inner: Conversion, *, form: str | None) -> RowFormat:
    """Return the format of a dataset of dialogues."""
    mapping = inner.get("message_property_mappings")
    mapping = mapping if isinstance(mapping, dict) else {}
    role = mapping.get("role", inner.get("message_field_role"))
    content = mapping.get("content", inner.get("message_field_content"))
    if (role, content) != (None, None):
        form = MESSAGE_FORMATS.get((str(role), str(content)))
    if (role, content) != (None, None) and form is None:
        key = "message_property_mappings" if mapping else "message_field_role"
        known = "role and content, from and value, or speaker and text"
        key = key if key in inner.left else "message_field_content"
        raise inner.refusal(key, f"messages with the keys {role} and {content} cannot be read; rename them to {known}")
    column = str(inner.get("field_messages", "conversations" if form == "sharegpt" else "messages"))
    for key in ("type", "field_messages"):
        if key in inner.left:
            inner.take(key, "input_features")
    for key in ("message_property_mappings", "message_field_role", "message_field_content"):
        if key in inner.left:
            inner.take(key, "data.dialogue.format")
    if "roles" in inner.left and (others := other_roles(inner.get("roles"))):
        raise inner.refusal("roles", f"{', '.join(others)} would be another role here; rename the roles in the data")
    convert_roles(inner)
    return RowFormat("dialogue", column=column, form=form or "auto", columns=named_columns(inner))


def named_columns(inner: Conversion) -> tuple[tuple[str, str], ...]:
    """Convert the names of the columns with a system message and with tools, and return those that are other ones."""
    columns: list[tuple[str, str]] = []
    for key, name in (("field_system", "system"), ("field_tools", "tools")):
        written = inner.get(key)
        if written in (None, name):
            inner.drop(key, Unneeded("it is read under this name"))
        else:
            inner.take(key, "data.dialogue.columns")
            columns.append((name, str(written)))
    return tuple(columns)


REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which its reasoning is read."""


def convert_roles(inner: Conversion) -> None:
    """Drop the keys for turns in the loss and for reasoning if their values are partita's behaviour."""
    if inner.get("field_thinking") not in REASONING:
        inner.miss("field_thinking", f"{inner.get('field_thinking')} is not read; rename it to {REASONING[0]}")
    inner.drop("field_thinking", Unneeded("it is read under this name"))
    known = {"assistant", *(name for name, role in SAME_ROLES.items() if role == "assistant")}
    trained = inner.get("roles_to_train")
    if trained is not None and not set(names_of(trained)) <= known:
        inner.drop("roles_to_train", LOSS)
    inner.drop("roles_to_train", Unneeded("answers of the assistant are in the loss"))
    if inner.get("train_on_eos") not in (None, "turn"):
        inner.drop("train_on_eos", LOSS)
    inner.drop("train_on_eos", Unneeded("the token that ends a turn is in the loss"))
    if inner.get("chat_template") not in (None, "tokenizer_default"):
        inner.drop("chat_template", TEMPLATE)
    inner.drop("chat_template", Unneeded("it is that of the model"))
    inner.drop("roles", Unneeded("the usual names of roles are known"))


def other_roles(roles: object) -> list[str]:
    """Return the names of roles that `roles` of a dataset gives another meaning than they have here."""
    if not isinstance(roles, dict):
        return [str(roles)]
    return [
        name
        for role, names in roles.items()
        for name in names_of(names)
        if SAME_ROLES.get(name.lower(), name.lower()) != SAME_ROLES.get(str(role).lower(), str(role).lower())
    ]


def instruction_of(inner: Conversion, name: str, *, chat: str) -> RowFormat:
    """Return the format of a dataset with columns for an instruction, an input and an answer."""
    instruction, extra, answer = COLUMNS[name]
    assert instruction is not None
    assert answer is not None
    if name == "alpaca_w_system":
        inner.note("the column system of alpaca_w_system is not read; write it into the instruction of each row")
    if name not in ALPACA_WORDING or chat not in ("alpaca", name):
        inner.note(f"axolotl has another wording of the prompt for {chat}; change prompt.template if it matters")
    if extra is None:
        return RowFormat("prompt", inputs=(instruction,), output=answer, template=f"{{{instruction}}}\n\n", chat=False)
    inner.note(
        "rows without an input have a shorter prompt in axolotl; here all rows have the same one, with the input empty"
    )
    return RowFormat(
        "prompt",
        inputs=(instruction, extra),
        optional=(extra,),
        output=answer,
        template=ALPACA_TEXT.replace("{{{instruction}}}", f"{{{instruction}}}").replace("{{{input}}}", f"{{{extra}}}"),
        chat=False,
    )


def custom_prompt(inner: Conversion, kind: dict[str, object]) -> RowFormat:
    """Return the format of a dataset whose type is a mapping with columns and the wording of the prompt."""
    inner.take("type", "prompt.template")
    instruction = str(kind.get("field_instruction") or "instruction")
    extra = kind.get("field_input")
    answer = str(kind.get("field_output") or "output")
    wording = str(kind.get("format") or ("{instruction} {input}" if extra else "{instruction}"))
    inputs = [instruction, *([str(extra)] if extra and "{input}" in wording else [])]
    for part, column in (("{instruction}", instruction), ("{input}", str(extra or ""))):
        wording = wording.replace(part, f"\0{column}\0" if column else "")
    wording = wording.replace("{", "{{").replace("}", "}}")
    wording = re.sub("\0([^\0]*)\0", r"{\1}", wording)
    system = kind.get("system_prompt") or None
    if system is not None and kind.get("system_format"):
        inner.note("system_format is not used; the system message is put before the prompt as it is")
    if kind.get("no_input_format") and len(inputs) > 1:
        inner.note("no_input_format is not used; rows without an input have the prompt of format")
    if kind.get("field_system"):
        inner.note(f"the column {kind['field_system']} is not read as a system message; write prompt.system")
    return RowFormat(
        "prompt",
        inputs=tuple(inputs),
        optional=tuple(inputs[1:]),
        output=answer,
        template=wording,
        chat=False,
        system=str(system) if system is not None else None,
    )
