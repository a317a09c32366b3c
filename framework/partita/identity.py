"""What decides an answer, and where answers are kept by it."""

import json
from collections.abc import Mapping
from pathlib import Path

from partita.data.rows import Rows, digest
from partita.lm.fingerprint import folder_digest
from partita.pipeline import EndpointPipeline, Pipeline, RayPipeline
from partita_schema.config import Config


def answer_fingerprint(
    pipeline: Pipeline | EndpointPipeline | RayPipeline, rows: Rows, *, config: Config, result: Path | None
) -> dict[str, str]:
    """What decides the answers to these rows, by part; `result` is the folder of trained weights, if there is one."""
    settings = config.model_dump(mode="json", include={"prompt", "generation", "input_features", "defaults"})
    form = pipeline.generation.form
    return {
        "model": model_fingerprint(pipeline, config=config, result=result),
        "dataset": rows.fingerprint,
        **{name: digest(json.dumps(value)) for name, value in settings.items()},
        "output_features": digest(
            *(f"{output.name}:{output.type}" for output in config.output_features), *([form] if form else ())
        ),
    }


def model_fingerprint(
    pipeline: Pipeline | EndpointPipeline | RayPipeline, *, config: Config, result: Path | None
) -> str:
    """The same for a model that was just trained and for one that was loaded from its run."""
    if result is None:
        return pipeline.lm.fingerprint
    return digest(folder_digest(result), config.model_dump_json(include={"model_parameters", "quantization"}))


def journal_path(folder: Path, *, output: Path | None, fingerprint: Mapping[str, str]) -> Path:
    """Where under `folder` answers are kept: by the output file, or without one by all that decides them."""
    place = digest(str(output.resolve()) if output is not None else json.dumps(fingerprint))[:12]
    return folder / "journal" / f"{output.stem if output is not None else 'rows'}-{place}.jsonl"
