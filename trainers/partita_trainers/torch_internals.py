"""What partita uses of torch that is not public, one function for each purpose.

Checked with torch 2.13. If an attribute disappears, tests/trainers/test_torch_internals.py says what to change.
"""

from typing import Any

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


def has_onednn_linear() -> bool:
    """Return whether this build of torch has `torch.ops.mkldnn._linear_pointwise`."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(  # type: ignore[no-untyped-call]
        torch.ops.mkldnn, "_linear_pointwise"
    )


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + b computed by oneDNN: `torch.ops.mkldnn._linear_pointwise`, made for torch's compiler.

    The public `torch.utils.mkldnn` copies the weights and every input and output.
    """
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


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
