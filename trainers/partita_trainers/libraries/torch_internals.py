"""What partita uses of torch that is not public, one function for each purpose.

Checked with torch 2.13. If an attribute disappears, tests/trainers/libraries/test_torch_internals.py says what to
change.
"""

import warnings
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FSDP_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes that `fully_shard` writes into all submodules, besides its own state."""


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling the module does more than its forward: `nn.Module._forward_hooks` and the like."""
    return any(getattr(module, hooks) for hooks in HOOKS)


def default_store() -> Any:
    """Return the store of the default process group: `torch.distributed.distributed_c10d._get_default_store`.

    Whoever initializes the process group can pass a store of their own, but Ray initializes it itself.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def allocator_settings() -> str | None:
    """Return the settings of the GPU allocator, "" if nobody set any: `torch._C._accelerator_getAllocatorSettings`.

    The first call reads PYTORCH_ALLOC_CONF, unless torch has read it before; later changes of it have no effect.
    Returns None for versions of torch before these functions, which keep the settings that they have.
    """
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return None if read is None else str(read())


def set_allocator_settings(settings: str) -> None:
    """Set the settings of the GPU allocator, for what it takes from now on.

    `torch._C._accelerator_setAllocatorSettings`, which the deprecated `torch.cuda.memory._set_allocator_settings` names
    as its successor.
    """
    torch._C._accelerator_setAllocatorSettings(settings)


def leave_failed_capture(stream: "torch.cuda.Stream", pool: tuple[int, int]) -> None:
    """Restore what `torch.cuda.graph` leaves changed when a capture fails: the stream, and where memory comes from.

    `torch._C._cuda_endAllocateToPool`. `torch.cuda.graph.__exit__` raises in `capture_end` before it restores the
    stream, and `capture_end` raises before the allocator leaves the pool.

    Args:
        stream: The current stream before the capture.
        pool: The memory pool of the capture.
    """
    torch.cuda.set_stream(stream)
    with suppress(RuntimeError):  # the allocator has left the pool
        torch._C._cuda_endAllocateToPool(stream.device.index, pool)


def has_onednn_linear() -> bool:
    """Return whether this build of torch has `torch.ops.mkldnn._linear_pointwise` and `_reorder_linear_weight`."""
    return bool(torch.backends.mkldnn.is_available()) and all(  # type: ignore[no-untyped-call]
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    )


def onednn_has_bfloat16() -> bool:
    """Return whether oneDNN multiplies in bfloat16 here: `torch.ops.mkldnn._is_mkldnn_bf16_supported`."""
    return has_onednn_linear() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_for_onednn(weight_OI: torch.Tensor, *, rows: int) -> torch.Tensor:
    """Return a copy of a weight in the layout that oneDNN prefers for this number of rows.

    `torch.ops.mkldnn._reorder_linear_weight`, made for torch's compiler. `onednn_linear` takes it with any number of
    rows.
    """
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), rows)
    return packed


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + b computed by oneDNN: `torch.ops.mkldnn._linear_pointwise`, made for torch's compiler.

    The weight is plain, or packed by `pack_for_onednn`. The public `torch.utils.mkldnn` copies every input and output.
    """
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def version(tensor: torch.Tensor) -> int:
    """Return a number that increases whenever the tensor is changed in place: `torch.Tensor._version`."""
    return tensor._version


