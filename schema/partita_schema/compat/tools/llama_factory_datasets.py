"""Conversion of the datasets of LLaMA-Factory's files, which dataset_info.json describes."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita_schema.compat.tools.conversion import Conversion, Unneeded, names_of
from partita_schema.compat.tools.llama_factory_preferences import TRAINERS, unfit_rows
from partita_schema.compat.tools.rows import (
    MESSAGE_FORMATS,
    FoundSource,
    RowFormat,
    common_format,
    file_source,
    hub_source,
    put_features,
    put_sources,
    why_no_common_format,
)
from partita_schema.dialogues.messages import CALLS, SAME_ROLES
from partita_schema.yaml.tree import Node

INFO = "dataset_info.json"
ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}
"""Standard columns of Alpaca's rows."""
SHAREGPT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": CALLS,
    "system_tag": "system",
}
"""The role that a tag names."""
TAG = "kto_tag"
"""LLaMA-Factory's name of the column that says whether an answer is good."""
STOPS = {
    "concat": "all_once",
    "interleave_once": "all_once",
    "interleave_under": "first",
    "interleave_over": "all",
}
"""`data.stop` by `mix_strategy`."""
MEDIA = ("images", "videos", "audios")


def convert_datasets(conversion: Conversion) -> RowFormat:
    """Convert the datasets, and return the format of their rows."""
    stage = str(conversion.get("stage", "sft"))
    is_pt = stage == "pt"
    if "stage" in conversion.left:
        to = "output_features" if is_pt else "trainer.type" if stage in TRAINERS else "input_features"
        conversion.take("stage", to)
    names = names_of(conversion.get("dataset", ""))
    tests = names_of(conversion.get("eval_dataset", ""))
    info, folder = dataset_info(conversion)
    described = [name for name in (*names, *tests) if name in info]
    formats = [format_of(conversion, name, info[name], is_pt=is_pt) for name in described]
    rows = common_format(formats) if formats else RowFormat("document" if is_pt else "dialogue", column="text")
    if rows is not None and rows.kind == "dialogue" and not formats:
        rows = RowFormat("dialogue")
    if rows is None:
        raise conversion.refusal("dataset", why_no_common_format(formats))
    if formats and (why := unfit_rows(stage, rows)):
        raise conversion.refusal("dataset", why)
    if not formats and stage in TRAINERS:
        pair = stage != "kto"
        rows = RowFormat("dialogue", chosen="chosen", rejected="rejected") if pair else RowFormat("dialogue", label=TAG)
    for name, one in zip(described, formats, strict=True):
        if read := [column for column in one.ignored if not rows.ignores(column)]:
            conversion.note(
                f"{name} does not declare {', '.join(read)}, which another dataset reads: rows of {name} with such a "
                "column are read with it; remove it from them"
            )
    put_features(conversion, rows, at=conversion.left.get("dataset"))
    convert_sources(conversion, info, folder, names=names, tests=tests)
    return rows


def dataset_info(conversion: Conversion) -> tuple[Mapping[str, Any], Path]:
    """Return the descriptions of datasets by name, and the folder of their files; empty if there are none.

    `dataset_dir` is looked up in the current folder, and in the folder of the file and those above it.
    """
    written = str(conversion.get("dataset_dir", "data"))
    above = conversion.folder.resolve()
    for base in (Path(), conversion.folder, above, *above.parents):
        path = base / written / INFO
        if path.is_file():
            try:
                info = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                conversion.note(f"{path} cannot be read ({error})")
                return {}, Path(written)
            described = {name: entry for name, entry in mapping_of(info).items() if isinstance(entry, dict)}
            return described, path.parent
    return {}, Path(written)


