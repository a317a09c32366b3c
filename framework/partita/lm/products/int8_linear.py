"""Linear layers with int8 weights and dynamic quantization of their inputs, for answers on a CPU.

A weight has one scale per output and an input one scale per row, so that the result of a row does not depend on the
other rows. Products are exact sums of integers, computed by FBGEMM or oneDNN, which are parts of torch: both give the
same bits, so the faster one can be used. Only oneDNN uses the matrix units (AMX) of a processor. On processors without
VNNI instructions products are added in pairs in 16 bits, where 255 x 127 + 255 x 127 does not fit. There, weights are
quantized to -63 ... 63.

Shapes: N rows, I inputs, O outputs.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from partita.lm.products.fast_linear import round_up
from partita.lm.products.speed import shortest_seconds
from partita_trainers.libraries.torch_internals import (
    OneDnnInt8Weight,
    fbgemm_int8_linear,
    has_amx,
    has_fbgemm_int8_linear,
    has_onednn_int8_linear,
    onednn_int8_linear,
    pack_int8_for_fbgemm,
    pack_int8_for_onednn,
    unpack_int8_from_fbgemm,
    unpack_int8_from_onednn,
)

logger = logging.getLogger(__name__)

INPUT_LEVELS = 127
"""Largest quantized input."""
WEIGHT_LEVELS = 127
"""Largest quantized weight if products are added in 32 bits."""
WEIGHT_LEVELS_IN_PAIRS = 63
"""Largest quantized weight if pairs of products are added in 16 bits."""
MIN_ABSOLUTE_MAX = 1e-30
"""Lower bound of the largest absolute value in a row, which avoids a division by 0."""
REFERENCE = 100
"""Ratio of seconds of a small product in int8 and in float32 beyond which the library has no kernel for it."""
FEWEST_ROWS = 2
"""Minimum number of rows of oneDNN: a single one takes a hundred times as long in some shapes (torch 2.13)."""


class Int8Library(ABC):
    """A library that computes products of int8 inputs and weights."""

    name: str

    @abstractmethod
    def is_available(self) -> bool:
        """Return whether this build of torch has the library."""

    @abstractmethod
    def pack(self, weight_OI: torch.Tensor, scale_O: torch.Tensor) -> Any:
        """Quantize a float32 weight by its scales, and return it packed for the library."""

    @abstractmethod
    def unpack(self, packed: Any) -> torch.Tensor:
        """Return a packed weight [O, I] in float32."""

    @abstractmethod
    def multiply(self, x_NI: torch.Tensor, packed: Any) -> torch.Tensor:
        """Return x W^T [N, O] in float32; x holds integers from -127 to 127 in float32."""


class Fbgemm(Int8Library):
    """FBGEMM, which is faster than oneDNN for a few rows."""

    name = "FBGEMM"

    def is_available(self) -> bool:
        """Return whether this build of torch has FBGEMM."""
        return "fbgemm" in torch.backends.quantized.supported_engines and has_fbgemm_int8_linear()

    def pack(self, weight_OI: torch.Tensor, scale_O: torch.Tensor) -> Any:
        """Quantize a float32 weight by its scales, and return it packed."""
        with fbgemm_engine():
            return pack_int8_for_fbgemm(weight_OI, scale_O)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return a packed weight [O, I] in float32."""
        return unpack_int8_from_fbgemm(packed)

    def multiply(self, x_NI: torch.Tensor, packed: Any) -> torch.Tensor:
        """Return x W^T [N, O] in float32."""
        return fbgemm_int8_linear(x_NI, packed)