def compilation_error() -> type[Exception]:
    """Return the base class of what a compiled module raises if it cannot be compiled.

    `torch._dynamo.exc.TorchDynamoException`; the public API of `torch.compile` names none.
    """
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def has_fbgemm_int8_linear() -> bool:
    """Return whether this build of torch has `torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32`."""
    return hasattr(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32")


def pack_int8_for_fbgemm(weight_OI: torch.Tensor, scale_O: torch.Tensor) -> Any:
    """Return a weight in int8, packed for the current engine: `torch.ops.quantized.linear_prepack`.

    The operator takes only a quantized tensor, a class that torch has deprecated without a successor for this kernel.
    """
    zeros_O = torch.zeros(len(weight_OI), dtype=torch.long)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        quantized = torch.quantize_per_channel(weight_OI, scale_O, zeros_O, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(quantized, None)


def unpack_int8_from_fbgemm(packed: Any) -> torch.Tensor:
    """Return the weight of `pack_int8_for_fbgemm` in float32: `torch.ops.quantized.linear_unpack`."""
    weight: torch.Tensor = torch.ops.quantized.linear_unpack(packed)[0].dequantize()
    return weight


def fbgemm_int8_linear(x: torch.Tensor, packed: Any) -> torch.Tensor:
    """Return x W^T in float32, with x rounded to integers from -128 to 127.

    The modules of `torch.ao.nn.quantized.dynamic` quantize x by its range over all rows, so that the result of a row
    depends on the others. This operator, which torch.export writes for static quantization, takes scale and zero point.
    """
    product: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, 1.0, 128, packed)
    return product


class OneDnnInt8Weight(NamedTuple):
    """A weight in int8, packed for oneDNN. It cannot be pickled."""

    packed: torch.Tensor
    scale_O: torch.Tensor
    zeros_O: torch.Tensor

    def __deepcopy__(self, memo: object) -> "OneDnnInt8Weight":
        return self  # it never changes, and torch cannot copy the packed tensor


def has_onednn_int8_linear() -> bool:
    """Return whether this build of torch has `torch.ops.onednn.qlinear_pointwise` and `qlinear_prepack`."""
    return bool(torch.backends.mkldnn.is_available()) and all(  # type: ignore[no-untyped-call]
        hasattr(torch.ops.onednn, name) for name in ("qlinear_pointwise", "qlinear_prepack")
    )


def pack_int8_for_onednn(weight_OI: torch.Tensor, scale_O: torch.Tensor) -> OneDnnInt8Weight:
    """Return a weight in int8, packed for `onednn_int8_linear`: `torch.ops.onednn.qlinear_prepack`."""
    integers_OI = (weight_OI * scale_O.float().reciprocal()[:, None]).round().clamp(-128, 127).to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(integers_OI, None)
    return OneDnnInt8Weight(packed, scale_O.float(), torch.zeros(len(weight_OI), dtype=torch.long))


def unpack_int8_from_onednn(weight: OneDnnInt8Weight) -> torch.Tensor:
    """Return the weight of `pack_int8_for_onednn` in float32."""
    return weight.packed.to_dense().t().float() * weight.scale_O[:, None]


def onednn_int8_linear(x: torch.Tensor, weight: OneDnnInt8Weight) -> torch.Tensor:
    """Return x W^T in float32: `torch.ops.onednn.qlinear_pointwise`, made for torch's compiler.

    Args:
        x: Integers in int8, or increased by 128 in uint8.
        weight: The weight.
    """
    multiply = torch.ops.onednn.qlinear_pointwise
    zero = 128 if x.dtype == torch.uint8 else 0
    product: torch.Tensor = multiply(x, 1.0, zero, *weight, None, 1.0, 0, torch.float32, "none", [], "")
    return product


def has_amx() -> bool:
    """Return whether the processor has matrix units (AMX): `torch.cpu._is_amx_tile_supported`."""
    return bool(torch.cpu._is_amx_tile_supported())


# FSDP2 has public methods to gather and free weights, but none to run a module as a plain one meanwhile, or to undo
# `fully_shard`. torch.distributed.checkpoint.state_dict reads and writes full tensors, and leaves the module sharded.


def fsdp_marks(module: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Return the attributes that `fully_shard` wrote into submodules: FSDP_MARKS."""
    return {part: {name: vars(part)[name] for name in FSDP_MARKS if name in vars(part)} for part in module.modules()}


def remove_fsdp_hooks(module: nn.Module) -> None:
    """Remove the forward hooks of a sharded module: `_pre_forward_hook_handle`, `_post_forward_hook_handle`."""
    state = fsdp_state(module)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def add_fsdp_hooks(module: nn.Module) -> None:
    """Add the forward hooks of a sharded module again, as `FSDPState.init` does: `_pre_forward`, `_post_forward`."""
    state = fsdp_state(module)
    state._pre_forward_hook_handle = module.register_forward_pre_hook(
        state._pre_forward, prepend=True, with_kwargs=True
    )
    state._post_forward_hook_handle = module.register_forward_hook(state._post_forward)


def forget_fsdp_state(module: nn.Module) -> None:
    """Let a module be sharded again: `torch.distributed._composable_state._module_state_mapping`."""
    from torch.distributed._composable_state import _module_state_mapping

    _module_state_mapping.pop(module, None)


def fsdp_state(module: nn.Module) -> Any:
    """Return FSDP's state of a sharded module, by the accessor that `fully_shard` has as a composable API."""
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)  # type: ignore[attr-defined]  # set by a decorator
