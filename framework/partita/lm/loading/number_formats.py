"""The number format of a model's weights, chosen by how fast matrix products are in it on this machine.

`dtype: fastest` takes bfloat16 where it is clearly faster than float32. The quantization to int8 converts the layers
whose shape is clearly faster than in the dtype of the model, on average over a decode step and a prefill, and not
clearly slower in either. Measurements are kept, because answers depend on the choice: all processes on a machine, and a
job that is resumed there, use the same formats.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from partita.lm.checks.shared_inputs import shared_inputs
from partita.lm.products.int8_linear import Int8Library, Int8Linear, available_libraries, int8_layers, to_int8
from partita.lm.products.measurement_cache import cache_path, cached_measurement, cpu_description
from partita.lm.products.speed import Shape, output_computations, shortest_seconds
from partita_schema.common.text import counted
from partita_schema.sections.quantization import DynamicInt8Quantization

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

FORMAT = 6
"""Increased when the measurement changes."""
FLOAT32 = "float32"
"""Name of the format in measurements."""
FOLDER = "number_formats"
"""Folder of the measurements in the cache directory of the user."""
INT8_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of models that may have int8 layers."""
WORTH_ROUNDING = 1.2
"""Minimum speedup in bfloat16 that outweighs its rounding."""
WORTH_INT8 = 1.2
"""Minimum speedup of a layer in int8 that outweighs its rounding."""
LEAST_INT8 = 0.8
"""Minimum speedup in int8 for each number of rows."""
ROWS = (128, 512)
"""Rows of the products that are measured in int8, as in a job of many rows: a decode step, and a prefill."""
NO_KERNEL = 1e6
"""Seconds recorded for a library that cannot compute a product."""
MAX_WEIGHTS = 2**21
"""Maximum number of weights of a product; a larger layer is measured by its first outputs."""
ROUNDS = 9
"""Number of times that each format computes a product, in turn; the fastest counts."""


class Int8Speed(NamedTuple):
    """The speed of a layer in int8."""

    library: Int8Library
    """The faster library."""
    speedup: float
    """How many times as fast the layer is as in the dtype of the model."""


class LayerGroup(NamedTuple):
    """Layers with the same inputs, dtype and device."""

    layers: Sequence[nn.Linear]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.layers[0].weight.dtype

    @property
    def shape(self) -> Shape:
        """The shape [O, I] of the weights together."""
        return sum(layer.out_features for layer in self.layers), self.layers[0].in_features


class ChosenDtype(NamedTuple):
    """The result of `dtype: fastest`."""

    dtype: torch.dtype
    times: float | None
    """How many times as fast products are in bfloat16 as in float32; None if it was not measured."""

    @property
    def text(self) -> str:
        """The choice with its reason."""
        reason = "the measurement cannot be recorded"
        if self.times is not None:
            reason = f"matrix products are {self.times:.2f} times as fast in bfloat16 as in float32"
        return f"{dtype_name(self.dtype)}: {reason}"


def faster_dtype(device: torch.device) -> ChosenDtype:
    """Return bfloat16 if matrix products are clearly faster in it than in float32, else float32."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    key = {"format": FORMAT, **cpu_description(), "device": name, "formats": [FLOAT32, "bfloat16"]}
    seconds = cached_measurement(
        cache_path(FOLDER, key),
        key,
        measure=lambda: {
            dtype_name(dtype): dtype_seconds(dtype, device=device) for dtype in (torch.float32, torch.bfloat16)
        },
        read=lambda saved: (float(saved[FLOAT32]), float(saved["bfloat16"])),
        fallback="dtype: fastest means float32",
    )
    times = None if seconds is None else seconds[0] / seconds[1]
    faster = times is not None and times >= WORTH_ROUNDING
    chosen = ChosenDtype(torch.bfloat16 if faster else torch.float32, times)
    logger.info("dtype: %s", chosen.text)
    return chosen


def number_format(base: "PreTrainedModel") -> dict[str, Any]:
    """Return the number format of a base model for a manifest: its dtype, and the number of layers in int8."""
    return {"dtype": dtype_name(base.dtype), "int8_layers": len(int8_layers(base))}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files and messages."""
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def dtype_seconds(dtype: torch.dtype, *, device: torch.device) -> float:
    """Return the seconds of a product of 64 rows with a layer of 1024 x 1024."""
    weight_OI, x_NI = (torch.ones(size, 1024, dtype=dtype, device=device) for size in (1024, 64))
    return min(shortest_seconds(output_computations(x_NI, weight_OI), device=device, rounds=ROUNDS).values())


def quantize_faster_layers(
    base: "PreTrainedModel", layers: Mapping[str, nn.Linear], section: DynamicInt8Quantization
) -> int:
    """Convert layers to int8 whose shape is faster in it on this machine, and log which.

    Layers with the same inputs are computed and measured as one.

    Args:
        base: The base model.
        layers: Its linear layers, by name.
        section: The section of the file.

    Returns:
        The number of converted layers.
    """
    wanted = {name: layer for name, layer in layers.items() if can_be_int8(layer) and not is_skipped(name, section)}
    groups = [LayerGroup([wanted[name] for name in names]) for names in shared_inputs(base, wanted)]
    speeds: dict[tuple[torch.dtype, Shape], Int8Speed] = {}
    for dtype in INT8_DTYPES:
        shapes = {group.shape for group in groups if group.dtype == dtype}
        speeds |= {(dtype, shape): speed for shape, speed in int8_speeds(sorted(shapes), dtype).items()}
    slower: Counter[tuple[str, str]] = Counter()
    for group in groups:
        speed = speeds.get((group.dtype, group.shape))
        if speed is not None and speed.speedup >= WORTH_INT8:
            to_int8(group.layers, speed.library)
        else:
            slower.update((layer_text(layer), why_not_int8(is_recorded=speed is not None)) for layer in group.layers)
    converted = len(wanted) - slower.total()
    logger.info("quantization: %s of %s in int8", f"{converted:,}", counted(len(wanted), "linear layer"))
    for (layer, reason), count in slower.items():
        logger.info("quantization: %s of %s: %s on this machine", counted(count, "layer"), layer, reason)
    return converted


