"""The files of a saved model as other libraries read them: library, classes, task and base model."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from partita.export.shared_paths import IN_CACHE, shared_name
from partita.tokenizers.hub import BASE

CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "FEATURE_EXTRACTION": "AutoModel",
}
"""Class of transformers of each task of peft."""
SUFFIXES = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
}
"""Task of a class of transformers, by the end of its name."""
TAGS = {
    "CAUSAL_LM": "text-generation",
    "SEQ_2_SEQ_LM": "text2text-generation",
    "SEQ_CLS": "text-classification",
    "TOKEN_CLS": "token-classification",
    "FEATURE_EXTRACTION": "sentence-similarity",
}
"""The Hub's name of each task."""
HEAD_WEIGHT = re.compile(r"\.(score|classifier|out_proj)\.weight$")
"""Matches the last layer of a head in the weights of an adapter."""


@dataclass(frozen=True)
class Repository:
    """A saved model, as other libraries see it."""

    task: str | None
    """peft's name of the task; None if only partita reads the files."""
    method: str | None
    """Name of the adapter's method, such as LoRA; None for a plain model."""
    base: str | None
    """Hub id of the base model; None if it is new, in the folder, or a local folder."""
    local_base: str | None
    """Name of a base model that is a local folder and not in this folder."""
    has_base: bool
    """Whether the folder has the base model of the adapter."""
    is_sentence_transformer: bool
    """Whether sentence-transformers loads it."""
    num_labels: int | None = None
    """Outputs of the head that the adapter trains, if it trains one."""

    @property
    def library(self) -> str:
        """The library that loads the folder."""
        if self.task is None:
            return "partita"
        if self.method is not None:
            return "peft"
        return "sentence-transformers" if self.is_sentence_transformer else "transformers"

    @property
    def tag(self) -> str:
        """The Hub's name of the task."""
        return TAGS["SEQ_CLS" if self.task is None else self.task]

    @property
    def model_class(self) -> str:
        """Class of transformers that loads the model, or its base model."""
        return CLASSES[self.task or "FEATURE_EXTRACTION"]


def read_repository(folder: Path, config: Mapping[str, Any], *, origin: Path) -> Repository:
    """Return what a saved model is.

    Args:
        folder: Folder that `Model.save` wrote.
        config: The configuration of the model.
        origin: Folder that relative paths of the configuration are resolved against.
    """
    adapter, own = read_json_if_any(folder / "adapter_config.json"), read_json_if_any(folder / "config.json")
    has_base = (folder / BASE).is_dir()
    is_bag = isinstance(config.get("base_model"), Mapping) and config["base_model"].get("type") == "embedding_bag"
    base = adapter.get("base_model_name_or_path") if adapter else config.get("base_model")
    named = base if isinstance(base, str) and not has_base else None
    is_local = named is not None and (origin / Path(named).expanduser()).is_dir()
    if is_local and IN_CACHE.search(str(named)):
        named, is_local = shared_name(str(named)), False
    return Repository(
        task=adapter.get("task_type") if adapter else None if is_bag else task_of(own),
        method=str(adapter["peft_type"]) if adapter else None,
        base=None if is_local else named,
        local_base=Path(str(named)).name if is_local else None,
        has_base=has_base,
        is_sentence_transformer=(folder / "modules.json").is_file(),
        num_labels=labels_of_adapter(folder / "adapter_model.safetensors"),
    )


def labels_of_adapter(path: Path) -> int | None:
    """Return the outputs of the head in the weights of an adapter; None without one."""
    if not path.is_file():
        return None
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        heads = [name for name in file.keys() if HEAD_WEIGHT.search(name)]  # noqa: SIM118 -- it is no mapping
        return int(file.get_slice(heads[-1]).get_shape()[0]) if heads else None


def task_of(described: Mapping[str, Any]) -> str | None:
    """Return peft's name of the task of a transformers config; None for an empty one."""
    if not described:
        return None
    name = next(iter(described.get("architectures") or ()), "")
    return next((task for suffix, task in SUFFIXES.items() if name.endswith(suffix)), "FEATURE_EXTRACTION")


def read_json_if_any(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if there is none."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf8")) if path.is_file() else {}
    return content


def license_of(base: str | Path | None) -> str | None:
    """Return the license that the page of a model names; None if it is not known.

    Args:
        base: A Hub id, or a folder with a README.md; None without a base model.
    """
    if base is None:
        return None
    from huggingface_hub import ModelCard
    from huggingface_hub.errors import HfHubHTTPError

    try:
        page = ModelCard.load(base / "README.md" if isinstance(base, Path) else base, ignore_metadata_errors=True)
    except (HfHubHTTPError, OSError, ValueError, yaml.YAMLError):  # none, no network, damaged
        return None
    return str(page.data.license) if page.data.license else None
