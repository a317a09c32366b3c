"""Products of matrices in float32, by the library that uses all of the processor.

torch multiplies float32 matrices by MKL, which on processors of other makers than its own leaves the widest vectors
unused. oneDNN, which torch has as well, uses them: with 512-bit units a layer takes less than half the time. No weight
is copied or repacked, and the sums are float32 sums in another order.

oneDNN prepares a kernel for each number of rows, which takes a millisecond and one or two megabytes. It is therefore
only asked for numbers with few digits, and only by slots, which are filled so that there are few others; and no more
kernels are kept than a few passes use.

Shapes: N rows, I inputs, O outputs.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from partita_trainers.batch_size.linux import processor

DIGITS = 4
"""Binary digits of the numbers of rows that kernels are prepared for."""
KERNELS = 32
"""Kernels that are kept. The library's own 1,024 would be gigabytes that no probe for memory has seen."""
KERNEL_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")

current = threading.local()


class Least(NamedTuple):
    """From which sizes on a call of oneDNN is worth what it costs beside the work."""

    rows: int = 4
    products: int = 2**21
    """Multiplications of a call."""
    weights: int = 2**14
    """Weights of a layer; with fewer, no number of rows makes it worth it."""


LEAST = Least()


@contextmanager
def using_onednn(on: bool = True) -> Iterator[None]:
    """Inside, layers compute in this way, if it is `on`."""
    before = getattr(current, "on", False)
    current.on = on
    try:
        yield
    finally:
        current.on = before


class OneDnnLinear(nn.Linear):
    """A linear layer whose products are oneDNN's inside `wide_products`, where they are many and need no gradient."""

    least: Least
    """Set by `widen`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b [..., O]."""
        if not getattr(current, "on", False):
            return super().forward(x)
        rows = x.numel() // max(1, self.in_features)
        small = rows < self.least.rows or rows * self.weight.numel() < self.least.products
        other = torch.is_grad_enabled() or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu")
        if small or other or rounded(rows) != rows:
            return super().forward(x)
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return found


def keep_few_kernels() -> None:
    """Keep fewer kernels, unless the user has said how many; oneDNN asks for it before it makes the first."""
    if not any(name in os.environ for name in KERNEL_VARIABLES):
        os.environ[KERNEL_VARIABLES[0]] = str(KERNELS)


def rounded(rows: int) -> int:
    """The next number of four binary digits and zeros: at most an eighth more."""
    zeros = max(0, rows.bit_length() - DIGITS)
    return -(-rows >> zeros) << zeros


def use_onednn(module: nn.Module) -> int:
    """Let the plain float32 layers on a CPU compute in this way where it is faster; how many there are."""
    return widen(module) if is_faster() else 0


def widen(module: nn.Module, *, least: Least = LEAST) -> int:
    """Let the plain float32 layers on a CPU compute in this way, faster or not; how many there are."""
    plain = [part for part in module.modules() if type(part) is nn.Linear and fits(part, least)]
    for layer in plain:
        layer.__class__ = OneDnnLinear
    wide = [part for part in module.modules() if isinstance(part, OneDnnLinear)]
    for layer in wide:
        layer.least = least
    return len(wide)


def fits(layer: nn.Linear, least: Least) -> bool:
    weight = layer.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= least.weights


@cache
def is_faster() -> bool:
    """Whether the processor has 512-bit vectors that MKL does not use.

    The processor decides and not a measurement, so that a job that is killed and goes on gets the same sums.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or processor("vendor_id") in ("GenuineIntel", None):
        return False
    return hasattr(torch.ops.mkldnn, "_linear_pointwise")