def convert_sources(
    conversion: Conversion, info: Mapping[str, Any], folder: Path, *, names: list[str], tests: list[str]
) -> None:
    """Write the sources of the rows, or say which datasets are not described.

    Args:
        conversion: The conversion.
        info: Descriptions by name.
        folder: Folder of the files.
        names: Datasets to train on.
        tests: Datasets to evaluate on.
    """
    streaming = conversion.is_on("streaming")
    node = conversion.left.get("dataset")
    found = [source_of(conversion, info[name], folder, node, streaming) for name in names if name in info]
    unknown = [name for name in (*names, *tests) if name not in info]
    if unknown:
        reason = f"no {INFO} describes {', '.join(unknown)}; write their files or Hub ids as data.source or data.mix"
        conversion.miss("dataset" if any(name in unknown for name in names) else "eval_dataset", reason)
    if found and node is not None:
        put_sources(conversion, weighted(conversion, found))
        if "dataset" in conversion.left:
            conversion.take("dataset", "data.source" if len(found) == 1 else "data.mix")
    tested = [source_of(conversion, info[name], folder, None, streaming=False) for name in tests if name in info]
    if tested and "eval_dataset" in conversion.left:
        node = conversion.take("eval_dataset", "data.validation")
        conversion.put("data.validation", tested[0].value, at=node)
        if len(tested) > 1:
            conversion.note("only the first of eval_dataset is used; join the others into one file")
    if "dataset_dir" in conversion.left:
        conversion.take("dataset_dir", "data.source")
    if streaming and found:
        conversion.take("streaming", "data.source: {streaming: true}")
    elif streaming:
        conversion.miss("streaming", "write data.source: {type: ..., path: ..., streaming: true}")
    convert_mixing(conversion, len(found))
    if conversion.get("max_samples") is not None:
        conversion.note("max_samples takes the first rows of a dataset, preprocessing.sample_size random ones")
    if len(found) > 1 and conversion.get("max_samples") is not None:
        conversion.note("max_samples counts the rows of each dataset, preprocessing.sample_size those of all together")


def weighted(conversion: Conversion, found: list[FoundSource]) -> list[FoundSource]:
    """Return the sources with the probabilities of `interleave_probs`."""
    if conversion.get("mix_strategy", "concat") == "concat":
        conversion.drop("interleave_probs", Unneeded("it is for datasets that are interleaved"))
    written = conversion.get("interleave_probs")
    try:
        weights = [float(item) for item in names_of(written)] if written is not None else []
    except ValueError:
        return found
    if not weights and conversion.get("mix_strategy") == "interleave_once":
        return [replace(one, weight=1.0) for one in found]
    if len(weights) != len(found) or len(found) < 2:
        return found
    conversion.take("interleave_probs", "data.mix[].weight")
    return [replace(one, weight=weight) for one, weight in zip(found, weights, strict=True)]


def convert_mixing(conversion: Conversion, count: int) -> None:
    """Convert when an epoch of several datasets ends."""
    if count < 2:
        conversion.drop("mix_strategy", Unneeded("there is one dataset"))
        conversion.drop("interleave_probs", Unneeded("there is one dataset"))
        return
    strategy = str(conversion.get("mix_strategy", "concat"))
    if strategy in STOPS:
        conversion.put("data.stop", STOPS[strategy])
        if "mix_strategy" in conversion.left:
            conversion.take("mix_strategy", "data.stop")
    else:
        known = ", ".join(STOPS)
        conversion.miss("mix_strategy", f"{strategy} is none of {known}; write data.stop and data.mix[].weight")


def source_of(
    conversion: Conversion, entry: Mapping[str, Any], folder: Path, node: Node | None, streaming: bool
) -> FoundSource:
    """Return where the rows of a described dataset are.

    Args:
        conversion: The conversion.
        entry: The description.
        folder: Folder of the files.
        node: The value in the file that names the dataset.
        streaming: Whether rows are streamed.
    """
    if entry.get("hf_hub_url"):
        options = {"subset": entry.get("subset"), "split": entry.get("split"), "revision": entry.get("revision")}
        return FoundSource(hub_source(str(entry["hf_hub_url"]), **options, streaming=streaming), node)
    if entry.get("num_samples"):
        conversion.note("num_samples of a dataset is not used; write preprocessing.sample_size")
    name = str(entry.get("file_name") or entry.get("script_url") or entry.get("ms_hub_url") or "")
    if not entry.get("file_name"):
        conversion.note(f"{name} is not a file or a dataset on the Hugging Face Hub; download it and write its path")
    path = folder / name
    if path.is_dir():
        path = path / "*.json*"
    if folder.is_dir() and not Path(str(conversion.get("dataset_dir", "data"))).is_absolute():
        path = Path(os.path.relpath(path, conversion.output))
    return FoundSource(file_source(str(path), streaming=streaming), node)


