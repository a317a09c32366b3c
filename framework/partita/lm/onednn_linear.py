"""Linear layers in float32 computed by oneDNN, where a measurement on this machine shows that they are faster.

A model that is not trained gets a copy of its weights in oneDNN's own layout if that is faster and memory is plentiful.
The plain weights stay: near ties, sampled answers and log probabilities need the sums of torch's library. Sums in
another order differ in their last digits, but greedy answers do not depend on the library, because slots recompute near
ties.

oneDNN prepares a kernel for each number of rows, which takes a few milliseconds and one or two megabytes. For small
models, slots therefore use it only for row counts with few significant bits, and are filled so that there are few
others. A pass of a large model, and a training step, take so much longer than a kernel that oneDNN is used for any
number of rows. The kernel cache is limited to what a few passes use.

Shapes: N rows, I inputs, O outputs.
"""

import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from partita.lm.packed_weight import PackableLinear
from partita.lm.product_speed import ONEDNN, TORCH, Implementation, Product, faster_for_training, fastest_for_decoding
from partita_trainers.torch_internals import onednn_has_bfloat16, onednn_linear

DIGITS = 4
"""Significant bits of the row counts that kernels of small models are prepared for."""
LARGE_MODEL_WEIGHTS = 2**24
"""Weights in linear layers from which a model is large."""
MOST_PACKED = 1 / 8
"""Maximum share of the free memory for packed weights. Each process of a job has its own."""
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
        return onednn_linear(x_NI, weight_OI, bias_O)
    return nn.functional.linear(x_NI, weight_OI, bias_O)


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
def using_onednn(on: bool = True) -> Iterator[None]:
    """Enable or disable oneDNN for linear layers in this context."""
    before = getattr(current, "on", False)
    current.on = on
    try:
        yield
    finally:
        current.on = before


class OneDnnLinear(PackableLinear):
    """A linear layer that uses oneDNN in training, and without gradients inside `using_onednn`."""

    least: Least
    """Set by `enable_onednn`."""
    training_products: Collection[Product]
    """The products that oneDNN computes in training."""
    few_kernels: bool
    """Whether only rounded row counts use oneDNN in slots."""
    packs: bool
    """Whether the packed weight is used inside `using_onednn`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b [..., O]."""
        if self.training_products and computes_plain_gradients(x, self.weight):
            x_NI = x.reshape(-1, x.shape[-1])
            y_NO: torch.Tensor = LinearProducts.apply(x_NI, self.weight, self.bias, self.training_products)  # type: ignore[no-untyped-call]
            return y_NO.view(*x.shape[:-1], self.out_features)
        if not getattr(current, "on", False):
            return nn.functional.linear(x, self.weight, self.bias)
        # Also before a small product, so that the warm-up before batch sizes are measured allocates the copy.
        weight = self.pack() if self.packs else self.weight
        rows = x.numel() // max(1, self.in_features)
        small = rows < self.least.rows or rows * self.weight.numel() < self.least.products
        other = torch.is_grad_enabled() or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu")
        if small or other or (self.few_kernels and round_up(rows) != rows):
            return nn.functional.linear(x, self.weight, self.bias)
        return onednn_linear(x, weight, self.bias)


def computes_plain_gradients(*tensors: torch.Tensor) -> bool:
    """Return whether a computation with these tensors needs gradients, in float32 on a CPU, and is not compiled."""
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    return all(map(is_plain_float32, tensors)) and any(tensor.requires_grad for tensor in tensors)


