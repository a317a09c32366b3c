"""Fully sharded weights: each rank holds a shard of every tensor, with its gradient and optimizer state.

This uses torch's `fully_shard` (FSDP2; Zhao et al. 2023, PyTorch FSDP, and Rajbhandari et al. 2020, ZeRO, stage 3). The
weights of a layer are gathered while it runs, and its gradients are reduced as soon as they are computed. Each pass is
a collective, so all ranks take the same number of passes, and no rank can retry its part alone.

A sharded parameter is a DTensor, sharded along its first dimension. Files hold full tensors and can be loaded on any
number of ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from partita_schema.errors import LostRankError
from partita_trainers.libraries.accelerate_internals import layer_class_names
from partita_trainers.libraries.torch_internals import (
    FSDP_MARKS,
    add_fsdp_hooks,
    forget_fsdp_state,
    fsdp_marks,
    remove_fsdp_hooks,
)


class Shards:
    """A module whose weights are sharded over the ranks, from construction to `unwrap`."""

    def __init__(self, module: nn.Module, *, device: torch.device, ranks: int) -> None:
        """Shard the module. All ranks of the default process group call this together, with equal weights."""
        mesh = init_device_mesh(device.type, (ranks,))
        self.module = module
        self.is_whole = False
        """Whether this rank holds all weights: between `unshard` and `reshard`."""
        self.parts = [ShardedModule(layer, mesh) for layer in [*layers(module), module]]

    @property
    def local_numel(self) -> int:
        """Number of weight elements that this rank holds between passes."""
        return sum(local_shard(parameter).numel() for parameter in self.module.parameters())

    def unshard(self) -> None:
        """Gather all weights on every rank until `reshard`.

        The module is plain meanwhile, and its passes are not collectives. All ranks call this together. Gradients are
        not reduced until `reshard`.
        """
        for part in self.parts:
            part.module.unshard()
            part.detach_hooks()
        self.is_whole = True

    def reshard(self) -> None:
        """Keep only this rank's shards again. Changes made to the weights since `unshard` are lost."""
        for part in self.parts:
            part.attach_hooks()
            part.module.reshard()
        self.is_whole = False

    def unwrap(self) -> None:
        """Restore a plain module with all weights. All ranks call this together."""
        # By parameter: tied weights are one parameter under two names and have to stay one.
        plain: dict[torch.Tensor, nn.Parameter] = {}
        for part in self.parts:
            part.module.reshard()
            for parameter in part.module.parameters():
                if isinstance(parameter, DTensor) and parameter not in plain:
                    gathered = full_tensor(parameter.detach())
                    plain[parameter] = nn.Parameter(gathered, requires_grad=parameter.requires_grad)
            # Only after gathering: without the hooks and torch's state the shards cannot be put together.
            part.detach_hooks()
            part.forget()
        for each in self.module.modules():
            for name, parameter in list(each.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter in plain:
                    each.register_parameter(name, plain[parameter])


class ShardedModule:
    """A module whose weights are gathered together."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.plain, before = type(module), set(vars(module))
        self.module: Any = fully_shard(module, mesh=mesh)
        # Sum, not mean: a step divides by its total loss tokens itself.
        self.module.set_gradient_divide_factor(1.0)
        self.module.set_force_sum_reduction_for_comms(True)
        self.shared, self.added = type(self.module), vars(module).keys() - before
        self.marks = fsdp_marks(module)

    def detach_hooks(self) -> None:
        """Make the module look and run like a plain one.

        transformers, for one, checks for FSDP and would communicate itself.
        """
        remove_fsdp_hooks(self.module)
        self.module.__class__ = self.plain
        for each in self.marks:
            for name in FSDP_MARKS:
                vars(each).pop(name, None)

    def attach_hooks(self) -> None:
        """Make the passes collectives again."""
        add_fsdp_hooks(self.module)
        self.module.__class__ = self.shared
        for each, marks in self.marks.items():
            vars(each).update(marks)

    def forget(self) -> None:
        """Remove torch's state of this module."""
        forget_fsdp_state(self.module)
        for name in self.added:
            vars(self.module).pop(name, None)


def layers(module: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a transformers model, which run one after the other; [] if they are unknown."""
    names = layer_class_names(module)
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
    return [layer for module_list in lists for layer in module_list if type(layer).__name__ in names]


def shard_like(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a full tensor, sharded like `like`; the tensor itself if `like` is not sharded."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard that this rank holds; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor. If it is sharded, all ranks call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_state(state: Any, *, keep: bool) -> Any:
    """Return optimizer state with full tensors on the CPU.

    Without `keep`, this rank only takes part in the collectives.
    """

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        full = full_tensor(tensor)  # a collective: every rank calls it for every tensor, in the same order
        return full.to("cpu", copy=True) if keep else torch.empty(0)

    return map_tensors(state, whole)


def sharded_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return optimizer state with this rank's shard of each tensor that has the shape of its sharded parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def part(tensor: torch.Tensor, number: int) -> torch.Tensor:
        like = parameters[number]
        # State of another shape, such as a step count, is not sharded.
        return shard_like(tensor, like) if tensor.shape == like.shape else tensor

    own_state = {
        number: map_tensors(values, lambda tensor, number=number: part(tensor, number))  # type: ignore[misc]
        for number, values in state["state"].items()
    }
    return {**state, "state": own_state}


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to each tensor of a nested value, in the same order on all ranks."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, change) for item in value)
    return value


@contextmanager
def communication_errors(about: str) -> Iterator[None]:
    """Raise LostRankError for errors of torch's own collectives: they mean that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise LostRankError.during(about, error) from error


def exchange_weights(
    parameters: Mapping[str, nn.Parameter], values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Give parameters other values, and return those that they had.

    Plain values are not copied. Sharded ones are gathered, one parameter at a time, into parameters that are whole on
    each rank, and the result has this rank's shards: no rank holds both values of all parameters. All
    ranks call this together if the weights are sharded.
    """
    before = dict[str, torch.Tensor]()
    for name, parameter in parameters.items():
        value = values[name]
        if not isinstance(value, DTensor):
            before[name], parameter.data = parameter.data, value
            continue
        assert not isinstance(parameter, DTensor), "the parameters are whole"
        before[name] = shard_like(parameter.data, value).clone()
        parameter.data.copy_(value.full_tensor())
    return before


@contextmanager
def full_params(shards: Shards | None) -> Iterator[None]:
    """Unshard all weights on every rank inside the context; does nothing if they are not sharded, or not any more."""
    if shards is None or shards.is_whole:
        yield
        return
    with communication_errors("the weights of the model"):
        shards.unshard()
    try:
        yield
    finally:
        shards.reshard()
