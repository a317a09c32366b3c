"""Linear layers in float32 computed by oneDNN.

torch multiplies float32 matrices with MKL, which does not use AVX-512 on processors of other vendors than Intel.
oneDNN, which is part of torch, does: on some of them a layer then takes less than half the time, and
`partita.lm.onednn_choice` measures whether this machine is one. Weights are neither copied nor repacked. The products
are float32 sums in another order.

oneDNN prepares a kernel for each number of rows, which takes a millisecond and one or two megabytes. So it is only used
for row counts with few significant bits, and only by slots, which are filled so that there are few others. The kernel
cache is limited to what a few passes use.

Shapes: N rows, I inputs, O outputs.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from partita.lm.onednn_choice import onednn_is_faster
from partita_trainers.torch_internals import onednn_linear

DIGITS = 4
"""Significant bits of the row counts that kernels are prepared for."""
KERNELS = 32
"""Size of the kernel cache. The default of 1,024 would take gigabytes that no memory probe has seen."""
KERNEL_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")

current = threading.local()


class Least(NamedTuple):
    """Minimum sizes for which a call of oneDNN pays off."""

    rows: int = 4
    products: int = 2**21
    """Multiplications of a call."""
    weights: int = 2**14
    """Weights of a layer; with fewer, no number of rows pays off."""


LEAST = Least()


@contextmanager
def using_onednn(on: bool = True) -> Iterator[None]:
    """Enable or disable oneDNN for linear layers in this context."""
    before = getattr(current, "on", False)
    current.on = on
    try:
        yield
    finally:
        current.on = before


class OneDnnLinear(nn.Linear):
    """A linear layer that uses oneDNN inside `using_onednn`, for large products without gradients."""

    least: Least
    """Set by `widen`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b [..., O]."""
        if not getattr(current, "on", False):
            return super().forward(x)
        rows = x.numel() // max(1, self.in_features)
        small = rows < self.least.rows or rows * self.weight.numel() < self.least.products
        other = torch.is_grad_enabled() or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu")
        if small or other or rounded(rows) != rows:
            return super().forward(x)
        return onednn_linear(x, self.weight, self.bias)


def keep_few_kernels() -> None:
    """Limit oneDNN's kernel cache, unless the user has set it; oneDNN reads the variable at its first kernel."""
    if not any(name in os.environ for name in KERNEL_VARIABLES):
        os.environ[KERNEL_VARIABLES[0]] = str(KERNELS)


def rounded(rows: int) -> int:
    """Round up to a number with four significant bits: at most an eighth more."""
    zeros = max(0, rows.bit_length() - DIGITS)
    return -(-rows >> zeros) << zeros


def use_onednn(module: nn.Module) -> int:
    """Enable oneDNN for plain float32 CPU layers if it is faster on this machine; return the number of layers."""
    return widen(module) if onednn_is_faster(plain_layers(module, LEAST)) else 0


def widen(module: nn.Module, *, least: Least = LEAST) -> int:
    """Enable oneDNN for plain float32 CPU layers, even if slower; return the number of layers."""
    for layer in plain_layers(module, least):
        layer.__class__ = OneDnnLinear
    wide = [part for part in module.modules() if isinstance(part, OneDnnLinear)]
    for layer in wide:
        layer.least = least
    return len(wide)


def plain_layers(module: nn.Module, least: Least) -> list[nn.Linear]:
    """Return the plain linear layers that oneDNN can compute."""
    return [part for part in module.modules() if type(part) is nn.Linear and fits(part, least)]


def fits(layer: nn.Linear, least: Least) -> bool:
    """Return whether a layer is a float32 CPU layer of sufficient size."""
    weight = layer.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= least.weights
