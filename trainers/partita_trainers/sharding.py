"""Weights that the ranks share: each holds a part of every tensor, with its gradient and its optimizer state.

This is torch's `fully_shard` (FSDP2; Zhao et al. 2023, PyTorch FSDP, and Rajbhandari et al. 2020, ZeRO, stage 3). The
weights of a layer are gathered while it works, and its gradients summed over the ranks as soon as they are there. Each
pass is an exchange, so that all ranks take the same number of them, and no rank can begin its part again alone.

A trained tensor is a DTensor then, cut along its first dimension. Files know nothing of that: they hold whole tensors,
and are read back on any number of ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from partita_schema.errors import LostRankError

MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""What `fully_shard` writes into modules, beside its own state."""


class Shards:
    """A module whose weights the ranks share, from the beginning of this object to its `end`."""

    def __init__(self, module: nn.Module, *, device: torch.device, ranks: int) -> None:
        """All ranks of the job's default process group do this at the same time, on modules of the same weights."""
        mesh = init_device_mesh(device.type, (ranks,))
        self.module = module
        self.parts = [ShardedModule(layer, mesh) for layer in [*layers(module), module]]

    @property
    def local_numel(self) -> int:
        """Numbers of the weights that this rank holds while it does not work."""
        return sum(local_shard(parameter).numel() for parameter in self.module.parameters())

    def unshard(self) -> None:
        """All weights on every rank, until `deal`: a plain module meanwhile, whose passes are no exchanges.

        All ranks do this at the same time. Gradients are not summed over them until `deal`.
        """
        for part in self.parts:
            part.module.unshard()
            part.detach_hooks()

    def reshard(self) -> None:
        """To each rank its own part again. What has been written into weights since `gather` is lost."""
        for part in self.parts:
            part.attach_hooks()
            part.module.reshard()

    def unwrap(self) -> None:
        """Leave a plain module with all weights. All ranks do this at the same time."""
        plain: dict[torch.Tensor, nn.Parameter] = {}
        for part in self.parts:
            part.module.reshard()
            for parameter in part.module.parameters():
                if isinstance(parameter, DTensor) and parameter not in plain:
                    gathered = full_tensor(parameter.detach())
                    plain[parameter] = nn.Parameter(gathered, requires_grad=parameter.requires_grad)
            part.detach_hooks()
            part.forget()
        for each in self.module.modules():
            for name, parameter in each._parameters.items():
                if parameter is not None:
                    each._parameters[name] = plain.get(parameter, parameter)


class ShardedModule:
    """A module whose weights are gathered together. torch has no public way to use one whole, or to take it back."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.plain, before = type(module), set(vars(module))
        self.module: Any = fully_shard(module, mesh=mesh)
        # Sums: a step divides by all its loss tokens itself.
        self.module.set_gradient_divide_factor(1.0)
        self.module.set_force_sum_reduction_for_comms(True)
        self.shared, self.added = type(self.module), vars(module).keys() - before
        self.state = self.module._get_fsdp_state()
        self.marks = {
            each: {name: vars(each)[name] for name in MARKS if name in vars(each)} for each in module.modules()
        }

    def detach_hooks(self) -> None:
        """Let it look and work like a plain module: transformers, for one, asks and would exchange words by itself."""
        self.state._pre_forward_hook_handle.remove()
        self.state._post_forward_hook_handle.remove()
        self.module.__class__ = self.plain
        for each in self.marks:
            for name in MARKS:
                vars(each).pop(name, None)

    def attach_hooks(self) -> None:
        """Let its passes be exchanges again."""
        state, module = self.state, self.module
        state._pre_forward_hook_handle = module.register_forward_pre_hook(
            state._pre_forward, prepend=True, with_kwargs=True
        )
        state._post_forward_hook_handle = module.register_forward_hook(state._post_forward)
        module.__class__ = self.shared
        for each, marks in self.marks.items():
            vars(each).update(marks)

    def forget(self) -> None:
        """Let torch know nothing of it any more."""
        _module_state_mapping.pop(self.module, None)
        for name in self.added:
            vars(self.module).pop(name, None)


def layers(module: nn.Module) -> list[nn.Module]:
    """The layers of a model from transformers, which work one after the other; none where they cannot be told."""
    names = {name for each in module.modules() for name in getattr(each, "_no_split_modules", None) or ()}
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
    return [layer for found in lists for layer in found if type(layer).__name__ in names]


def shard_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Of a tensor that every rank has whole, what this rank holds of `like`; the tensor itself where that is whole."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, which ranks may share; then all of them ask for it at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_state(state: Any, *, keep: bool) -> Any:
    """Optimizer state with whole tensors, on the processor; without `keep` this rank only helps others to theirs."""

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        found = full_tensor(tensor)
        return found.to("cpu", copy=True) if keep else torch.empty(0)

    return map_tensors(state, whole)


def sharded_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Optimizer state with this rank's part of each tensor that belongs to a shared parameter and has its shape."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def part(tensor: torch.Tensor, number: int) -> torch.Tensor:
        like = parameters[number]
        return shard_like(tensor, like) if tensor.shape == like.shape else tensor

    held = {
        number: map_tensors(values, lambda tensor, number=number: part(tensor, number))  # type: ignore[misc]
        for number, values in state["state"].items()
    }
    return {**state, "state": held}


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A nested value with each of its tensors changed, in the same order everywhere."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


@contextmanager
def communication_errors(about: str) -> Iterator[None]:
    """Around exchanges that are torch's own: what the network says of them comes from another rank that is gone."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise LostRankError(f"another process of the job is gone, or does not answer, at {about}: {error}") from error


@contextmanager
def full_params(shards: Shards | None) -> Iterator[None]:
    """Inside, every rank has all weights, where they are shared outside."""
    if shards is None:
        yield
        return
    with communication_errors("the weights of the model"):
        shards.unshard()
    try:
        yield
    finally:
        shards.reshard()