class OneDnn(Int8Library):
    """oneDNN, which uses all instructions of the processor, and compiles a kernel for each number of rows.

    Without matrix units it multiplies signed by signed integers with a reference implementation, which takes hundreds
    to thousands of times as long as its kernel for unsigned by signed ones. Inputs are therefore increased by 128
    there, and oneDNN subtracts it again: the results are the same.
    """

    name = "oneDNN"

    def is_available(self) -> bool:
        """Return whether this build of torch has oneDNN's int8 products."""
        return has_onednn_int8_linear()

    def pack(self, weight_OI: torch.Tensor, scale_O: torch.Tensor) -> OneDnnInt8Weight:
        """Quantize a float32 weight by its scales, and return it packed."""
        return pack_int8_for_onednn(weight_OI, scale_O)

    def unpack(self, packed: OneDnnInt8Weight) -> torch.Tensor:
        """Return a packed weight [O, I] in float32."""
        return unpack_int8_from_onednn(packed)

    def multiply(self, x_NI: torch.Tensor, packed: OneDnnInt8Weight) -> torch.Tensor:
        """Return x W^T [N, O] in float32. Rows are filled up to one of few numbers, so that there are few kernels."""
        rows, inputs = x_NI.shape
        filled_NI = x_NI.new_empty((max(FEWEST_ROWS, round_up(rows)), inputs), dtype=torch.int8)
        filled_NI[:rows] = x_NI
        if not has_amx():
            filled_NI = filled_NI.view(torch.uint8).bitwise_xor_(128)  # adds 128
        return onednn_int8_linear(filled_NI, packed)[:rows]


FBGEMM, ONEDNN = Fbgemm(), OneDnn()


