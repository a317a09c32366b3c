"""Measures which implementation multiplies matrices fastest on this machine, and records the result.

torch multiplies float32 matrices with MKL, which does not use AVX-512 on processors of other vendors than Intel.
oneDNN, which is part of torch, does: on some of them a layer then takes less than half the time, on others equally long
(docs/decisions/0012-products-on-a-cpu.md). Copies of the weights save both libraries work: in oneDNN's own layout, or
stored by column for MKL. The products are float32 sums in another order, so their last digits differ. The choice is
therefore made once per machine and model shape and recorded in the cache directory of the user, as batch sizes are: all
processes on a machine, and a run that is resumed there, train with the same sums. In decoding, they may differ if
weights can be copied in one process and not in another; tokens do not depend on it.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from partita.lm.products.measurement_cache import cache_path, cached_measurement, cpu_description
from partita.lm.products.product import LAYOUT_ROWS, ONEDNN, TORCH, Implementation, Multiply, Product
from partita_trainers.batch_size.clock import now
from partita_trainers.libraries.torch_internals import has_onednn_linear, onednn_has_bfloat16

logger = logging.getLogger(__name__)

FORMAT = 5
"""Increased when the measurement changes."""
WORTH = 1.1
"""Minimum ratio of the seconds. Kernels for new row counts, and padding to few of them, take a part of the gain."""


class Measurement(NamedTuple):
    """What is measured."""

    products: Sequence[Product]
    implementations: Sequence[Implementation]
    rows: int
    shapes: int
    """Number of layer shapes: those with the most weights in the model."""
    weights: int
    """Maximum number of weights of a product; a larger layer is measured by its first outputs."""
    layers: int = 1
    """Maximum number of layers of a shape. With several, weights are read from memory, as in a model."""
    rounds: int = 6
    """Number of times that each implementation computes a product, in turn; the fastest counts. The first prepares the
    kernel."""


DECODING = Measurement([Product.OUTPUT], list(Implementation), rows=256, shapes=3, weights=2**18, layers=4)
"""Decode steps and prefill passes in float32. Fewer rows are faster in other ways, and vary more when measured."""
PACKING = Measurement(
    [Product.OUTPUT], list(Implementation), rows=LAYOUT_ROWS, shapes=3, weights=2**20, layers=4, rounds=4
)
"""All passes in bfloat16, down to single rows, for which packed weights gain most."""
TRAINING = Measurement(list(Product), [Implementation.TORCH, Implementation.ONEDNN], rows=256, shapes=6, weights=2**18)
"""A training step."""

Shape = tuple[int, ...]
Seconds = Mapping[Shape, Mapping[Product, Mapping[str, float]]]
"""Seconds of a product, by the shape [O, I] of the layer, the product and the implementation."""


def fastest_for_decoding(layers: Sequence[nn.Linear], allowed: Sequence[Implementation]) -> Implementation:
    """Return what computes the outputs of these CPU layers fastest, over all measured shapes.

    Args:
        layers: The layers.
        allowed: Implementations to use instead of `TORCH` if one of them is clearly faster.
    """
    measurement = PACKING if layers and layers[0].weight.dtype == torch.bfloat16 else DECODING
    totals = Counter[str]()
    for by_product in measured(layers, measurement).values():
        totals.update(by_product[Product.OUTPUT])
    best = min(allowed, key=lambda implementation: totals[implementation])
    return best if totals[Implementation.TORCH] > WORTH * totals[best] else Implementation.TORCH


def faster_for_training(layers: Sequence[nn.Linear]) -> dict[Shape, frozenset[Product]]:
    """Return which products of float32 CPU layers oneDNN computes faster in training, by the shape of the layer."""
    return {
        shape: frozenset(
            product
            for product, seconds in by_product.items()
            if seconds[Implementation.TORCH] > WORTH * seconds[Implementation.ONEDNN]
        )
        for shape, by_product in measured(layers, TRAINING).items()
    }


def measured(layers: Sequence[nn.Linear], measurement: Measurement) -> Seconds:
    """Return the seconds of products on this machine.

    The first call for these shapes measures for up to 0.4 s of CPU time and records the result. If it cannot be
    recorded, the result is empty, because processes that measure each for itself could disagree.
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
        read=lambda saved: parse_seconds(saved, shapes=key["shapes"], measurement=measurement),
        fallback="matrix products stay with torch",
    )
    if seconds is None:
        return {}
    logger.debug("seconds of products of %s (%s): %s", key["shapes"], path, seconds)
    return seconds


