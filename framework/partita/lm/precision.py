"""Trained float32 layers inside a 16-bit model, and the choice of the faster dtype."""

import logging
from statistics import median
from typing import Any

import torch
from torch import nn

from partita.lm.onednn_linear import use_onednn, using_onednn
from partita_trainers.batch_size.clock import now

logger = logging.getLogger(__name__)

WORTH_ROUNDING = 1.2
"""Minimum speedup in bfloat16 that outweighs its rounding."""


def faster_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if matrix products are clearly faster in it than in float32, else float32."""
    seconds = {dtype: product_seconds(dtype, device=device) for dtype in (torch.float32, torch.bfloat16)}
    times = seconds[torch.float32] / seconds[torch.bfloat16]
    chosen = torch.bfloat16 if times >= WORTH_ROUNDING else torch.float32
    logger.info("dtype: products of matrices are %.2f times as fast in bfloat16: %s", times, str(chosen)[6:])
    return chosen


def product_seconds(dtype: torch.dtype, *, device: torch.device) -> float:
    """Return the seconds of a product of 64 rows with a layer of 1024 x 1024, the median of a few."""
    layer = nn.Linear(1024, 1024, bias=False, dtype=dtype, device=device)
    use_onednn(layer)
    rows = torch.ones(64, 1024, dtype=dtype, device=device)
    seconds = []
    with torch.no_grad(), using_onednn():
        for _ in range(7):
            started = now(device)
            layer(rows)
            seconds.append(now(device) - started)
    return median(seconds[2:])


def bridge_types(module: nn.Module, *, dtype: torch.dtype) -> None:
    """Convert inputs and outputs of float32 copies of whole layers (norms, `modules_to_save`) from and to `dtype`.

    Low-rank adapters do not need this: peft converts around them.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return
    for layer in whole_layers(module):
        layer.register_forward_pre_hook(lambda _, inputs: convert(inputs, torch.float32))
        layer.register_forward_hook(lambda _, inputs, output: convert(output, dtype))


def whole_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers that peft copied to train them in full."""
    holders = ("modules_to_save", "ln_tuning_layers")
    layers: list[nn.Module] = []
    for layer in module.modules():
        for holder in holders:
            copies = getattr(layer, holder, None)
            if isinstance(copies, nn.ModuleDict):
                layers.extend(copies.values())
    return layers


def convert(value: Any, dtype: torch.dtype) -> Any:
    """Convert floating-point tensors, also inside tuples; return other values unchanged."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return tuple(convert(part, dtype) for part in value) if isinstance(value, tuple) else value
