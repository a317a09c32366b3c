"""Linear layers in float32 computed by oneDNN, where a measurement on this machine shows that they are faster.

torch multiplies float32 matrices with MKL, which does not use AVX-512 on processors of other vendors than Intel.
oneDNN, which is part of torch, does: on some of them a layer then takes less than half the time, on others equally long
(docs/decisions/0012-products-on-amd.md). Weights are neither copied nor repacked. The products are float32 sums in
another order, so their last digits differ. The choice is therefore made once per machine and model shape and kept in
the user's cache folder, as batch sizes are: all processes on a machine, and a run that is resumed there, compute the
same sums. Answers do not depend on the choice, because slots recompute near ties.

oneDNN prepares a kernel for each number of rows, which takes a millisecond and one or two megabytes. So it is only used
for row counts with few significant bits, and only by slots, which are filled so that there are few others. The kernel
cache is limited to what a few passes use.

Shapes: N rows, I inputs, O outputs.
"""

import hashlib
import json
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from partita_schema.common.checksums import sealed, unsealed
from partita_trainers.batch_size.cache import Cache
from partita_trainers.batch_size.clock import now
from partita_trainers.batch_size.linux import processor
from partita_trainers.torch_internals import has_onednn_linear, onednn_linear

logger = logging.getLogger(__name__)

FORMAT = 1
"""Increased when the measurement changes."""
SHAPES = 3
"""Number of layer shapes to measure: those with the most weights in the model."""
ROWS = 32
"""Rows of a product, as in a decode step or a short prefill."""
WEIGHTS = 2**20
"""Maximum number of weights of a measured product; a larger layer is measured by its first outputs."""
ROUNDS = 6
"""Number of products per shape and library, in turn; the fastest counts. The first prepares the kernel."""
WORTH = 1.1
"""Minimum ratio of the seconds. Padding to row counts that oneDNN has kernels for takes a part of the gain."""


def onednn_is_faster(layers: Sequence[nn.Linear]) -> bool:
    """Return whether oneDNN multiplies by these float32 CPU layers faster than torch's own products on this machine.

    The first call for these shapes measures for up to 50 ms of CPU time and keeps the result. If it cannot be kept, the
    answer is False, because processes that measure each for itself could disagree.
    """
    available = torch.backends.mkl.is_available() and has_onednn_linear()  # type: ignore[no-untyped-call]
    if not layers or not available:
        return False
    key = machine_key(layers)
    text = json.dumps(key, sort_keys=True)
    folder = Cache.of_user().folder.with_name("matrix_products")
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    kept = load(path, key)
    if kept is None:
        save_first(path, {"key": key, "seconds": measure(layers)})
        kept = load(path, key)
    if kept is None:
        return False
    faster = kept["torch"] > WORTH * kept["onednn"]
    logger.debug(
        "products of %s: torch %.2f ms, oneDNN %.2f ms (%s); %s is used",
        key["shapes"],
        1e3 * kept["torch"],
        1e3 * kept["onednn"],
        path,
        "oneDNN" if faster else "torch",
    )
    return faster


def machine_key(layers: Sequence[nn.Linear]) -> dict[str, Any]:
    """Return everything that the measurement depends on."""
    return {
        "format": FORMAT,
        "processor": [processor(field) for field in ("vendor_id", "cpu family", "model", "model name")],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "shapes": [list(layer.weight.shape) for layer in largest(layers)],
    }


def largest(layers: Sequence[nn.Linear]) -> list[nn.Linear]:
    """Return a layer of each of the shapes that have the most weights together."""
    weights: Counter[tuple[int, ...]] = Counter()
    for layer in layers:
        weights[tuple(layer.weight.shape)] += layer.weight.numel()
    by_shape = {tuple(layer.weight.shape): layer for layer in layers}
    chosen = sorted(weights, key=lambda shape: (-weights[shape], shape))[:SHAPES]
    return [by_shape[shape] for shape in chosen]


@torch.no_grad()
def measure(layers: Sequence[nn.Linear]) -> dict[str, float]:
    """Return the seconds of one product per shape, for each library."""
    libraries: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "torch": nn.functional.linear,
        "onednn": lambda x, weight: onednn_linear(x, weight, None),
    }
    totals = dict.fromkeys(libraries, 0.0)
    for layer in largest(layers):
        weight = layer.weight[: max(1, WEIGHTS // layer.in_features)]
        x = torch.ones(ROWS, layer.in_features)
        seconds: dict[str, list[float]] = {name: [] for name in libraries}
        for _ in range(ROUNDS):
            for name, multiply in libraries.items():
                started = now(x.device)
                multiply(x, weight)
                seconds[name].append(now(x.device) - started)
        for name, times in seconds.items():
            totals[name] += min(times)
    return totals


def load(path: Path, key: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the kept seconds; None if there are none, or the file is damaged, which is then removed."""
    try:
        saved = unsealed(path.read_bytes(), required=True)
        if saved["key"] != key:
            return None
        return {name: float(saved["seconds"][name]) for name in ("torch", "onednn")}
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.info("the measurement of matrix products in %s cannot be read: %s", path, error)
        return None
    except (ValueError, TypeError, KeyError) as error:
        logger.info("the measurement of matrix products in %s is made again: %s", path, error)
        path.unlink(missing_ok=True)
        return None


def save_first(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document, unless another process has written one: the first of concurrent writers wins."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps(sealed(document), indent=1), encoding="utf8")
            os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except FileExistsError:
        pass
    except OSError as error:
        logger.info("matrix products stay with torch, because their measurement cannot be kept: %s", error)


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
        if small or other or round_up(rows) != rows:
            return super().forward(x)
        return onednn_linear(x, self.weight, self.bias)


def keep_few_kernels() -> None:
    """Limit oneDNN's kernel cache, unless the user has set it; oneDNN reads the variable at its first kernel."""
    if not any(name in os.environ for name in KERNEL_VARIABLES):
        os.environ[KERNEL_VARIABLES[0]] = str(KERNELS)


def round_up(rows: int) -> int:
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
