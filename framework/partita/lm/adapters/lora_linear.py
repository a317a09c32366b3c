"""Fused forward and backward of plain LoRA layers: peft's result in fewer passes over memory.

A layer computes x W^T + s (x A^T) B^T with frozen W (Hu et al. 2021, "LoRA", section 4.1). Computed one operation at a
time, the update takes up to a third of the time of the base layer with a hundredth of its multiplications: products
with a dimension of r are memory-bound, and scaling and adding are extra passes, in forward and backward. Here both
directions add the update to the base layer's result within the matrix product, and r is the first dimension of small
matrices, which is faster. peft still owns the layers, their parameters and their state, and computes whatever is not
plain: dropout, DoRA, merged or disabled adapters, several adapters, quantized or 16-bit weights, autocast. Under
autocast, inputs of 16 bits are not converted to float32 and back. Without gradients, the operations are those of peft,
so that answers are the same.

Shapes: N tokens, I inputs, O outputs, R rank.
"""

import sys
from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from partita.lm.products.fast_linear import FastLinear, input_gradient, linear
from partita.lm.products.product import Product
from partita_trainers.libraries.torch_internals import has_hooks


class LoraLinear(torch.autograd.Function):
    """x W^T + b + s (x A^T) B^T, with gradients for x, A and B.

    Tensors are matrices: a model could not change a view that is returned here in place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        scale: float,
        onednn: Collection[Product],
    ) -> torch.Tensor:
        """Compute the layer [N, O].

        Args:
            ctx: Context of autograd.
            x_NI: Inputs.
            weight_OI: Frozen base weights.
            bias_O: Frozen bias, or None.
            a_RI: Down projection.
            b_OR: Up projection.
            scale: Factor s of the update.
            onednn: The products with the base weights that oneDNN computes.
        """
        inner_RN = a_RI @ x_NI.t()
        y_NO = linear(x_NI, weight_OI, bias_O, onednn=onednn)
        y_NO.addmm_(inner_RN.t(), b_OR.t(), alpha=scale)
        ctx.save_for_backward(x_NI, weight_OI, a_RI, b_OR, inner_RN)
        ctx.scale = scale
        ctx.onednn = onednn
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, A and B; None for the other inputs."""
        x_NI, weight_OI, a_RI, b_OR, inner_RN = ctx.saved_tensors
        for_x, _, _, for_a, for_b, _, _ = ctx.needs_input_grad
        dx_NI = da_RI = db_OR = None
        if for_b:
            db_OR = (inner_RN @ dy_NO).t() * ctx.scale
        if for_x or for_a:
            inner_RN = (b_OR.t() @ dy_NO.t()).mul_(ctx.scale)
        if for_a:
            da_RI = inner_RN @ x_NI
        if for_x:
            dx_NI = input_gradient(dy_NO, weight_OI, onednn=ctx.onednn).addmm_(inner_RN.t(), a_RI)
        return dx_NI, None, None, da_RI, db_OR, None, None


def fuse_lora(module: nn.Module) -> int:
    """Replace the forward of every plain LoRA layer in the module; return the number of layers."""
    if "peft" not in sys.modules:  # the module has no layer of it, and importing it takes two seconds
        return 0
    from peft.tuners.lora.layer import Linear

    layers: list[Any] = [layer for layer in module.modules() if type(layer) is Linear]
    plain = [layer for layer in layers if type(layer.get_base_layer()) is nn.Linear]
    for layer in plain:
        layer.__class__ = fused_class()
    return len(plain)


@cache
def fused_class() -> Any:
    """Return peft's layer class with a fused forward."""
    from peft.tuners.lora.layer import Linear

    class FusedLinear(Linear):  # type: ignore[misc]
        """Uses the fused computation if the layer is plain."""

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor | None = None
            if not args and not kwargs:
                result = self.trained(x) if torch.is_grad_enabled() else self.answered(x)
            return super().forward(x, *args, **kwargs) if result is None else result

        def _cast_input_dtype(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            """Return the inputs of the adapter; peft would convert them to float32, and autocast back to 16 bits."""
            if casts_products(x.device.type) and not self.lora_variant:
                return x
            converted: torch.Tensor = super()._cast_input_dtype(x, dtype)
            return converted

        def trained(self, x: torch.Tensor) -> torch.Tensor | None:
            """Return the result [..., O] for training; None if the layer is not plain."""
            name = plain_adapter(self, x)
            if name is None:
                return None
            base, a_RI, b_OR = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight
            x_NI, onednn = x.reshape(-1, x.shape[-1]), getattr(base, "training_products", ())
            inputs = (x_NI, base.weight, base.bias, a_RI, b_OR, self.scaling[name], onednn)
            y_NO: torch.Tensor = LoraLinear.apply(*inputs)  # type: ignore[no-untyped-call]
            return y_NO.view(*x.shape[:-1], y_NO.shape[-1])

        def answered(self, x: torch.Tensor) -> torch.Tensor | None:
            """Return the result [..., O] without gradients; None if peft has to compute it."""
            name = unmodified_adapter(self, x)
            if name is None:
                return None
            update = self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
            result: torch.Tensor = self.base_layer(x) + update
            return result

    return FusedLinear


def plain_adapter(layer: Any, x: torch.Tensor) -> str | None:
    """Return the active adapter if training only adds a low-rank product in float32, else None."""
    name = single_adapter(layer, x)
    if name is None or layer.lora_bias[name] or torch.compiler.is_compiling():
        return None
    base, parts = layer.base_layer, (layer.base_layer, layer.lora_A[name], layer.lora_B[name])
    if any(type(part) not in (nn.Linear, FastLinear) or has_hooks(part) for part in parts):
        return None
    tensors = [base.weight, *(part.weight for part in parts[1:])]
    frozen = not base.weight.requires_grad and (base.bias is None or not base.bias.requires_grad)
    alike = all(tensor.dtype == torch.float32 and tensor.device == x.device for tensor in (x, *tensors))
    return name if frozen and alike else None


def unmodified_adapter(layer: Any, x: torch.Tensor) -> str | None:
    """Return the active adapter if peft adds a scaled product of A and B without anything else, else None.

    The layer then runs peft's operations without peft's checks, which take longer than the computation for one token.
    """
    name = single_adapter(layer, x)
    return name if name is not None and x.dtype == layer.lora_A[name].weight.dtype else None


def single_adapter(layer: Any, x: torch.Tensor) -> str | None:
    """Return the only active adapter of a layer, if it has no variant and no dropout, else None."""
    if layer.disable_adapters or layer.merged_adapters or casts_products(x.device.type):
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1:
        return None
    (name,) = active
    return None if name in layer.lora_variant or is_active_dropout(layer.lora_dropout[name]) else name


def is_active_dropout(dropout: nn.Module) -> bool:
    """Return whether the dropout of a layer changes its inputs."""
    return dropout.training and not isinstance(dropout, nn.Identity) and getattr(dropout, "p", 1) > 0


def casts_products(device_type: str) -> bool:
    """Return whether autocast chooses the dtype of products on a type of device; some, such as meta, have none."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
