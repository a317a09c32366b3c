"""What a file may not say where the processes share the weights of a model: what needs all of them at once."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from partita_schema.adapter import AdaloraAdapter
from partita_schema.backend import RayBackend, TorchrunBackend
from partita_schema.batching import TokenBudgetBatching
from partita_schema.trainer import FinetuneTrainer

if TYPE_CHECKING:
    from partita_schema.config import Config

ELEMENTWISE = ("adamw", "adam", "sgd", "schedule_free_adamw")
"""Optimizers that change each number by itself, and so work on a part of a matrix as they do on the whole."""

Refusal = tuple[str, str]
"""A key of the file, and why it cannot stand there and what to write instead."""


def refused_by_sharding(config: "Config") -> Iterator[Refusal]:
    """Every key that has no place beside `sharding: full`."""
    if not isinstance(config.backend, TorchrunBackend | RayBackend) or config.backend.sharding == "none":
        return
    if not isinstance(config.trainer, FinetuneTrainer):
        told = "only training shares the weights of a model"
        yield "backend.sharding", f"{told}, and trainer.type is {config.trainer.type}; remove it"
        return
    yield from refused_models(config)
    yield from refused_training(config, config.trainer)


def refused_models(config: "Config") -> Iterator[Refusal]:
    """Models whose weights are not plain numbers."""
    if config.quantization is not None:
        told = "quantized weights cannot be cut into parts"
        yield "quantization", f"{told}; remove backend.sharding, or quantization"
    if isinstance(config.adapter, AdaloraAdapter):
        yield "adapter.type", "adalora looks at whole matrices; write lora, or remove backend.sharding"


def refused_training(config: "Config", trainer: FinetuneTrainer) -> Iterator[Refusal]:
    """What a trainer does with the whole model."""
    if wants_size(config, trainer):
        told = "a process whose memory ends would leave the others waiting for its part of the weights"
        yield "trainer.batch_size", f"auto cannot try sizes beside backend.sharding: {told}; write a number"
    if trainer.learning_rate == "auto":
        told = "auto puts back the whole model after its search"
        yield "trainer.learning_rate", f"{told}; write a number beside backend.sharding"
    if trainer.optimizer.type not in ELEMENTWISE:
        names = ", ".join(ELEMENTWISE)
        yield "trainer.optimizer.type", f"backend.sharding goes with {names}; write one of them"
    if trainer.mixed_precision == "fp16":
        yield "trainer.mixed_precision", "fp16 does not go with backend.sharding; write bf16 or no"
    if trainer.compile:
        yield "trainer.compile", "compile does not go with backend.sharding; remove one of them"


def wants_size(config: "Config", trainer: FinetuneTrainer) -> bool:
    """Whether the size of a batch of training is to be found."""
    batching = config.data.batching
    if isinstance(batching, TokenBudgetBatching):
        return batching.max_tokens == "auto"
    return trainer.batch_size == "auto"
