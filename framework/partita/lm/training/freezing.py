"""Frozen parameters and activation checkpointing."""

import logging
import re
from typing import Any

from torch import nn

from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.sections.trainer import FinetuneTrainer

logger = logging.getLogger(__name__)


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def recompute_activations(base: Any) -> None:
    """Enable activation checkpointing without reentrant autograd, which needs inputs that require gradients."""
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def freeze(module: nn.Module, config: Config) -> None:
    """Freeze parameters whose names match `layers_to_freeze_regex`. Raise ModelError if none or all match."""
    pattern = config.trainer.layers_to_freeze_regex if isinstance(config.trainer, FinetuneTrainer) else None
    if pattern is None:
        return
    trained = trained_parameters(module)
    frozen = [name for name in trained if re.search(pattern, name)]
    if not frozen or len(frozen) == len(trained):
        count = "no" if not frozen else "every"
        raise ModelError(
            f"trainer.layers_to_freeze_regex: {pattern} matches {count} trained parameter; "
            f"their names look like {', '.join(list(trained)[:3])}"
        )
    for name in frozen:
        trained[name].requires_grad_(False)
    logger.info("froze %d of %d parameters", len(frozen), len(trained))
