"""Measures whether torch or oneDNN multiplies float32 matrices faster on this machine, and keeps the result.

torch multiplies float32 matrices with MKL, which does not use AVX-512 on processors of other vendors than Intel.
oneDNN, which is part of torch, does: on some of them a layer then takes less than half the time, on others equally long
(docs/decisions/0012-products-on-amd.md). The products are float32 sums in another order, so their last digits differ.
The choice is therefore made once per machine and model shape and recorded in the cache directory of the user, as batch
sizes are: all processes on a machine, and a run that is resumed there, compute the same sums.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import nn

from partita.lm.measurement_cache import cache_path, cached_measurement, cpu_description
from partita_trainers.batch_size.clock import now
from partita_trainers.torch_internals import has_onednn_linear, onednn_linear

logger = logging.getLogger(__name__)

FORMAT = 2
"""Increased when the measurement changes."""
WORTH = 1.1
"""Minimum ratio of the seconds. Kernels for new row counts, and padding to few of them, take a part of the gain."""


class Product(StrEnum):
    """A product of a linear layer y = x W^T with N rows, I inputs and O outputs."""

    OUTPUT = "output"
    """x [N, I] by W [O, I]: y."""
    INPUT_GRADIENT = "input gradient"
    """dy [N, O] by W: dx."""
    WEIGHT_GRADIENT = "weight gradient"
    """dy by x: dW."""


Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

TORCH: Mapping[Product, Multiply] = {
    Product.OUTPUT: nn.functional.linear,
    Product.INPUT_GRADIENT: lambda dy_NO, weight_OI: dy_NO @ weight_OI,
    Product.WEIGHT_GRADIENT: lambda dy_NO, x_NI: dy_NO.t() @ x_NI,
}
ONEDNN: Mapping[Product, Multiply] = {
    Product.OUTPUT: lambda x_NI, weight_OI: onednn_linear(x_NI, weight_OI, None),
    Product.INPUT_GRADIENT: lambda dy_NO, weight_OI: onednn_linear(dy_NO, weight_OI.t(), None),
    Product.WEIGHT_GRADIENT: lambda dy_NO, x_NI: onednn_linear(dy_NO.t(), x_NI.t(), None),
}


class Measurement(NamedTuple):
    """What is measured."""

    products: Sequence[Product]
    rows: int
    shapes: int
    """Number of layer shapes: those with the most weights in the model."""
    weights: int
    """Maximum number of weights of a product; a larger layer is measured by its first outputs."""
    rounds: int = 6
    """Number of times that each library computes a product, in turn; the fastest counts. The first prepares the
    kernel."""


DECODING = Measurement([Product.OUTPUT], rows=32, shapes=3, weights=2**20)
"""A decode step or a short prefill."""
TRAINING = Measurement(list(Product), rows=256, shapes=6, weights=2**18)
"""A training step."""

Shape = tuple[int, ...]
Seconds = Mapping[Shape, Mapping[Product, Mapping[str, float]]]
"""Seconds of a product, by the shape [O, I] of the layer, the product and the library."""


def faster_for_decoding(layers: Sequence[nn.Linear]) -> bool:
    """Return whether oneDNN computes the outputs of these float32 CPU layers faster, over all measured shapes."""
    seconds = measured(layers, DECODING)
    totals = Counter[str]()
    for by_product in seconds.values():
        totals.update(by_product[Product.OUTPUT])
    return bool(totals) and totals["torch"] > WORTH * totals["onednn"]


def faster_for_training(layers: Sequence[nn.Linear]) -> dict[Shape, frozenset[Product]]:
    """Return which products of float32 CPU layers oneDNN computes faster in training, by the shape of the layer."""
    return {
        shape: frozenset(
            product for product, seconds in by_product.items() if seconds["torch"] > WORTH * seconds["onednn"]
        )
        for shape, by_product in measured(layers, TRAINING).items()
    }


def measured(layers: Sequence[nn.Linear], measurement: Measurement) -> Seconds:
    """Return the seconds of products on this machine.

    The first call for these shapes measures for up to 0.3 s of CPU time and keeps the result. If it cannot be kept, the
    result is empty, because processes that measure each for itself could disagree.
    """
    available = torch.backends.mkl.is_available() and has_onednn_linear()  # type: ignore[no-untyped-call]
    if not layers or not available:
        return {}
    key = machine_key(layers, measurement)
    path = cache_path("matrix_products", key)
    seconds = cached_measurement(
        path,
        key,
        measure=lambda: measure(layers, measurement),
        read=lambda saved: parse_seconds(saved, shapes=key["shapes"]),
        fallback="matrix products stay with torch",
    )
    if seconds is None:
        return {}
    logger.debug("seconds of products of %s (%s): %s", key["shapes"], path, seconds)
    return seconds


def parse_seconds(saved: Sequence[Mapping[str, Mapping[str, float]]], *, shapes: Sequence[Sequence[int]]) -> Seconds:
    """Return recorded seconds by the shape of the layer."""
    return {
        tuple(shape): {
            Product(product): {name: float(by_library[name]) for name in ("torch", "onednn")}
            for product, by_library in by_product.items()
        }
        for shape, by_product in zip(shapes, saved, strict=True)
    }


def machine_key(layers: Sequence[nn.Linear], measurement: Measurement) -> dict[str, Any]:
    """Return everything that the measurement depends on."""
    return {
        "format": FORMAT,
        **cpu_description(),
        "rows": measurement.rows,
        "products": list(measurement.products),
        "shapes": [list(layer.weight.shape) for layer in largest(layers, measurement.shapes)],
    }


def largest(layers: Sequence[nn.Linear], count: int) -> list[nn.Linear]:
    """Return a layer of each of the `count` shapes that have the most weights together."""
    weights: Counter[tuple[int, ...]] = Counter()
    for layer in layers:
        weights[tuple(layer.weight.shape)] += layer.weight.numel()
    by_shape = {tuple(layer.weight.shape): layer for layer in layers}
    chosen = sorted(weights, key=lambda shape: (-weights[shape], shape))[:count]
    return [by_shape[shape] for shape in chosen]


@torch.no_grad()
def measure(layers: Sequence[nn.Linear], measurement: Measurement) -> list[dict[str, dict[str, float]]]:
    """Return the seconds of the products of each shape, by the product and the library."""
    return [
        {product: product_seconds(product, layer, measurement) for product in measurement.products}
        for layer in largest(layers, measurement.shapes)
    ]


def product_seconds(product: Product, layer: nn.Linear, measurement: Measurement) -> dict[str, float]:
    """Return the seconds in which each library computes a product."""
    weight_OI = layer.weight.detach()[: max(1, measurement.weights // layer.in_features)]
    x_NI, dy_NO = (torch.ones(measurement.rows, size) for size in reversed(weight_OI.shape))
    factors = {
        Product.OUTPUT: (x_NI, weight_OI),
        Product.INPUT_GRADIENT: (dy_NO, weight_OI),
        Product.WEIGHT_GRADIENT: (dy_NO, x_NI),
    }[product]
    seconds: dict[str, list[float]] = {"torch": [], "onednn": []}
    for _ in range(measurement.rounds):
        for name, library in (("torch", TORCH), ("onednn", ONEDNN)):
            started = now(weight_OI.device)
            library[product](*factors)
            seconds[name].append(now(weight_OI.device) - started)
    return {name: min(times) for name, times in seconds.items()}
