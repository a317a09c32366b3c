"""Trained parts in float32 inside a model of 16-bit weights."""

from typing import Any

import torch
from torch import nn


def bridge_types(module: nn.Module, *, dtype: torch.dtype) -> None:
    """Let copies of whole layers that are trained in float32 (norms, `modules_to_save`) take and give `dtype`.

    Low-rank adapters need nothing: peft converts around them.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return
    for layer in whole_layers(module):
        layer.register_forward_pre_hook(lambda _, inputs: convert(inputs, torch.float32))
        layer.register_forward_hook(lambda _, inputs, output: convert(output, dtype))


def whole_layers(module: nn.Module) -> list[nn.Module]:
    """Layers that peft copied to train them in full."""
    holders = ("modules_to_save", "ln_tuning_layers")
    found: list[nn.Module] = []
    for layer in module.modules():
        for holder in holders:
            copies = getattr(layer, holder, None)
            if isinstance(copies, nn.ModuleDict):
                found.extend(copies.values())
    return found


def convert(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in the type, through tuples; anything else as it is."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return tuple(convert(part, dtype) for part in value) if isinstance(value, tuple) else value
