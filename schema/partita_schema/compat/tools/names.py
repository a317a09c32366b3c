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
LEAST_TYPICAL = 2
"""Number of its typical keys from which a file with unknown keys looks like one of a tool."""


def likely_tools(source: Node, *, least: int = 1) -> list[ToolName]:
    """Return the tools of which a file has at least `least` typical keys, the likeliest first."""
    keys = source.mapping()
    typical: dict[ToolName, tuple[str, ...]] = {
        "axolotl": ("micro_batch_size", "sequence_len", "num_epochs", "val_set_size", "lora_target_linear"),
        "llama_factory": ("stage", "finetuning_type", "template", "cutoff_len", "lora_target", "do_train"),
        "trl": ("dataset_name", "use_peft", "max_length", "dataset_train_split", "per_device_train_batch_size"),
    }
    counts = {tool: sum(key in keys for key in names) for tool, names in typical.items()}
    return sorted((tool for tool, count in counts.items() if count >= least), key=lambda tool: -counts[tool])


def hint_of_tool(source: Node, problems: Sequence[Problem], *, files: Sequence[str]) -> list[Problem]:
    """Return a problem with the command that converts a file with unknown keys, if it looks like one of another tool.

    Args:
        source: The configuration.
        problems: Its problems.
        files: Its files.
    """
    unknown = [
        problem.file for problem in problems if problem.message.startswith("unknown key") and problem.file in files
    ]
    if len(unknown) < LEAST_UNKNOWN:
        return []
    file, tools = str(unknown[0]), likely_tools(source, least=LEAST_TYPICAL)
    if not tools:
        return []
    words = ["partita", "convert", file, "--from", tools[0], "--output", f"{Path(file).stem}-converted.yaml"]
    return [Problem("", f"looks like a file of another tool; to convert it: {shlex.join(words)}", file)]
