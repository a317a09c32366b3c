"""Fingerprints of everything that determines an answer, and the journal path derived from them."""

import json
from collections.abc import Mapping
from pathlib import Path

from partita.data.rows import Rows, digest
from partita.generation.job import PredictionPipeline
from partita.tokenizers.hub import folder_digest
from partita.tokenizers.saved_adapters import base_identity
from partita_schema.config import Config
from partita_schema.sections.outputs import OutputFeature
from partita_schema.sections.quantization import DynamicInt8Quantization

SECTIONS = ("prompt", "generation", "input_features", "output_features", "defaults", "model_parameters", "quantization")
"""Sections that determine answers, besides the model, the seed and how dialogues are read."""
LENGTH = "preprocessing.global_max_sequence_length"
OF_HEAD = ("threshold", "pooling")
"""Keys of decoders that a head applies before its values are recorded."""


def answer_fingerprint(
    pipeline: PredictionPipeline, rows: Rows, *, result: Path | None, folder: Path
) -> dict[str, str]:
    """Return fingerprints of everything that determines the answers to these rows, by name.

    Args:
        pipeline: The model, tokenizer and decoder of the run.
        rows: The rows to answer.
        result: Folder of the trained weights, or None.
        folder: Folder that relative paths of the configuration are resolved against.
    """
    config = pipeline.config
    settings = config.model_dump(mode="json", include={"prompt", "generation", "input_features", "defaults"})
    constraint = pipeline.generation.constraint_hash
    dialogue = config.data.dialogue
    # Otherwise the key of a row has its prompt, which includes everything else that the dialogue section decides.
    limits = [getattr(output.decoder, "max_new_tokens", None) for output in config.output_features]
    turns = ["in_sequence", dialogue.questions, limits] if config.answers_in_sequence else []
    limit = config.preprocessing.global_max_sequence_length
    return {
        "model": model_fingerprint(pipeline, result=result, folder=folder),
        "dataset": rows.fingerprint,
        **{name: digest(json.dumps(value)) for name, value in settings.items()},
        "output_features": digest(
            *(output_input(output) for output in config.output_features), *([constraint] if constraint else ())
        ),
        **({"turns": digest(json.dumps(turns))} if turns else {}),
        **({LENGTH: digest(str(limit))} if limit is not None else {}),
    }


def output_input(output: OutputFeature) -> str:
    """Return what of an output decides how its values are written in prompts, and what a head gives for a row."""
    parts = [output.name, output.type, output.answer_format]
    if output.has_head:
        parts += [f"{key} {value}" for key in OF_HEAD if (value := getattr(output.decoder, key, None)) is not None]
    return ":".join(part for part in parts if part)


def model_fingerprint(pipeline: PredictionPipeline, *, result: Path | None, folder: Path) -> str:
    """Return the fingerprint of the model: the same after training and after loading it from its run.

    Args:
        pipeline: The model, tokenizer and decoder of the run.
        result: Folder of the trained weights, or None.
        folder: Folder that relative paths of the configuration are resolved against.
    """
    if result is None:
        return pipeline.generator.fingerprint
    quantization, dtype = pipeline.config.quantization, pipeline.config.model_parameters.dtype
    # The file does not determine the number format: the machine chooses it.
    chosen = dtype == "fastest" or isinstance(quantization, DynamicInt8Quantization)
    formats = [pipeline.generator.fingerprint] if chosen else []
    return digest(
        folder_digest(result),
        *base_identity(result, pipeline.config, folder=folder),
        *formats,
        pipeline.config.model_dump_json(include={"model_parameters", "quantization"}),
    )


def section_fingerprints(config: Config) -> dict[str, str]:
    """Return a hash of each section of a file that determines answers, by its key.

    A base model in a folder counts with the name of the folder, which may lie elsewhere on another machine.
    """
    values = config.model_dump(mode="json", include={*SECTIONS, "base_model"})
    if isinstance(values["base_model"], str):
        values["base_model"] = values["base_model"].rstrip("/").rpartition("/")[2]
    values[LENGTH] = config.preprocessing.global_max_sequence_length
    values["data.dialogue"] = config.data.dialogue.model_dump(mode="json")
    if config.generation.seed is None:
        values["seed"] = config.seed
    return {name: digest(json.dumps(value, sort_keys=True)) for name, value in values.items()}


def journal_path(folder: Path, *, output: Path | None, fingerprint: Mapping[str, str]) -> Path:
    """Return the path of the journal under `folder`: named for the output file, or without one for the fingerprint."""
    suffix = digest(str(output.resolve()) if output is not None else json.dumps(fingerprint))[:12]
    return folder / "journal" / f"{output.stem if output is not None else 'rows'}-{suffix}.jsonl"
