"""Rules for configurations with `sharding: full`: options that need the whole model in each process."""

from collections.abc import Iterator

from partita_schema.base import Refusal
from partita_schema.sections.adapter import AdaloraAdapter
from partita_schema.sections.backend import RayBackendConfig, TorchrunBackendConfig
from partita_schema.sections.batching import TokenBudgetBatching
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.trainer import FinetuneTrainer

ELEMENTWISE = ("adamw", "adam", "sgd", "schedule_free_adamw")
"""Optimizers that update each weight independently, so sharded parameters give the same result."""


def refused_by_sharding(config: ConfigSections) -> Iterator[Refusal]:
    """Yield every key that conflicts with `sharding: full`."""
    backend = config.run_backend
    if not isinstance(backend, TorchrunBackendConfig | RayBackendConfig) or backend.sharding == "none":
        return
    if not isinstance(config.trainer, FinetuneTrainer):
        reason = "only training shares the weights of a model"
        yield "backend.sharding", f"{reason}, and trainer.type is {config.trainer.type}; remove it"
        return
    yield from refused_models(config)
    yield from refused_training(config, config.trainer)


def refused_models(config: ConfigSections) -> Iterator[Refusal]:
    """Yield model options that cannot be sharded."""
    if config.quantization is not None:
        reason = "quantized weights cannot be cut into parts"
        yield "quantization", f"{reason}; remove backend.sharding, or quantization"
    if isinstance(config.adapter, AdaloraAdapter):
        yield "adapter.type", "adalora looks at whole matrices; write lora, or remove backend.sharding"


def refused_training(config: ConfigSections, trainer: FinetuneTrainer) -> Iterator[Refusal]:
    """Yield trainer options that need the whole model."""
    if wants_size(config, trainer):
        reason = "a process that runs out of memory would leave the others waiting for its part of the weights"
        yield "trainer.batch_size", f"auto cannot try sizes with backend.sharding: {reason}; write a number"
    if trainer.learning_rate == "auto":
        reason = "auto restores the whole model after its search"
        yield "trainer.learning_rate", f"{reason}; write a number with backend.sharding"
    if trainer.optimizer.type not in ELEMENTWISE:
        names = ", ".join(ELEMENTWISE)
        yield "trainer.optimizer.type", f"backend.sharding supports {names}; write one of them"
    if trainer.mixed_precision == "fp16":
        yield "trainer.mixed_precision", "fp16 cannot be combined with backend.sharding; write bf16 or no"
    if trainer.compile:
        yield "trainer.compile", "compile cannot be combined with backend.sharding; remove one of them"


def wants_size(config: ConfigSections, trainer: FinetuneTrainer) -> bool:
    """Return whether the training batch size is chosen automatically."""
    batching = config.data.batching
    if isinstance(batching, TokenBudgetBatching):
        return batching.max_tokens == "auto"
    return trainer.batch_size == "auto"