def is_plain_float32(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in float32 on a CPU, and of no subclass."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return plain and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


class PackedLinear(PackableLinear):
    """A linear layer in bfloat16 whose packed weight is used in all passes without gradients.

    torch computes such layers with oneDNN too, so results are the same bit for bit.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + b [..., O]."""
        plain = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
        if plain or x.dtype != torch.bfloat16 or not x.numel():
            return nn.functional.linear(x, self.weight, self.bias)
        return onednn_linear(x, self.pack(), self.bias)


def keep_few_kernels() -> None:
    """Limit oneDNN's kernel cache, unless the user has set it; oneDNN reads the variable at its first kernel."""
    if not any(name in os.environ for name in KERNEL_VARIABLES):
        os.environ[KERNEL_VARIABLES[0]] = str(KERNELS)


def round_up(rows: int) -> int:
    """Round up to a number with four significant bits: at most an eighth more."""
    zeros = max(0, rows.bit_length() - DIGITS)
    return -(-rows >> zeros) << zeros


class OneDnnUse(NamedTuple):
    """How slots use oneDNN."""

    decoding: bool
    """Whether they use it, and thus other sums than torch's library."""
    few_kernels: bool
    """Whether row counts are to be rounded."""


def use_onednn(module: nn.Module, *, trainable: bool, free_bytes: int) -> OneDnnUse:
    """Enable oneDNN for plain CPU layers where it is faster on this machine, and return how slots use it.

    Call it once for a model.

    Args:
        module: The model.
        trainable: Whether the model is trained. Weights that change are not packed.
        free_bytes: Free memory; a small share of it may be used for packed weights.
    """
    if not trainable:
        pack_bfloat16(module, free_bytes=free_bytes)
    layers = plain_layers(module, LEAST)
    may_pack = not trainable and sum(layer.weight.nbytes for layer in layers) <= MOST_PACKED * free_bytes
    fastest = fastest_for_decoding(layers, may_pack=may_pack)
    trained = faster_for_training(layers) if trainable else {}
    few_kernels = sum(layer.weight.numel() for layer in layers) < LARGE_MODEL_WEIGHTS
    use = OneDnnUse(decoding=fastest is not Implementation.TORCH, few_kernels=few_kernels)
    if use.decoding or any(trained.values()):
        enable_onednn(module, least=LEAST, packs=fastest is Implementation.PACKED, few_kernels=few_kernels)
        for part in module.modules():
            if isinstance(part, OneDnnLinear):
                part.training_products = trained.get(tuple(part.weight.shape), frozenset())
    return use


def pack_bfloat16(module: nn.Module, *, free_bytes: int) -> None:
    """Make plain CPU layers in bfloat16 pack their weights if that is faster on this machine."""
    layers = plain_layers(module, LEAST, dtype=torch.bfloat16) if onednn_has_bfloat16() else []
    may_pack = sum(layer.weight.nbytes for layer in layers) <= MOST_PACKED * free_bytes
    if may_pack and fastest_for_decoding(layers, may_pack=True) is Implementation.PACKED:
        for layer in layers:
            layer.__class__ = PackedLinear


def enable_onednn(module: nn.Module, *, least: Least = LEAST, packs: bool = False, few_kernels: bool = True) -> int:
    """Enable oneDNN for plain float32 CPU layers, even if slower; return the number of layers.

    Args:
        module: The model.
        least: Minimum sizes.
        packs: Whether weights are packed.
        few_kernels: Whether only rounded row counts use oneDNN in slots.
    """
    for layer in plain_layers(module, least):
        layer.__class__ = OneDnnLinear
    layers = [part for part in module.modules() if isinstance(part, OneDnnLinear)]
    for layer in layers:
        layer.least, layer.training_products = least, frozenset()
        layer.packs, layer.few_kernels = packs, few_kernels
    return len(layers)


def plain_layers(module: nn.Module, least: Least, *, dtype: torch.dtype = torch.float32) -> list[nn.Linear]:
    """Return the plain linear CPU layers of sufficient size with weights in this dtype."""
    return [part for part in module.modules() if type(part) is nn.Linear and is_large_enough(part.weight, least, dtype)]


def is_large_enough(weight: torch.Tensor, least: Least, dtype: torch.dtype) -> bool:
    """Return whether a weight is on the CPU, in this dtype and of sufficient size."""
    return weight.device.type == "cpu" and weight.dtype == dtype and weight.numel() >= least.weights