def format_of(conversion: Conversion, name: str, entry: Mapping[str, Any], *, is_pt: bool) -> RowFormat:
    """Return the format of the rows of a described dataset.

    Args:
        conversion: The conversion.
        name: Name of the dataset.
        entry: Its description.
        is_pt: Whether the file pretrains a model on text.

    Raises:
        ConfigError: Rows like these cannot be read.
    """
    columns: dict[str, Any] = {key: value for key, value in mapping_of(entry.get("columns")).items() if value}
    if is_pt:
        return RowFormat("document", column=str(columns.get("prompt", "text")))
    key = "dataset" if name in names_of(conversion.get("dataset", "")) else "eval_dataset"
    media = [column for column in MEDIA if column in columns]
    if media:
        raise conversion.refusal(key, f"{name} in {INFO} has {', '.join(media)}, and only texts are read; name others")
    if entry.get("formatting", "alpaca") in ("sharegpt", "openai"):
        rows = dialogue_of(conversion, key, name, entry, columns)
    else:
        more = {"system": "system", "history": "history", "tools": "tools"}
        names = ALPACA | {part: column for part, column in more.items() if part in columns}
        ignored = [column for part, column in more.items() if part not in columns]
        ignored += ["input"] if columns and "query" not in columns else []
        rows = RowFormat(
            "dialogue",
            column="messages",
            form="alpaca",
            columns=renamed(columns, names),
            ignored=tuple(ignored),
        )
    if entry.get("ranking"):
        chosen, rejected = (str(columns.get(part, part)) for part in ("chosen", "rejected"))
        rows = replace(rows, chosen=chosen, rejected=rejected)
    return replace(rows, label=str(columns.get(TAG, "")))


def mapping_of(value: object) -> dict[str, Any]:
    """Return a mapping of dataset_info.json; {} for anything else."""
    return value if isinstance(value, dict) else {}


def renamed(columns: Mapping[str, Any], names: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the columns whose name in the data is not that of the format, by the format's name.

    Args:
        columns: Names in the data, by LLaMA-Factory's name of the part.
        names: Names in the format.
    """
    return tuple((name, str(columns[part])) for part, name in names.items() if columns.get(part, name) != name)


def dialogue_of(
    conversion: Conversion, key: str, name: str, entry: Mapping[str, Any], columns: Mapping[str, Any]
) -> RowFormat:
    """Return the format of a dataset of dialogues.

    Args:
        conversion: The conversion.
        key: The key of the file that names the dataset.
        name: Name of the dataset.
        entry: Its description.
        columns: Its columns.

    Raises:
        ConfigError: The messages have other keys or roles than those that are read.
    """
    tags = SHAREGPT_TAGS | {tag: value for tag, value in mapping_of(entry.get("tags")).items() if value}
    form = MESSAGE_FORMATS.get((str(tags["role_tag"]), str(tags["content_tag"])))
    if form is None:
        found = f"messages with the keys {tags['role_tag']} and {tags['content_tag']}"
        known = "role and content, from and value, or speaker and text"
        raise conversion.refusal(key, f"{name} in {INFO} has {found}, which cannot be read; rename them to {known}")
    for tag, role in ROLES.items():
        written = str(tags[tag]).lower()
        if SAME_ROLES.get(written, written) != role:
            found = f"{name} in {INFO} has the {tag} {tags[tag]}, which is not known"
            raise conversion.refusal(key, f"{found}; rename it to {SHAREGPT_TAGS[tag]}")
    other = renamed(columns, {"system": "system", "tools": "tools"})
    ignored = tuple(part for part in ("system", "tools") if part not in columns)
    column = str(columns.get("messages", "conversations"))
    return RowFormat("dialogue", column=column, form=form, columns=other, ignored=ignored)
