"""What a batch size depends on: the model with its settings, the device, and the kind of work."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from partita.lm.base import GenerationOptions, GenerativeModel
from partita.runs.manifest import versions
from partita_schema.config import Config
from partita_trainers.batch_size.cache import bucket
from partita_trainers.batch_size.memory import DeviceMemory
from partita_trainers.batch_size.probe import Probe

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")
NOT_OF_A_STEP = {
    "batch_size",
    "eval_batch_size",
    "epochs",
    "max_steps",
    "learning_rate",
    "learning_rate_scheduler",
    "early_stop",
    "validation_metric",
    "evaluate_generated",
    "max_generated_rows",
    "evaluations_per_epoch",
    "steps_per_evaluation",
    "skip_all_evaluation",
    "checkpoints_per_epoch",
    "steps_per_checkpoint",
    "minutes_per_checkpoint",
    "keep_checkpoints",
    "restore_best",
    "evaluate_test",
    "evaluate_base",
}
"""Keys of the trainer on which neither the memory nor the time of a training step depends."""
ROWS_THAT_COUNT = 4096
"""Data with more rows than this is treated alike when a size is chosen."""


class TunedPipeline(Protocol):
    """What sizes are found for, for example a `LocalPipeline`."""

    @property
    def config(self) -> Config:
        """The config."""

    @property
    def folder(self) -> Path:
        """Folder that relative paths refer to."""

    @property
    def lm(self) -> GenerativeModel:
        """The model."""

    @property
    def generation(self) -> GenerationOptions:
        """Generation settings."""

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of new tokens."""


def size_key(
    pipeline: TunedPipeline,
    probe: Probe,
    memory: DeviceMemory,
    *,
    options: Sequence[Any],
    max_rows: int | None,
    with_training_state: bool,
) -> dict[str, Any]:
    """Return everything that determines a size, as JSON.

    Args:
        pipeline: Config, model and generation settings.
        probe: Measures sizes.
        memory: The memory of the device.
        options: Further settings that affect the size.
        max_rows: Upper limit of the size.
        with_training_state: Whether the optimizer state is on the device.
    """
    config, lm = pipeline.config, pipeline.lm
    sections = ("base_model", "model_parameters", "adapter", "quantization", "trust_remote_code")
    trainer = config.trainer.model_dump(mode="json", include={"memory_budget", "gradient_checkpointing"})
    if probe.purpose == "training":
        trainer = config.trainer.model_dump(mode="json", exclude=NOT_OF_A_STEP)
    volume = probe.volume(1)
    usual = volume.tokens // max(1, volume.rows or volume.batches)
    installed = versions()
    return {
        "purpose": probe.purpose,
        "model": config.model_dump(mode="json", include=set(sections)),
        "folder": str(pipeline.folder),
        "parameters": sum(parameter.numel() for parameter in lm.module.parameters()),
        "dtypes": sorted({str(parameter.dtype) for parameter in lm.module.parameters()}),
        "trainer": trainer,
        "with_training_state": with_training_state,
        "next_to": reward_models(config) if probe.purpose != "training" else [],
        "device": memory.identity,
        "threads": torch.get_num_threads() if lm.device.type == "cpu" else None,
        "versions": {name: installed.get(name) for name in PACKAGES},
        "prompt_tokens": bucket(probe.prompt_tokens),
        "usual_tokens": bucket(usual),
        "new_tokens": probe.new_tokens,
        "rows": min(probe.max_rows, ROWS_THAT_COUNT).bit_length(),
        "max_rows": max_rows,
        "options": list(options),
    }


def reward_models(config: Config) -> list[str]:
    """Return the reward models that a file names, which are on the device while it generates."""
    checker = config.simulation.checker if config.simulation is not None else None
    return [name for name in (config.generation.reward, checker and checker.model) if name]
