"""Linear layers in float32 with other products than torch's, where they are measured to be faster on this machine.

They are computed by oneDNN, or by torch's own library with weights that are stored by column. A model that is not
trained gets a copy of its weights in the layout of the faster one if memory is plentiful. The plain weights stay: near
ties, sampled answers and log probabilities need torch's sums. Sums in another order differ in their last digits, but
greedy answers do not depend on the implementation, because slots recompute near ties.

oneDNN prepares a kernel for each number of rows, which takes a few milliseconds and one or two megabytes. For small
models, slots therefore use it only for row counts with few significant bits, and are filled so that there are few
others. In bfloat16, in which torch itself calls oneDNN, they are filled too. A pass of a large model, and a training
step, take so much longer than a kernel that oneDNN is used for any number of rows. The kernel cache is limited to what
a few passes use.

Shapes: N rows, I inputs, O outputs.
"""

import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from partita.lm.products.product import ONEDNN, TORCH, Implementation, Product
from partita.lm.products.speed import faster_for_training, fastest_for_decoding
from partita.lm.products.weight_copy import CopyingLinear
from partita_trainers.libraries.torch_internals import onednn_has_bfloat16

DIGITS = 4
"""Significant bits of the row counts that kernels of small models are prepared for."""
LARGE_MODEL_WEIGHTS = 2**24
"""Weights in linear layers from which a model is large."""
MOST_COPIED = 1 / 8
"""Maximum share of the free memory for copies of weights. Each process of a job has its own."""
KERNELS = 32
"""Size of the kernel cache. The default of 1,024 would take gigabytes that no memory probe has seen."""
KERNEL_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")

current = threading.local()


class Least(NamedTuple):
    """Minimum sizes for which a faster product pays off."""

    rows: int = 4
    multiplications: int = 2**21
    """Multiplications of a call of oneDNN."""
    weights: int = 2**14
    """Weights of a layer; with fewer, no number of rows pays off."""


LEAST = Least()
LEAST_IN_TRAINING = 2**23
"""Minimum multiplications of a product in training; below it, preparing the kernel takes longer than is saved."""


def pays_off(product: Product, onednn: Collection[Product], *, multiplications: int) -> bool:
    """Return whether oneDNN computes a product of this size in training."""
    return product in onednn and multiplications >= LEAST_IN_TRAINING


def linear(
    x_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, *, onednn: Collection[Product]
) -> torch.Tensor:
    """Return x W^T + b [N, O] in training.

    Args:
        x_NI: Inputs.
        weight_OI: Weights.
        bias_O: Bias, or None.
        onednn: The products that oneDNN computes if they are large enough.
    """
    if pays_off(Product.OUTPUT, onednn, multiplications=len(x_NI) * weight_OI.numel()):
        return Implementation.ONEDNN.multiply(x_NI, weight_OI, bias_O)
    return Implementation.TORCH.multiply(x_NI, weight_OI, bias_O)


def input_gradient(dy_NO: torch.Tensor, weight_OI: torch.Tensor, *, onednn: Collection[Product]) -> torch.Tensor:
    """Return the gradient [N, I] of the inputs of a linear layer."""
    faster = pays_off(Product.INPUT_GRADIENT, onednn, multiplications=len(dy_NO) * weight_OI.numel())
    return (ONEDNN if faster else TORCH)[Product.INPUT_GRADIENT](dy_NO, weight_OI)


def weight_gradient(dy_NO: torch.Tensor, x_NI: torch.Tensor, *, onednn: Collection[Product]) -> torch.Tensor:
    """Return the gradient [O, I] of the weights of a linear layer."""
    faster = pays_off(Product.WEIGHT_GRADIENT, onednn, multiplications=dy_NO.numel() * x_NI.shape[1])
    return (ONEDNN if faster else TORCH)[Product.WEIGHT_GRADIENT](dy_NO, x_NI)


