"""Effective generation settings: those of the config, then those of the checkpoint's generation_config.json.

The result equals that of transformers' `generate` with the same checkpoint and the same keys. This module imports
neither torch nor transformers, so that `partita explain` shows the values that a run applies.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from partita.tokenizers.hub import find_base
from partita_schema.base import NonNegativeInt, Number, Positive, PositiveInt, StrictBool
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.sections.model import NewModel
from partita_schema.sections.prompt import Generation

FILE_NAME = "generation_config.json"

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
"""Settings that apply only to sampling."""
BEAMS = ("length_penalty", "early_stopping")
"""Settings that apply only to beam search."""
PLAIN = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "renormalize_logits",
    "guidance_scale",
    "min_new_tokens",
)
"""Settings of the config that always apply, under transformers' names."""
TokenIds = tuple[NonNegativeInt, ...]
CHECKPOINT_ONLY: dict[str, Any] = {
    "bad_words_ids": tuple[TokenIds, ...],
    "forced_bos_token_id": NonNegativeInt,
    "forced_eos_token_id": NonNegativeInt | TokenIds,
    "min_length": NonNegativeInt,
    "sequence_bias": tuple[tuple[TokenIds, Number], ...],
    "encoder_repetition_penalty": Positive,
    "encoder_no_repeat_ngram_size": NonNegativeInt,
    "remove_invalid_values": StrictBool,
}
"""Settings without a config key, with their types."""
TYPES: dict[str, Any] = {
    **{key: Generation.model_fields[key].annotation for key in (*SAMPLING, *PLAIN, "do_sample", "num_beams")},
    **CHECKPOINT_ONLY,
    "length_penalty": Number,
    "early_stopping": bool | Literal["never"],
    "stop_strings": str | tuple[str, ...],
    "max_new_tokens": PositiveInt,
}
"""Settings of a checkpoint that are supported, with their types."""
NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "length_penalty": 1.0,
    "early_stopping": False,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "renormalize_logits": False,
    "guidance_scale": 1.0,
    "min_new_tokens": 0,
    "bad_words": (),
    "bad_words_ids": (),
    "min_length": 0,
    "sequence_bias": (),
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "remove_invalid_values": False,
    "stop": (),
    "num_return_sequences": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "token_healing": False,
}
"""Values without effect."""
TOP_K_OF_GENERATE = 50
"""Default top_k of `generate` if a checkpoint samples without top_k."""
SAME_ANSWERS = frozenset(
    {
        "transformers_version",
        "_from_model_config",
        "_commit_hash",
        "bos_token_id",
        "eos_token_id",  # always read, by `end_token_ids`
        "pad_token_id",
        "decoder_start_token_id",
        "max_length",  # max_new_tokens takes its place, as in `generate`
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "prefill_chunk_size",
        "low_memory",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_lookbehind",
        "assistant_ensemble_weight",
        "target_lookbehind",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "speculation_type",
        "use_mtp",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
    }
)
"""Settings of a checkpoint that change speed or extra outputs, but not the completion."""


@dataclass(frozen=True)
class Setting:
    """An effective value and its origin."""

    value: Any
    origin: Literal["file", "checkpoint", "default"]


@dataclass(frozen=True)
class EffectiveGeneration:
    """The effective generation settings of a run."""

    settings: dict[str, Setting]
    """By transformers' names; texts of the config under `bad_words`, stop strings under `stop`."""
    not_applied: dict[str, Any] = field(default_factory=dict)
    """Settings of the checkpoint that could change completions and are not supported."""

    def value(self, key: str) -> Any:
        """Return a value, or None if the key is not set."""
        return self.settings[key].value if key in self.settings else None

    def of_checkpoint(self) -> dict[str, Any]:
        """Return the values that come from the checkpoint."""
        return {key: setting.value for key, setting in self.settings.items() if setting.origin == "checkpoint"}


def effective_generation(generation: Generation, checkpoint: Mapping[str, Any]) -> EffectiveGeneration:
    """Merge the settings of the config and of the checkpoint's generation_config.json.

    Raises:
        ModelError: A value of the checkpoint is not valid.
    """
    shipped, not_applied = read_checkpoint(checkpoint) if generation.defaults == "checkpoint" else ({}, {})
    merged = {key: Setting(value, "checkpoint") for key, value in shipped.items()}
    merged |= {key: Setting(value, "file") for key, value in config_settings(generation)}
    if "bad_words" in merged:
        merged.pop("bad_words_ids", None)
    merged = {"do_sample": Setting(False, "default"), "num_beams": Setting(1, "default")} | merged
    if merged["do_sample"].value:
        merged.setdefault("top_k", Setting(0, "default"))
    without_effect = {
        *(SAMPLING if not merged["do_sample"].value else ()),
        *(BEAMS if merged["num_beams"].value == 1 else ()),
        *(key for key, setting in merged.items() if key in NEUTRAL and setting.value == NEUTRAL[key]),
    }
    if generation.logprobs and merged["num_beams"].value > 1:
        raise ModelError(
            f"generation.logprobs: the checkpoint's {FILE_NAME} says num_beams {merged['num_beams'].value}, and beams "
            "come without log probabilities; write num_beams: 1"
        )
    return EffectiveGeneration({key: value for key, value in merged.items() if key not in without_effect}, not_applied)


