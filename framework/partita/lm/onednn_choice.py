"""The choice between oneDNN and torch's own float32 matrix products, by a measurement on this machine.

Which of them is faster depends on the processor: on two machines of one vendor, oneDNN took half as long and equally
long (docs/decisions/0012-products-on-amd.md). The sums differ in their last digits. So the choice is made once per
machine and model shape and kept in the user's cache folder, as batch sizes are: all processes on a machine, and a run
that is resumed there, compute the same sums. Answers do not depend on the choice, because slots recompute near ties.
"""

import hashlib
import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita_schema.sealed import sealed, unsealed
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
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_text(json.dumps(sealed(document), indent=1), encoding="utf8")
            os.link(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except FileExistsError:
        pass
    except OSError as error:
        logger.info("matrix products stay with torch, because their measurement cannot be kept: %s", error)