def layer_text(layer: nn.Linear) -> str:
    """Return the shape and dtype of a layer."""
    return f"{layer.in_features:,} x {layer.out_features:,} in {dtype_name(layer.weight.dtype)}"


def why_not_int8(*, is_recorded: bool) -> str:
    """Return why a layer is not in int8, given whether its speed is recorded."""
    if is_recorded:
        return "not clearly faster in int8"
    return "its speed in int8 cannot be recorded" if available_libraries() else "int8 products are not available"


def can_be_int8(layer: nn.Module) -> bool:
    """Return whether a layer is a linear layer on a CPU, with a weight in one of `INT8_DTYPES`."""
    plain = isinstance(layer, nn.Linear) and not isinstance(layer, Int8Linear)
    return plain and layer.weight.device.type == "cpu" and layer.weight.dtype in INT8_DTYPES


def is_skipped(name: str, section: DynamicInt8Quantization) -> bool:
    """Return whether the section names the module, or one that it is in."""
    return any(skipped == name or skipped in name.split(".") for skipped in section.skip_modules)


def int8_speeds(shapes: Sequence[Shape], dtype: torch.dtype) -> dict[Shape, Int8Speed]:
    """Return the speed in int8 of layers of these shapes [O, I] in a model of this dtype.

    The result is empty if int8 is not available or the measurement cannot be recorded.
    """
    libraries = available_libraries()
    if not shapes or not libraries:
        return {}
    key = {
        "format": FORMAT,
        **cpu_description(),
        "rows": list(ROWS),
        "formats": [dtype_name(dtype), *(library.name for library in libraries)],
        "shapes": list(map(list, shapes)),
    }
    found = cached_measurement(
        cache_path(FOLDER, key),
        key,
        measure=lambda: [[format_seconds(shape, dtype, libraries, rows=rows) for rows in ROWS] for shape in shapes],
        read=lambda saved: {
            shape: fastest_library(libraries, by_rows, dtype) for shape, by_rows in zip(shapes, saved, strict=True)
        },
        fallback=f"linear layers stay in {dtype_name(dtype)}",
    )
    for shape, speed in (found or {}).items():
        times = f"{speed.speedup:.2f} times as fast in int8 by {speed.library.name} as in {dtype_name(dtype)}"
        logger.debug("layers of shape %s: %s", list(shape), times)
    return found or {}


def fastest_library(
    libraries: Sequence[Int8Library], by_rows: Sequence[Mapping[str, float]], dtype: torch.dtype
) -> Int8Speed:
    """Return the library with the largest speedup, given seconds by the format, for each number of rows."""
    speeds = [
        Int8Speed(library, mean_speedup([seconds[dtype_name(dtype)] / seconds[library.name] for seconds in by_rows]))
        for library in libraries
    ]
    return max(speeds, key=lambda speed: speed.speedup)


def mean_speedup(speedups: Sequence[float]) -> float:
    """Return the geometric mean of speedups, or the smallest one if it is too small."""
    return geometric_mean(speedups) if min(speedups) >= LEAST_INT8 else min(speedups)


@torch.no_grad()
def format_seconds(
    shape: Shape, dtype: torch.dtype, libraries: Sequence[Int8Library], *, rows: int
) -> dict[str, float]:
    """Return the seconds of a layer in the dtype of the model, by the fastest library, and in int8 by each library.

    Args:
        shape: Shape [O, I] of the layer.
        dtype: Dtype of its weight and inputs.
        libraries: Libraries that compute it in int8.
        rows: Number of rows.
    """
    outputs, inputs = shape
    weight_OI = torch.randn(max(1, min(outputs, MAX_WEIGHTS // inputs)), inputs).to(dtype)
    x_NI = torch.ones(rows, inputs, dtype=dtype)
    in_int8: dict[str, Callable[[], object]] = {}
    for library in libraries:
        layer = int8_layer(weight_OI, library)
        try:
            layer(x_NI)
        except RuntimeError as error:
            logger.debug("no int8 product of %s rows with %s by %s: %s", rows, shape, library.name, error)
        else:
            in_int8[library.name] = partial(layer, x_NI)
    plain = output_computations(x_NI, weight_OI)
    seconds = shortest_seconds(plain | in_int8, device=x_NI.device, rounds=ROUNDS)
    return {
        dtype_name(dtype): min(seconds[name] for name in plain),
        **{library.name: seconds.get(library.name, NO_KERNEL) for library in libraries},
    }


def int8_layer(weight_OI: torch.Tensor, library: Int8Library) -> nn.Linear:
    """Return a layer with this weight in int8."""
    layer = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight_OI)
    to_int8([layer], library)
    return layer
