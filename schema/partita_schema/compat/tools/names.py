"""The tools whose files `convert` reads, and which one a file is for."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from partita_schema.errors import Problem
from partita_schema.yaml.tree import Node

ToolName = Literal["axolotl", "llama_factory", "trl"]
LEAST_UNKNOWN = 3
"""Number of unknown keys from which a file may be one of another tool."""


def likely_tools(source: Node) -> list[ToolName]:
    """Return the tools whose keys a file has, the likeliest first; empty if it has few of any."""
    keys = source.mapping()
    typical: dict[ToolName, tuple[str, ...]] = {
        "axolotl": ("micro_batch_size", "sequence_len", "num_epochs", "val_set_size", "lora_target_linear"),
        "llama_factory": ("stage", "finetuning_type", "template", "cutoff_len", "lora_target", "do_train"),
        "trl": ("dataset_name", "use_peft", "max_length", "dataset_train_split", "per_device_train_batch_size"),
    }
    counts = {tool: sum(key in keys for key in names) for tool, names in typical.items()}
    return sorted((tool for tool, count in counts.items() if count), key=lambda tool: -counts[tool])


def hint_of_tool(source: Node, problems: Sequence[Problem]) -> list[Problem]:
    """Return a problem with the command that converts a file with unknown keys, if it looks like one of another tool.

    Args:
        source: The file.
        problems: Its problems.
    """
    unknown = [problem for problem in problems if problem.message.startswith("unknown key")]
    if len(unknown) < LEAST_UNKNOWN or unknown[0].file is None:
        return []
    file, tools = unknown[0].file, likely_tools(source)
    if not tools:
        return []
    words = ["partita", "convert", file, "--from", tools[0], "--output", f"{Path(file).stem}-converted.yaml"]
    return [Problem("", f"looks like a file of another tool; to convert it: {shlex.join(words)}", file)]
