"""Measures whether torch or oneDNN multiplies matrices faster on this machine, and keeps the result.

torch multiplies float32 matrices with MKL, which does not use AVX-512 on processors of other vendors than Intel.
oneDNN, which is part of torch, does: on some of them a layer then takes less than half the time, on others equally long
(docs/decisions/0012-products-on-amd.md). Packed weights, in oneDNN's own layout, save it more work. The products are
float32 sums in another order, so their last digits differ. The choice is therefore made once per machine and model
shape and recorded in the cache directory of the user, as batch sizes are: all processes on a machine, and a run that is
resumed there, compute the same sums.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from partita.lm.measurement_cache import cache_path, cached_measurement, cpu_description
from partita.lm.packed_weight import LAYOUT_ROWS
from partita_trainers.batch_size.clock import now
from partita_trainers.torch_internals import (
    has_onednn_linear,
    onednn_has_bfloat16,
    onednn_linear,
    pack_for_onednn,
)

logger = logging.getLogger(__name__)

FORMAT = 3
"""Increased when the measurement changes."""
WORTH = 1.1
"""Minimum ratio of the seconds. Kernels for new row counts, and padding to few of them, take a part of the gain."""


class Library(StrEnum):
    """A way to compute a product."""

    TORCH = "torch"
    """torch's choice, MKL."""
    ONEDNN = "onednn"
    """oneDNN with plain weights."""
    PACKED = "packed"
    """oneDNN with weights in its own layout."""


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
    libraries: Sequence[Library]
    rows: int
    shapes: int
    """Number of layer shapes: those with the most weights in the model."""
    weights: int
    """Maximum number of weights of a product; a larger layer is measured by its first outputs."""
    layers: int = 1
    """Maximum number of layers of a shape. With several, weights are read from memory, as in a model."""
    rounds: int = 6
    """Number of times that each library computes a product, in turn; the fastest counts. The first prepares the
    kernel."""


DECODING = Measurement([Product.OUTPUT], list(Library), rows=LAYOUT_ROWS, shapes=3, weights=2**20, layers=4, rounds=4)
"""A decode step or a short prefill."""
TRAINING = Measurement(list(Product), [Library.TORCH, Library.ONEDNN], rows=256, shapes=6, weights=2**18)
"""A training step."""

Shape = tuple[int, ...]
Seconds = Mapping[Shape, Mapping[Product, Mapping[str, float]]]
"""Seconds of a product, by the shape [O, I] of the layer, the product and the library."""


def fastest_for_decoding(layers: Sequence[nn.Linear], *, may_pack: bool) -> Library:
    """Return what computes the outputs of these CPU layers fastest, over all measured shapes.

    Args:
        layers: The layers.
        may_pack: Whether their weights may be packed.
    """
    totals = Counter[str]()
    for by_product in measured(layers, DECODING).values():
        totals.update(by_product[Product.OUTPUT])
    best = min([Library.ONEDNN, *([Library.PACKED] if may_pack else [])], key=lambda library: totals[library])
    return best if totals[Library.TORCH] > WORTH * totals[best] else Library.TORCH


def faster_for_training(layers: Sequence[nn.Linear]) -> dict[Shape, frozenset[Product]]:
    """Return which products of float32 CPU layers oneDNN computes faster in training, by the shape of the layer."""
    return {
        shape: frozenset(
            product
            for product, seconds in by_product.items()
            if seconds[Library.TORCH] > WORTH * seconds[Library.ONEDNN]
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
            Product(product): {name: float(seconds) for name, seconds in by_library.items()}
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
        "libraries": list(measurement.libraries),
        "dtype": str(layers[0].weight.dtype),
        "shapes": [list(shape) for shape in largest_shapes(layers, measurement.shapes)],
    }


def largest_shapes(layers: Sequence[nn.Linear], count: int) -> list[Shape]:
    """Return the `count` shapes that have the most weights together."""
    weights: Counter[Shape] = Counter()
    for layer in layers:
        weights[tuple(layer.weight.shape)] += layer.weight.numel()
    return sorted(weights, key=lambda shape: (-weights[shape], shape))[:count]


@torch.no_grad()
def measure(layers: Sequence[nn.Linear], measurement: Measurement) -> list[dict[Product, dict[str, float]]]:
    """Return the seconds of the products of each shape, by the product and the library."""
    seconds = []
    for shape in largest_shapes(layers, measurement.shapes):
        weights = [layer.weight.detach() for layer in layers if tuple(layer.weight.shape) == shape]
        outputs = max(1, measurement.weights // shape[1])
        some = [weight_OI[:outputs] for weight_OI in weights[: measurement.layers]]
        seconds.append({product: product_seconds(product, some, measurement) for product in measurement.products})
    return seconds


def product_seconds(product: Product, weights: Sequence[torch.Tensor], measurement: Measurement) -> dict[str, float]:
    """Return the seconds in which each library computes a product with all weights [O, I], one after the other."""
    outputs, inputs = weights[0].shape
    x_NI, dy_NO = (torch.ones(measurement.rows, size, dtype=weights[0].dtype) for size in (inputs, outputs))
    packed = [pack_for_onednn(one, rows=LAYOUT_ROWS) for one in weights if Library.PACKED in measurement.libraries]

    def compute(multiply: Multiply, weights: Sequence[torch.Tensor]) -> None:
        for weight in weights:
            if product is Product.WEIGHT_GRADIENT:
                multiply(dy_NO, x_NI)
            else:
                multiply(x_NI if product is Product.OUTPUT else dy_NO, weight)

    computations: dict[Library, Callable[[], object]] = {
        Library.TORCH: partial(compute, TORCH[product], weights),
        Library.ONEDNN: partial(compute, ONEDNN[product], weights),
        Library.PACKED: partial(compute, ONEDNN[product], packed),
    }
    wanted: dict[str, Callable[[], object]] = {library: computations[library] for library in measurement.libraries}
    return shortest_seconds(wanted, device=x_NI.device, rounds=measurement.rounds)


def output_seconds(x_NI: torch.Tensor, weight_OI: torch.Tensor, *, rounds: int) -> float:
    """Return the seconds of x W^T by the fastest library."""
    computations: dict[str, Callable[[], object]] = {Library.TORCH: partial(nn.functional.linear, x_NI, weight_OI)}
    if x_NI.device.type == "cpu" and (has_onednn_linear() if x_NI.dtype == torch.float32 else onednn_has_bfloat16()):
        packed = pack_for_onednn(weight_OI, rows=LAYOUT_ROWS)
        computations[Library.ONEDNN] = partial(onednn_linear, x_NI, weight_OI, None)
        computations[Library.PACKED] = partial(onednn_linear, x_NI, packed, None)
    return min(shortest_seconds(computations, device=x_NI.device, rounds=rounds).values())


def shortest_seconds(
    computations: Mapping[str, Callable[[], object]], *, device: torch.device, rounds: int
) -> dict[str, float]:
    """Return the seconds of each computation: the shortest of several rounds, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in computations}
    for _ in range(rounds):
        for name, compute in computations.items():
            started = now(device)
            compute()
            seconds[name].append(now(device) - started)
    return {name: min(times) for name, times in seconds.items()}
