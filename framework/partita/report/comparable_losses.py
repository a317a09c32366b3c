"""Whether the losses of two runs can be compared: only losses of the same tokens, or of the same values, can."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.report.evaluation import Evaluation
from partita.runs.listing import RunSummary

TOKENIZER = "tokenizer.json"
IDENTITY = ("model", "added_tokens", "normalizer", "pre_tokenizer")
"""Parts of a tokenizer file that decide the tokens of a text; others, such as padding, do not."""


def why_not_comparable(
    first: RunSummary, second: RunSummary, first_rows: Evaluation, second_rows: Evaluation
) -> str | None:
    """Return why the losses of two runs cannot be compared; None if they can.

    Args:
        first: A run.
        second: The other run.
        first_rows: Results of the first run.
        second_rows: Results of the other run, of the same rows.
    """
    values = predicts_values(first.config), predicts_values(second.config)
    if values[0] != values[1]:
        return "one is that of predicted values, and the other that of generated text"
    if values[0]:
        return why_values_differ(first, second)
    if not same_tokenizer(first, second):
        return "the tokenizers differ, and it is a mean over tokens"
    if first_rows.tokens != second_rows.tokens:
        return "it is a mean over other tokens of the rows, because the prompts or the formats of answers differ"
    return None


def predicts_values(config: Mapping[str, Any]) -> bool:
    """Return whether a model predicts values directly, with a head or as a sparse classifier, and not as text."""
    base = config.get("base_model")
    is_bag = isinstance(base, Mapping) and base.get("type") == "embedding_bag"
    outputs = config.get("output_features") or ()
    return is_bag or any(output.get("head") or output.get("type") == "embedding" for output in outputs)


def why_values_differ(first: RunSummary, second: RunSummary) -> str | None:
    """Return why losses of predicted values cannot be compared; None if they can."""
    if first.manifest.get("labels") != second.manifest.get("labels"):
        return "the labels differ"
    outputs = [run.config.get("output_features") for run in (first, second)]
    return "the settings of the outputs differ" if outputs[0] != outputs[1] else None


def same_tokenizer(first: RunSummary, second: RunSummary) -> bool:
    """Return whether two runs tokenize texts in the same way; by their base models if they have no tokenizer files."""
    files = [tokenizer_file(run.folder) for run in (first, second)]
    if files[0] is None or files[1] is None:
        return bool(first.config.get("base_model") == second.config.get("base_model"))
    contents = [file.read_bytes() for file in files if file is not None]
    return contents[0] == contents[1] or identity_of(contents[0]) == identity_of(contents[1])


def tokenizer_file(folder: Path) -> Path | None:
    """Return the tokenizer of a run; None if it has none."""
    candidates = (folder / "model" / TOKENIZER, folder / "tokenizer" / TOKENIZER)
    return next((path for path in candidates if path.is_file()), None)


def identity_of(content: bytes) -> Any:
    """Return what decides the tokens; the bytes of a file that is no JSON object."""
    try:
        parts = json.loads(content)
        return [parts.get(name) for name in IDENTITY]
    except (ValueError, AttributeError):
        return content