def parse_seconds(
    saved: Sequence[Mapping[str, Mapping[str, float]]], *, shapes: Sequence[Sequence[int]], measurement: Measurement
) -> Seconds:
    """Return recorded seconds by the shape of the layer.

    Args:
        saved: What was recorded for each shape.
        shapes: The shapes.
        measurement: What was measured.

    Raises:
        KeyError: A product or an implementation is missing.
    """
    return {
        tuple(shape): {
            product: {name: float(by_product[product][name]) for name in measurement.implementations}
            for product in measurement.products
        }
        for shape, by_product in zip(shapes, saved, strict=True)
    }


def machine_key(layers: Sequence[nn.Linear], measurement: Measurement) -> dict[str, Any]:
    """Return everything that the measurement depends on."""
    shapes = largest_shapes(layers, measurement.shapes)
    return {
        "format": FORMAT,
        **cpu_description(),
        "rows": measurement.rows,
        "products": list(measurement.products),
        "implementations": list(measurement.implementations),
        "dtype": str(layers[0].weight.dtype),
        "shapes": list(map(list, shapes)),
        "layers": [len(weights_of(layers, shape, measurement)) for shape in shapes],
    }


def largest_shapes(layers: Sequence[nn.Linear], count: int) -> list[Shape]:
    """Return the `count` shapes that have the most weights together."""
    weights: Counter[Shape] = Counter()
    for layer in layers:
        weights[tuple(layer.weight.shape)] += layer.weight.numel()
    return sorted(weights, key=lambda shape: (-weights[shape], shape))[:count]


def weights_of(layers: Sequence[nn.Linear], shape: Shape, measurement: Measurement) -> list[torch.Tensor]:
    """Return the weights [O, I] of this shape that are measured, with the first outputs of large ones."""
    outputs = max(1, measurement.weights // shape[1])
    found = [layer.weight.detach()[:outputs] for layer in layers if tuple(layer.weight.shape) == shape]
    return found[: measurement.layers]


@torch.no_grad()
def measure(layers: Sequence[nn.Linear], measurement: Measurement) -> list[dict[Product, dict[str, float]]]:
    """Return the seconds of the products of each shape, by the product and the implementation."""
    return [
        {
            product: product_seconds(product, weights_of(layers, shape, measurement), measurement)
            for product in measurement.products
        }
        for shape in largest_shapes(layers, measurement.shapes)
    ]


def product_seconds(product: Product, weights: Sequence[torch.Tensor], measurement: Measurement) -> dict[str, float]:
    """Return the seconds in which each implementation computes a product with all weights [O, I], in sequence."""
    outputs, inputs = weights[0].shape
    x_NI, dy_NO = (torch.ones(measurement.rows, size, dtype=weights[0].dtype) for size in (inputs, outputs))
    left_NK = x_NI if product is Product.OUTPUT else dy_NO

    def compute(multiply: Multiply, factors: Sequence[torch.Tensor]) -> None:
        for factor in factors:
            multiply(left_NK, factor)

    factors = [x_NI] * len(weights) if product is Product.WEIGHT_GRADIENT else weights
    computations: dict[str, Callable[[], object]] = {
        Implementation.TORCH: partial(compute, TORCH[product], factors),
        Implementation.ONEDNN: partial(compute, ONEDNN[product], factors),
    }
    for one in measurement.implementations:
        if one.copies_weights:
            computations[one] = partial(compute, one.multiply, [one.copy(weight_OI) for weight_OI in weights])
    return shortest_seconds(computations, device=x_NI.device, rounds=measurement.rounds)


def output_computations(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the computations of x W^T that are available for this device and dtype, by the implementation."""
    available = [Implementation.TORCH]
    if x_NI.device.type == "cpu" and (has_onednn_linear() if x_NI.dtype == torch.float32 else onednn_has_bfloat16()):
        available = list(Implementation)
    return {one: partial(one.multiply, x_NI, one.copy(weight_OI)) for one in available}


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
