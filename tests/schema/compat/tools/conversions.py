"""Conversion of texts in tests, and what must hold for each."""

from pathlib import Path
from typing import Any

import yaml

from partita_schema.compat.tools.conversion import Report
from partita_schema.config import Config
from partita_schema.convert import ToolName, convert_file
from partita_schema.errors import ConfigError
from partita_schema.load import load_config

DATASETS = ("datasets", "pretraining_dataset", "test_datasets")
"""Keys of axolotl with a list of datasets, whose keys are reported, too."""


def items_of(written: dict[str, Any], key: str) -> list[dict[str, Any]]:
    value = written.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def converted(text: str, tool: ToolName, folder: Path) -> tuple[Config, Report]:
    """Return the converted configuration and the report; every key of the text must be in exactly one list."""
    file = folder / "original.yaml"
    file.write_text(text, encoding="utf-8")
    result = convert_file(file, tool, output=folder)
    loaded = load_config(result.text)
    assert loaded.warnings == ()
    written = yaml.safe_load(text)
    inner = [f"{key}[{n}].{name}" for key in DATASETS for n, item in enumerate(items_of(written, key)) for name in item]
    keys = [key for key in result.report.keys if tool == "axolotl" or "[" not in key]
    assert sorted(keys) == sorted([*written, *(inner if tool == "axolotl" else ())]), "each key is in one list"
    return loaded.config, result.report


def refusal_of(text: str, tool: ToolName, folder: Path) -> str:
    """Return the error for a text that cannot be converted, without the folder."""
    file = folder / "original.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        convert_file(file, tool, output=folder)
    except ConfigError as error:
        return str(error).replace(f"{folder}/", "")
    raise AssertionError("the file was converted")


def missing(report: Report) -> dict[str, str]:
    """Return the keys without a counterpart, with the reasons."""
    return {problem.path: problem.message for problem in report.missing}


def set_values(config: Config) -> dict[str, Any]:
    """Return what the converted file sets, as plain data."""
    return config.model_dump(mode="json", exclude_unset=True)