class LinearProducts(torch.autograd.Function):
    """x W^T + b, with gradients for x, W and b.

    Tensors are matrices: a model could not change a view that is returned here in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        onednn: Collection[Product],
    ) -> torch.Tensor:
        """Compute the layer [N, O].

        Args:
            ctx: Context of autograd.
            x_NI: Inputs.
            weight_OI: Weights.
            bias_O: Bias, or None.
            onednn: The products that oneDNN computes.
        """
        for_x, for_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x_NI if for_weight else None, weight_OI if for_x else None)
        ctx.onednn = onednn
        return linear(x_NI, weight_OI, bias_O, onednn=onednn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, W and b."""
        x_NI, weight_OI = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        dx_NI = input_gradient(dy_NO, weight_OI, onednn=ctx.onednn) if for_x else None
        dweight_OI = weight_gradient(dy_NO, x_NI, onednn=ctx.onednn) if for_weight else None
        return dx_NI, dweight_OI, dy_NO.sum(0) if for_bias else None, None


@contextmanager
def using_fast_products(on: bool = True) -> Iterator[None]:
    """Enable or disable the faster products of linear layers in this context."""
    before = getattr(current, "on", False)
    current.on = on
    try:
        yield
    finally:
        current.on = before


class FastLinear(CopyingLinear):
    """A linear layer that uses oneDNN in training, and its faster product inside `using_fast_products`."""

    least: Least
    """Set by `enable_fast_products`."""
    training_products: Collection[Product]
    """The products that oneDNN computes in training."""
    few_kernels: bool
    """Whether only rounded row counts use the faster product in slots."""
    implementation: Implementation
    """The faster product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b [..., O]."""
        if self.training_products and computes_plain_gradients(x, self.weight):
            x_NI = x.reshape(-1, x.shape[-1])
            y_NO: torch.Tensor = LinearProducts.apply(x_NI, self.weight, self.bias, self.training_products)  # type: ignore[no-untyped-call]
            return y_NO.view(*x.shape[:-1], self.out_features)
        if not getattr(current, "on", False):
            return nn.functional.linear(x, self.weight, self.bias)
        # Also before a small product, so that the warm-up before batch sizes are measured allocates the copy.
        weight = self.weight_for(self.implementation)
        other = torch.is_grad_enabled() or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu")
        if other or not self.multiplies_faster(x.numel() // max(1, self.in_features)):
            return nn.functional.linear(x, self.weight, self.bias)
        return self.implementation.multiply(x, weight, self.bias)

    def multiplies_faster(self, rows: int) -> bool:
        """Return whether the faster product is used for this number of rows."""
        if not self.implementation.is_onednn:
            return rows >= self.least.rows
        small = rows < self.least.rows or rows * self.weight.numel() < self.least.multiplications
        return not small and not (self.few_kernels and round_up(rows) != rows)


def computes_plain_gradients(*tensors: torch.Tensor) -> bool:
    """Return whether a computation with these tensors needs gradients, in float32 on a CPU, and is not compiled."""
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    return all(map(is_plain_float32, tensors)) and any(tensor.requires_grad for tensor in tensors)


def is_plain_float32(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in float32 on a CPU, and of no subclass."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return plain and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


class PackedLinear(CopyingLinear):
    """A linear layer in bfloat16 whose packed weight is used in all passes without gradients.

    torch computes such layers with oneDNN too, so results are the same bit for bit.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b [..., O]."""
        plain = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
        if plain or x.dtype != torch.bfloat16 or not x.numel():
            return nn.functional.linear(x, self.weight, self.bias)
        packed = Implementation.PACKED
        return packed.multiply(x, self.weight_for(packed), self.bias)


def keep_few_kernels() -> None:
    """Limit oneDNN's kernel cache, unless the user has set it; oneDNN reads the variable at its first kernel."""
    if not any(name in os.environ for name in KERNEL_VARIABLES):
        os.environ[KERNEL_VARIABLES[0]] = str(KERNELS)


def round_up(rows: int) -> int:
    """Round up to a number with four significant bits: at most an eighth more."""
    zeros = max(0, rows.bit_length() - DIGITS)
    return -(-rows >> zeros) << zeros


class FastProducts(NamedTuple):
    """How slots use faster products."""

    decoding: bool
    """Whether they use them, and thus other sums than torch's."""
    few_kernels: bool
    """Whether row counts are rounded: in passes with faster products, or in all passes if `decoding` is False."""


def choose_products(module: nn.Module, *, trainable: bool, free_bytes: int) -> FastProducts:
    """Enable the products of plain CPU layers that are fastest on this machine, and return how slots use them.

    Call it once for a model.

    Args:
        module: The model.
        trainable: Whether the model is trained. Weights that change are not copied.
        free_bytes: Free memory; a small share of it may be used for copies of weights.
    """
    in_16_bits = plain_layers(module, LEAST, dtype=torch.bfloat16) if onednn_has_bfloat16() else []
    if not trainable:
        pack_bfloat16(in_16_bits, free_bytes=free_bytes)
    layers = plain_layers(module, LEAST)
    may_copy = not trainable and copies_fit(layers, free_bytes=free_bytes)
    allowed = [one for one in Implementation if may_copy or not one.copies_weights]
    fastest = fastest_for_decoding(layers, allowed)
    trained = faster_for_training(layers) if trainable else {}
    by_onednn = [*in_16_bits, *(layers if fastest.is_onednn else ())]
    use = FastProducts(decoding=fastest is not Implementation.TORCH, few_kernels=are_of_small_model(by_onednn))
    if use.decoding or any(trained.values()):
        enable_fast_products(module, least=LEAST, implementation=fastest, few_kernels=use.few_kernels)
        for part in module.modules():
            if isinstance(part, FastLinear):
                part.training_products = trained.get(tuple(part.weight.shape), frozenset())
    return use


def copies_fit(layers: Collection[nn.Linear], *, free_bytes: int) -> bool:
    """Return whether copies of the weights take a small part of the free memory."""
    return sum(layer.weight.nbytes for layer in layers) <= MOST_COPIED * free_bytes


def are_of_small_model(layers: Collection[nn.Linear]) -> bool:
    """Return whether there are layers, and so few weights that preparing a kernel takes as long as a product."""
    return 0 < sum(layer.weight.numel() for layer in layers) < LARGE_MODEL_WEIGHTS


def pack_bfloat16(layers: Sequence[nn.Linear], *, free_bytes: int) -> None:
    """Make layers in bfloat16 pack their weights if that is faster on this machine."""
    packed = Implementation.PACKED
    if copies_fit(layers, free_bytes=free_bytes) and fastest_for_decoding(layers, [packed]) is packed:
        for layer in layers:
            layer.__class__ = PackedLinear


def enable_fast_products(
    module: nn.Module,
    *,
    least: Least = LEAST,
    implementation: Implementation = Implementation.ONEDNN,
    few_kernels: bool = True,
) -> int:
    """Enable an implementation for plain float32 CPU layers, even if slower; return the number of layers.

    Args:
        module: The model.
        least: Minimum sizes.
        implementation: Computes outputs inside `using_fast_products`.
        few_kernels: Whether only rounded row counts use it in slots.
    """
    for layer in plain_layers(module, least):
        layer.__class__ = FastLinear
    layers = [part for part in module.modules() if isinstance(part, FastLinear)]
    for layer in layers:
        layer.least, layer.training_products = least, frozenset()
        layer.implementation, layer.few_kernels = implementation, few_kernels
    return len(layers)


def plain_layers(module: nn.Module, least: Least, *, dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    """Return the plain linear CPU layers of sufficient size with weights in this dtype."""
    return [part for part in module.modules() if type(part) is nn.Linear and is_large_enough(part.weight, least, dtype)]


def is_large_enough(weight: torch.Tensor, least: Least, dtype: torch.dtype) -> bool:
    """Return whether a weight is on the CPU, in this dtype and of sufficient size."""
    return weight.device.type == "cpu" and weight.dtype == dtype and weight.numel() >= least.weights