def config_settings(generation: Generation) -> Iterator[tuple[str, Any]]:
    """Yield the settings of the config by name."""
    for key in ("do_sample", "num_beams", *SAMPLING, *BEAMS, *PLAIN, "bad_words", "stop", "max_new_tokens"):
        value = getattr(generation, key)
        if value is not None and not (key == "temperature" and value == 0):
            yield key, value
    if generation.temperature == 0:
        yield "do_sample", False


def read_checkpoint(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the supported and the unsupported settings of a checkpoint.

    Raises:
        ModelError: A value is not valid.
    """
    applied: dict[str, Any] = {}
    not_applied: dict[str, Any] = {}
    for key, value in checkpoint.items():
        if value is None or value == NEUTRAL.get(key):
            continue
        if key in TYPES:
            applied[key] = check_value(key, value)
        elif key not in SAME_ANSWERS or value == "quantized":
            not_applied[key] = value
    if "stop_strings" in applied:
        texts = applied.pop("stop_strings")
        applied["stop"] = (texts,) if isinstance(texts, str) else texts
    if applied.get("top_k") == -1:
        applied["top_k"] = 0
    if applied.get("temperature") == 0:
        applied |= {"do_sample": False}
        del applied["temperature"]
    if applied.get("do_sample"):
        applied.setdefault("top_k", TOP_K_OF_GENERATE)
    return applied, not_applied


def check_value(key: str, value: Any) -> Any:
    """Validate a value against the type of its key. Raise ModelError."""
    kind = TYPES[key] if key != "top_k" else Literal[-1] | TYPES[key]
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ModelError(
            f"the checkpoint's {FILE_NAME} says {key}: {json.dumps(value, default=str)} ({problem}); correct that "
            "file, or write generation: {defaults: none}"
        ) from None


@dataclass(frozen=True)
class Explanation:
    """The effective generation settings of a config, as far as known without loading the model."""

    checkpoint: str
    """Path of the checkpoint's settings, or why they were not read."""
    effective: EffectiveGeneration

    def lines(self) -> list[str]:
        """Return one line per value, with its origin."""
        shown = {key: f"{key}: {json.dumps(item.value)}" for key, item in self.effective.settings.items()}
        width = min(60, max(map(len, shown.values())))
        return [
            f"checkpoint: {self.checkpoint}",
            *(f"{text.ljust(width)}  {self.effective.settings[key].origin}" for key, text in shown.items()),
            *(f"not applied: {key}: {json.dumps(value)}" for key, value in self.effective.not_applied.items()),
        ]

    def record(self) -> dict[str, Any]:
        """Return the same for JSON."""
        values = {key: {"value": item.value, "origin": item.origin} for key, item in self.effective.settings.items()}
        return {"checkpoint": self.checkpoint, "values": values, "not_applied": self.effective.not_applied}


def explain_generation(config: Config, *, folder: Path) -> Explanation:
    """Return the effective generation settings of a config, using local files only."""
    shipped: dict[str, Any] = {}
    source = "not read, because of defaults: none"
    try:
        if config.generation.defaults == "checkpoint":
            shipped, source = shipped_generation(config, folder=folder)
        return Explanation(source, effective_generation(config.generation, shipped))
    except ModelError as error:
        return Explanation(str(error), effective_generation(config.generation, {}))


def shipped_generation(config: Config, *, folder: Path) -> tuple[dict[str, Any], str]:
    """Return the generation settings of the base model from local files, and their path.

    For a checkpoint that is not downloaded the settings are empty, and the text says so.

    Raises:
        ModelError: The file is not valid.
    """
    if isinstance(config.base_model, NewModel):
        return {}, "a new model has no checkpoint"
    source = find_base(config.base_model, folder=folder)
    for name in (FILE_NAME, "config.json"):
        path = Path(source) / name if Path(source).is_dir() else cached_file(config, source, name)
        if path is not None and path.is_file():
            return read_settings(path, name), str(path)
    if Path(source).is_dir():
        return {}, f"{source} has no {FILE_NAME}"
    return {}, f"{source} is not downloaded: what its {FILE_NAME} says is not known before it is"


def cached_file(config: Config, source: str, name: str) -> Path | None:
    """Return the path of a Hub model's file in the local cache, or None."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source, name, revision=config.model_parameters.revision)
    return Path(path) if isinstance(path, str) else None


def read_settings(path: Path, name: str) -> dict[str, Any]:
    """Return the settings in a file; old checkpoints have them in config.json among other keys."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise ModelError(f"{path} holds no JSON object")
    return settings if name == FILE_NAME else {key: value for key, value in settings.items() if key in TYPES}
