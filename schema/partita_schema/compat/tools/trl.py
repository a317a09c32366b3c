"""Conversion of TRL's files for `trl sft --config FILE`: ScriptArguments, ModelConfig and SFTConfig; also for DPO, KTO,
ORPO and SimPO."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita_schema.compat.tools.conversion import Conversion, Unneeded, names_of
from partita_schema.compat.tools.rows import (
    UNREAD_SPLIT,
    FoundSource,
    RowFormat,
    convert_validation_size,
    file_source,
    has_unread_split,
    hub_source,
    is_hub_id,
    is_stream,
    note_repeated_turns,
    put_features,
    put_sources,
    put_split,
)
from partita_schema.compat.tools.training_arguments import (
    SHARDING_KEYS,
    convert_attention,
    convert_base_model,
    convert_packed_attention,
    convert_sharding,
    convert_training,
    write_default_length,
    write_training_defaults,
)
from partita_schema.compat.tools.trl_keys import OTHER_TRAINERS
from partita_schema.compat.tools.trl_preferences import (
    WITHOUT_TEMPLATE,
    convert_dropout,
    convert_preferences,
    losses_of,
    method_of,
    row_format_of,
    unfit_loss,
)

SFT_LOSSES = ("nll", "chunked_nll")


def convert_trl(conversion: Conversion) -> None:
    """Convert a file for `trl sft`, `dpo` or `kto`, or for ORPO or SimPO.

    Raises:
        ConfigError: The file is for another trainer of TRL.
    """
    method = trainer_of(conversion)
    convert_base_model(conversion)
    convert_attention(conversion)
    if method:
        convert_dropout(conversion)
    convert_peft(conversion)
    rows = convert_rows(conversion, method)
    convert_validation(conversion)
    convert_lengths(conversion, rows)
    if not method:
        convert_loss(conversion, rows)
        note_repeated_turns(conversion, rows)
    convert_training(conversion, precision="bf16", logging_steps=10)
    if method:
        convert_preferences(conversion, method)
    processes = conversion.get("num_processes")
    if isinstance(processes, int) and processes > 1:
        conversion.move("num_processes", "backend", {"type": "torchrun", "processes": processes})
    conversion.drop("num_processes", Unneeded("there is one process"))
    conversion.apply_table(later=SHARDING_KEYS)
    rate = 1e-6 if method else 2e-5
    write_training_defaults(conversion, learning_rate=rate, checkpointing_key="gradient_checkpointing")
    convert_packed_attention(conversion)
    convert_sharding(conversion)


def trainer_of(conversion: Conversion) -> str:
    """Return dpo, kto or simpo if the file trains on preferences; empty for supervised training.

    Raises:
        ConfigError: It trains in a way that is not available.
    """
    foreign = next((key for key in OTHER_TRAINERS if key in conversion.left), None)
    entries, _ = entries_of(conversion)
    method = method_of(conversion, first_row(conversion, entries[0]) if entries else None)
    if foreign is None and not method and not set(losses_of(conversion)) <= {*SFT_LOSSES, "dft"}:
        foreign = "loss_type"
    if foreign is not None:
        message = (
            "this key is of a trainer that is not converted (trl grpo, reward, ...); files of trl sft, dpo and kto are,"
            " and those of ORPO and SimPO"
        )
        raise conversion.refusal(foreign, message)
    if why := unfit_loss(conversion, method):
        raise conversion.refusal("loss_type" if "loss_type" in conversion.left else "cpo_alpha", why)
    return method


def convert_peft(conversion: Conversion) -> None:
    """Convert the adapter and the quantization."""
    if not conversion.is_on("use_peft"):
        conversion.drop("use_peft", Unneeded("it is off"))
        for key in [key for key in conversion.left if key.startswith("lora_") or key in ("use_dora", "use_rslora")]:
            conversion.drop(key, Unneeded("use_peft is not set"))
    else:
        conversion.move("use_peft", "adapter.type", "lora")
        convert_targets(conversion)
        conversion.default("lora_r", "adapter.r", 16)
        conversion.default("lora_alpha", "adapter.alpha", 32)
        if not conversion.has("adapter.dropout"):
            conversion.default("lora_dropout", "adapter.dropout", 0.05)
    for key, bits in (("load_in_4bit", 4), ("load_in_8bit", 8)):
        if conversion.is_on(key):
            conversion.move(key, "quantization.bits", bits)
        else:
            conversion.drop(key, Unneeded("it is off"))
    bits_node = conversion.root.find(("quantization", "bits"))
    if bits_node is not None and bits_node.value == 4:
        conversion.move("bnb_4bit_quant_type", "quantization.bnb_4bit_quant_type")
        conversion.move("use_bnb_nested_quant", "quantization.bnb_4bit_use_double_quant")
        conversion.default("use_bnb_nested_quant", "quantization.bnb_4bit_use_double_quant", False)
    for key in ("bnb_4bit_quant_type", "use_bnb_nested_quant"):
        conversion.drop(key, Unneeded("there is no quantization to 4 bits"))


def convert_targets(conversion: Conversion) -> None:
    modules = conversion.get("lora_target_modules")
    if modules is None:
        conversion.note(
            "without lora_target_modules, TRL adapts the modules that peft chooses for the architecture; here all "
            "linear layers are adapted"
        )
        return
    names = names_of(modules)
    conversion.move("lora_target_modules", "adapter.target_modules", "all-linear" if "all-linear" in names else names)


def convert_rows(conversion: Conversion, method: str) -> RowFormat:
    """Convert the sources and the features, and return the format of the rows.

    Args:
        conversion: The conversion.
        method: How preferences are trained on; empty without.
    """
    entries, key = entries_of(conversion)
    sources = [source_of(conversion, entry) for entry in entries]
    row = first_row(conversion, entries[0]) if entries else None
    node = conversion.left.get(key)
    rows = row_format_of(conversion, method, row) if method else format_of(conversion, row, named=bool(entries))
    if entries and node is not None:
        put_sources(conversion, [FoundSource(source, node) for source in sources])
        conversion.take(key, "data.source" if len(sources) == 1 else "data.mix")
    else:
        conversion.note("the file names no dataset; write data.source, or train with --dataset")
    if any(has_unread_split(source, entry.get("split")) for source, entry in zip(sources, entries, strict=True)):
        if "dataset_train_split" in conversion.left:
            conversion.miss("dataset_train_split", UNREAD_SPLIT)
        else:
            conversion.note(f"a dataset has a split: {UNREAD_SPLIT}")
    for name, to in (
        ("dataset_config", "subset"),
        ("dataset_train_split", "split"),
        ("dataset_streaming", "streaming"),
    ):
        if name in conversion.left and entries:
            conversion.take(name, f"data.source: {{{to}: ...}}")
    if "streaming" in conversion.left:
        conversion.take("streaming", "data.mix[].source: {streaming: true}")
    put_features(conversion, rows, at=node)
    return rows


def entries_of(conversion: Conversion) -> tuple[list[dict[str, Any]], str]:
    """Return the datasets of the file as mappings, and the key that names them."""
    listed = conversion.get("datasets")
    if isinstance(listed, list):
        conversion.drop("dataset_name", Unneeded("datasets is set"))
        entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in listed]
        return [{"streaming": conversion.is_on("streaming")} | entry for entry in entries], "datasets"
    name = conversion.get("dataset_name")
    if name is None:
        return [], "dataset_name"
    entry = {
        "path": name,
        "name": conversion.get("dataset_config"),
        "split": conversion.get("dataset_train_split", "train"),
        "streaming": conversion.is_on("dataset_streaming"),
    }
    return [entry], "dataset_name"


def source_of(conversion: Conversion, entry: dict[str, Any]) -> str | dict[str, object]:
    """Return the value of `data.source` of a dataset."""
    path, streaming = str(entry.get("path", "")), bool(entry.get("streaming"))
    files = entry.get("data_files")
    names = files if isinstance(files, list) else [files] if isinstance(files, str) else []
    if entry.get("columns"):
        conversion.note("columns of a dataset are not chosen: columns that no feature names are not read")
    if files is not None and (not names or len(names) > 1):
        conversion.note("of several data_files the first is used; write a glob for all of them")
    if isinstance(files, dict) and files:
        names = [str(next(iter(files.values())))]
    if names and path in ("json", "csv", "parquet", "text", "arrow"):
        return file_source(conversion.local(str(names[0])) or str(names[0]), kind=path, streaming=streaming)
    local = conversion.local(path)
    if local is not None and Path(local).suffix in (".jsonl", ".json", ".csv", ".parquet"):
        return file_source(local, streaming=streaming)
    if names or entry.get("data_dir"):
        conversion.note(f"data_files and data_dir of {path} are not chosen; write data.source with the file")
    return hub_source(local or path, subset=entry.get("name"), split=entry.get("split"), streaming=streaming)


def first_row(conversion: Conversion, entry: dict[str, Any]) -> dict[str, Any] | None:
    """Return the first row of a local JSON lines or CSV file; None if it is unknown."""
    files = entry.get("data_files")
    text = str(files[0] if isinstance(files, list) and files else files or entry.get("path", ""))
    path = next((base / text for base in (Path(), conversion.folder) if (base / text).is_file()), None)
    if path is None:
        return None
    try:
        with path.open(encoding="utf-8-sig") as file:
            if path.suffix == ".csv":
                return dict.fromkeys(next(csv.reader(file), []), "")
            row = json.loads(next(file, ""))
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) else None


def format_of(conversion: Conversion, row: Mapping[str, Any] | None, *, named: bool) -> RowFormat:
    """Return the format of the rows from the first one or from the keys of the file; TRL looks at the columns."""
    field = str(conversion.get("dataset_text_field", "text"))
    if row is not None:
        if "messages" in row or "conversations" in row:
            conversion.drop("dataset_text_field", Unneeded("rows are dialogues"))
            return RowFormat("dialogue", column="messages" if "messages" in row else "conversations")
        if {"prompt", "completion"} <= set(row):
            conversion.drop("dataset_text_field", Unneeded("rows have a prompt and a completion"))
            if isinstance(row["completion"], str):
                return RowFormat("prompt", inputs=("prompt",), output="completion", chat=False)
            return RowFormat("dialogue", column="messages", form="prompt_completion")
        if field in row:
            return document(conversion, field)
    if "dataset_text_field" in conversion.left:
        return document(conversion, field)
    if conversion.is_on("completion_only_loss"):
        conversion.note(
            f"the columns of the dataset are unknown: prompts and completions become messages; {WITHOUT_TEMPLATE}"
        )
        return RowFormat("dialogue", column="messages", form="prompt_completion")
    if named and not conversion.is_on("assistant_only_loss"):
        conversion.note(
            "the columns of the dataset are unknown: the file is for dialogues, or prompts with completions, which "
            f"become messages; {WITHOUT_TEMPLATE}, and for a column of plain text write dataset_text_field into the "
            "original and convert it again"
        )
    return RowFormat("dialogue", column="messages")


def document(conversion: Conversion, field: str) -> RowFormat:
    if "dataset_text_field" in conversion.left:
        conversion.take("dataset_text_field", "output_features[0].name")
    return RowFormat("document", column=field)


def convert_validation(conversion: Conversion) -> None:
    """Convert what is evaluated on: a split of the dataset on the Hub, a share of the rows, or nothing."""
    strategies = [conversion.get(key) for key in ("eval_strategy", "evaluation_strategy")]
    evaluates = any(strategy not in (None, "no", False) for strategy in strategies)
    source = conversion.root.find(("data", "source"))
    name = source.plain() if source is not None else None
    hub = name if isinstance(name, dict) and name.get("type") == "hub" else None
    streaming = is_stream(conversion)
    if "test_split_size" in conversion.left and not streaming:
        convert_validation_size(conversion, "test_split_size")
        return
    if evaluates and name is not None and (hub or is_hub_id(name)):
        test = conversion.get("dataset_test_split", "test")
        base = dict(hub) if hub else {"type": "hub", "name": name}
        base.pop("streaming", None)
        conversion.put("data.validation", base | {"split": test}, at=conversion.left.get("dataset_test_split"))
        if "dataset_test_split" in conversion.left:
            conversion.take("dataset_test_split", "data.validation")
        else:
            conversion.report.defaults.append(("dataset_test_split", "data.validation", "test"))
    conversion.drop("dataset_test_split", Unneeded("nothing is evaluated, or the dataset has no splits"))
    conversion.drop("test_split_size", Unneeded("a stream is not divided"))
    if not streaming:
        put_split(conversion, 0.0)
        conversion.report.defaults.append(("test_split_size", "data.split", 0))


def convert_lengths(conversion: Conversion, rows: RowFormat) -> None:
    """Convert the maximum length, and whether rows are packed or documents joined."""
    key = "max_seq_length" if "max_seq_length" in conversion.left else "max_length"
    packing = conversion.is_on("packing")
    wrapped = packing and conversion.get("packing_strategy") == "wrapped"
    chunks = rows.kind == "document" and packing
    path = "data.batching.context_length" if chunks else "preprocessing.global_max_sequence_length"
    if chunks:
        conversion.put("data.batching.type", "chunk")
        if not wrapped:
            conversion.put("data.batching.isolate_documents", True)
    conversion.move(key, path)
    if not chunks and conversion.is_empty("max_length"):
        conversion.note("max_length is null: rows are cut only at the context length of the model, as here")
    else:
        write_default_length(conversion, key="max_length", path=path, length=1024, tool="TRL")
    if packing:
        conversion.move("packing", "data.batching.type", "chunk" if chunks else "pack")
        conversion.drop("group_by_length", Unneeded("rows are packed"))
        if wrapped and not chunks:
            conversion.miss("packing_strategy", "rows are packed whole; a row is not cut between two sequences")
        elif "packing_strategy" in conversion.left:
            conversion.take("packing_strategy", "data.batching.type")
    conversion.drop("packing_strategy", Unneeded("rows are not packed"))
    if conversion.get("truncation_mode") == "keep_end":
        conversion.miss("truncation_mode", "the end of long rows is cut, not the beginning")
    conversion.drop("truncation_mode", Unneeded("the end of long rows is cut"))


def convert_loss(conversion: Conversion, rows: RowFormat) -> None:
    """Convert which tokens are in the loss."""
    if conversion.get("loss_type") in SFT_LOSSES:
        conversion.drop("loss_type", Unneeded("the loss is the cross-entropy"))
    conversion.miss("loss_type", "the loss is the cross-entropy of the answers")
    if rows.kind == "document":
        for key in ("completion_only_loss", "assistant_only_loss"):
            conversion.drop(key, Unneeded("all of a document is in the loss"))
        return
    if conversion.is_on("assistant_only_loss"):
        conversion.move("assistant_only_loss", "trainer.completion_only_loss", True)
        conversion.drop("completion_only_loss", Unneeded("assistant_only_loss is set"))
        return
    written = conversion.get("completion_only_loss")
    if written is not None:
        conversion.move("completion_only_loss", "trainer.completion_only_loss")
    elif rows.kind == "dialogue" and rows.form != "prompt_completion":
        conversion.default("assistant_only_loss: false", "trainer.completion_only_loss", False)
        conversion.note(
            "TRL's loss is on all tokens of a dialogue unless assistant_only_loss is set; remove "
            "trainer.completion_only_loss for the answers alone, also if rows have a prompt and a completion"
        )
    conversion.drop("assistant_only_loss", Unneeded("it is off"))