@contextmanager
def fbgemm_engine() -> Iterator[None]:
    """Pack weights for FBGEMM in this context. Packed weights know their engine afterwards."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


@cache
def available_libraries() -> Sequence[Int8Library]:
    """Return the libraries that compute int8 products with this build of torch on this processor."""
    return [
        library
        for library in (FBGEMM, ONEDNN)
        if library.is_available() and largest_sums(library) is not None and has_kernel(library)
    ]


def largest_sums(library: Int8Library) -> torch.Tensor | None:
    """Return 127 x 127 added up 64 times [2, 32], as a library computes it; None if it has no kernel for it."""
    weight_OI, x_NI = torch.full((32, 64), float(WEIGHT_LEVELS)), torch.full((2, 64), float(INPUT_LEVELS))
    try:
        return library.multiply(x_NI, packed(weight_OI, library, levels=WEIGHT_LEVELS))
    except (RuntimeError, AttributeError) as error:
        logger.debug("no int8 products by %s: %s", library.name, error)
        return None


def has_kernel(library: Int8Library) -> bool:
    """Return whether a library has a kernel for this processor, and not only a reference implementation.

    A reference implementation takes hundreds of times as long as a product in float32, a kernel a few times as long,
    because the product is small.
    """
    x_NI, weight_OI = torch.ones(16, 128), torch.ones(128, 128)
    weight = packed(weight_OI, library, levels=WEIGHT_LEVELS)
    seconds = shortest_seconds(
        {"float32": lambda: x_NI @ weight_OI, "int8": lambda: library.multiply(x_NI, weight)},
        device=x_NI.device,
        rounds=3,
    )
    slow = seconds["int8"] > REFERENCE * seconds["float32"]
    if slow:
        logger.debug(
            "int8 products by %s take %.0f times as long as in float32",
            library.name,
            seconds["int8"] / seconds["float32"],
        )
    return not slow


@cache
def weight_levels() -> int:
    """Return the largest quantized weight with which sums are exact in all libraries on this processor."""
    sums = [largest_sums(library) for library in available_libraries()]
    exact = all(one is not None and bool((one == WEIGHT_LEVELS * INPUT_LEVELS * 64).all()) for one in sums)
    return WEIGHT_LEVELS if exact else WEIGHT_LEVELS_IN_PAIRS


def packed(weight_OI: torch.Tensor, library: Int8Library, *, levels: int) -> Any:
    """Quantize a weight, and return it packed for the library."""
    weight_OI = weight_OI.float()
    scale_O = weight_OI.abs().amax(1).clamp_min(MIN_ABSOLUTE_MAX).double() / levels
    return library.pack(weight_OI, scale_O)


class LastProduct(NamedTuple):
    """The last product of several layers."""

    x: torch.Tensor
    y_NO: torch.Tensor
    """The outputs of all layers."""
    part: int
    """Number of the layer that took its outputs last. Each takes them once: the model may change them in place."""


class Int8Product:
    """A product with an int8 weight: that of a layer, or those of several layers with the same inputs.

    Inputs of several layers are quantized once, and multiplied by all weights together. This happens in the first
    layer; the others find their outputs by the identity of their inputs. So a model must call them with the same
    tensor, one after the other, and must not change it in between (`partita.lm.checks.shared_inputs`).
    """

    def __init__(self, weights: Sequence[torch.Tensor], library: Int8Library) -> None:
        """Quantize the weights [O, I] of the layers."""
        self.library = library
        self.ends = list(accumulate(len(weight_OI) for weight_OI in weights))
        """First output after those of each layer."""
        joined = weights[0] if len(weights) == 1 else torch.cat([weight_OI.detach() for weight_OI in weights])
        self.packed = packed(joined, library, levels=weight_levels())
        self.last: LastProduct | None = None
        """Kept until the last layer was called."""

    def __deepcopy__(self, memo: object) -> "Int8Product":
        return self  # its weight never changes

    def output(self, x: torch.Tensor, part: int) -> torch.Tensor:
        """Return x W^T [N, O] of a layer in float32.

        Args:
            x: Inputs [..., I].
            part: Number of the layer.
        """
        if len(self.ends) == 1:
            return self.multiply(x)
        last = self.last
        y_NO = last.y_NO if last is not None and last.x is x and last.part < part else self.multiply(x)
        self.last = None if part == len(self.ends) - 1 else LastProduct(x, y_NO, part)
        return y_NO[:, self.outputs(part)]

    def outputs(self, part: int) -> slice:
        """Return which outputs are those of a layer."""
        return slice(self.ends[part - 1] if part else 0, self.ends[part])

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T [N, O] of all layers in float32."""
        x_NI = x.float().reshape(-1, x.shape[-1])
        scale_N1 = x_NI.abs().amax(-1, keepdim=True).clamp_min_(MIN_ABSOLUTE_MAX).mul_(1 / INPUT_LEVELS)
        # FBGEMM would round 3.4999998 to 4.
        return self.library.multiply(x_NI.div(scale_N1).round_(), self.packed).mul_(scale_N1)

    def weight(self, part: int) -> torch.Tensor:
        """Return the weight [O, I] of a layer in float32."""
        return self.library.unpack(self.packed)[self.outputs(part)]


class Int8Linear(nn.Linear):
    """A linear layer with an int8 weight."""

    product: Int8Product
    part: int
    """Number of the layer in the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b [..., O], in the type of x."""
        y_NO = self.product.output(x, self.part)
        y_NO = y_NO if self.bias is None else y_NO.add_(self.bias)
        return y_NO.to(x.dtype).view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # the layer holds no float32 weight
        """The weight [O, I] in float32, computed at each access."""
        return self.product.weight(self.part)


def to_int8(layers: Sequence[nn.Linear], library: Int8Library) -> None:
    """Replace the weights of plain CPU layers with the same inputs by an int8 weight of the library, in place."""
    product = Int8Product([layer.weight.detach() for layer in layers], library)
    for part, layer in enumerate(layers):
        layer_in_int8: Any = layer
        layer_in_int8.product, layer_in_int8.part = product, part
        del layer.weight
        layer.__class__ = Int8Linear


def int8_layers(module: nn.Module) -> list[tuple[str, Int8Linear]]:
    """Return the layers with int8 weights, by name."""
    return [(name, layer) for name, layer in module.named_modules() if isinstance(layer, Int8Linear)]
