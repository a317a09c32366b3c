"""Conversion of other tools' configurations, with a report of what has a counterpart and what has not."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from partita_schema.checked import check_tree
from partita_schema.common.text import counted
from partita_schema.compat.tools.axolotl import convert_axolotl
from partita_schema.compat.tools.axolotl_keys import AXOLOTL_KEYS
from partita_schema.compat.tools.conversion import By, Conversion, Missing, Report, Table, To, Unneeded
from partita_schema.compat.tools.llama_factory import convert_llama_factory
from partita_schema.compat.tools.llama_factory_keys import LLAMA_FACTORY_KEYS
from partita_schema.compat.tools.names import ToolName, likely_tools
from partita_schema.compat.tools.trl import convert_trl
from partita_schema.compat.tools.trl_keys import TRL_KEYS
from partita_schema.dump import native_yaml
from partita_schema.errors import ConfigError, Problem
from partita_schema.yaml.files import read_text, sound_text
from partita_schema.yaml.parse import read_yaml
from partita_schema.yaml.tree import Node


@dataclass(frozen=True)
class Tool:
    """A tool whose files are converted."""

    title: str
    table: Table
    convert: Callable[[Conversion], None]


TOOLS: dict[ToolName, Tool] = {
    "axolotl": Tool("axolotl", AXOLOTL_KEYS, convert_axolotl),
    "llama_factory": Tool("LLaMA-Factory", LLAMA_FACTORY_KEYS, convert_llama_factory),
    "trl": Tool("TRL", TRL_KEYS, convert_trl),
}
"""Tools by the name after `--from`."""


@dataclass(frozen=True)
class Converted:
    """A converted configuration."""

    text: str
    """YAML that loads without errors."""
    report: Report
    """What became of every key of the original."""


def convert_file(file: Path, tool: ToolName, *, output: Path | None = None) -> Converted:
    """Convert a file of another tool.

    Args:
        file: The file.
        tool: The tool that it is for.
        output: Folder of the file to write; relative paths of data and models start there. Default: the current
            folder.

    Raises:
        ConfigError: The file cannot be read or converted; errors have its lines.
    """
    empty = nothing_to_convert(TOOLS[tool].title, MODEL_KEYS[tool][0])
    source, problems = read_yaml(sound_text(read_text(file), str(file)), file=str(file), empty=empty)
    if problems:
        raise ConfigError(problems)
    refuse_other_files(source, tool, file=str(file))
    conversion = Conversion(source, table=TOOLS[tool].table, folder=file.parent, output=output or Path())
    TOOLS[tool].convert(conversion)
    checked = check_tree(conversion.root)
    if checked.config is None:
        raise ConfigError(checked.problems)
    header = f"# Converted from the {TOOLS[tool].title} file {' '.join(file.name.split())}\n"
    return Converted(header + native_yaml(checked.config), conversion.report)


def nothing_to_convert(title: str, key: str) -> str:
    """Return the error text for an empty file of the tool `title`, whose files have at least `key`."""
    return f"the file is empty, so there is nothing to convert; give a file of {title}, which has at least {key}"


def refuse_other_files(source: Node, tool: ToolName, *, file: str) -> None:
    """Raise ConfigError for a file that has no key with a model of the tool, and name the tool that it may be for."""
    if any(key in source.mapping() for key in MODEL_KEYS[tool]):
        return
    others = likely_tools(source)
    hint = f"; it looks like a file for --from {others[0]}" if others and others[0] != tool else ""
    message = f"is no file of {TOOLS[tool].title}: it has no {MODEL_KEYS[tool][0]}{hint}"
    raise ConfigError([Problem("", message, file)])


MODEL_KEYS: dict[ToolName, tuple[str, ...]] = {
    "axolotl": ("base_model",),
    "llama_factory": ("model_name_or_path",),
    "trl": ("model_name_or_path",),
}
"""The key with the base model."""


def likely_tool_of(file: Path) -> ToolName | None:
    """Return the tool that a file is for, by its keys; None if it looks like none."""
    try:
        source = read_yaml(sound_text(read_text(file), str(file)), file=str(file))[0]
    except ConfigError:
        return None
    tools = likely_tools(source)
    return tools[0] if tools else None


def report_lines(report: Report) -> Iterator[str]:
    """Yield the report as lines for the terminal."""
    yield (
        f"{counted(len(report.mapped), 'key')} mapped, {len(report.missing)} without a counterpart, "
        f"{len(report.unneeded)} not needed, {len(report.unset)} empty or off"
    )
    if report.mapped:
        yield "mapped:"
        yield from (f"  {key} -> {path}" for key, path in report.mapped)
    if report.defaults:
        yield "defaults that differ, written out:"
        yield from (f"  {key} -> {path}: {value}" for key, path, value in report.defaults)
    if report.unneeded:
        yield "not needed:"
        yield from (f"  {problem.path}: {problem.message}" for problem in report.unneeded)
    if report.unset:
        yield f"empty or off: {', '.join(report.unset)}"
    if report.notes:
        yield "differences:"
        yield from (f"  {note}" for note in report.notes)
    if report.missing:
        yield "without a counterpart:"
        yield from (f"  {problem}" for problem in report.missing)


def keys_page() -> str:
    """Return the documentation page with the keys of all tools."""
    lines = [
        "# Keys of other tools",
        "",
        "Made from the tables of `partita convert` by `partita convert --keys`; do not edit.",
    ]
    for name, tool in TOOLS.items():
        lines += ["", f"## {tool.title}", "", f"`partita convert --from {name}`", "", *table_lines(tool.table)]
    return "\n".join(lines) + "\n"


def as_code(target: str) -> str:
    """Return a key, with or without a value, as code; other text unchanged."""
    is_key = re.fullmatch(r"[a-z_]+([.\[]\S*)?(: \S.*)?", target) and not target.startswith("nothing")
    return f"`{target}`" if is_key else target


def table_lines(table: Table) -> Iterator[str]:
    """Yield the tables of the keys that map, and of those that do not, as Markdown."""
    yield "| key | here |"
    yield "|---|---|"
    for key, entry in sorted(table.items()):
        if isinstance(entry, To | By):
            yield f"| `{key}` | {as_code(entry.path if isinstance(entry, To) else entry.to)} |"
    yield ""
    yield "| key without a counterpart | why, and what to do |"
    yield "|---|---|"
    for key, entry in sorted(table.items()):
        if isinstance(entry, Missing):
            yield f"| `{key}` | {entry.reason} |"
    yield ""
    yield "| key that is not needed | why |"
    yield "|---|---|"
    for key, entry in sorted(table.items()):
        if isinstance(entry, Unneeded):
            yield f"| `{key}` | {entry.reason} |"
