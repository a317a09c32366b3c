"""A device that cannot be read without being noticed: torch's `meta`, whose tensors have shapes and no values.

A model on it computes as on a GPU, as far as the host can tell: what is on the device has to be copied there, and the
host learns a value only by waiting for it.
"""

import traceback
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
DEVICE = torch.device("meta")
SIZES_FROM_VALUES = (
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
)
"""Operators whose result has a size that the host has to read."""


FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
"""Functions that copy values of the host, which is not seen among the operators of this device."""


class DeviceWatch(TorchDispatchMode):
    """Notes each time the host waits for the device. What it reads is 1 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = list[str]()
        """What made the host wait, with the line of the caller."""
        self.copies = 0
        """Number of copies to the device that the host does not wait for."""
        self.functions = FunctionWatch(self)

    def __enter__(self) -> "DeviceWatch":
        super().__enter__()
        self.functions.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.functions.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func in (aten._to_copy.default, aten.copy_.default):
            return self.copy(func, args, kwargs)
        on_device = [tensor for tensor in tensors if tensor.device == DEVICE]
        if not on_device:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default or func in SIZES_FROM_VALUES or by_mask(func, args):
            self.note(func)
            return tree_map(to_device, func(*tree_map(to_host, args), **tree_map(to_host, kwargs)))
        if any(tensor.device != DEVICE and tensor.ndim for tensor in tensors):
            self.note(func, "a tensor of the host")
            args, kwargs = tree_map(to_device, args), tree_map(to_device, kwargs)
        return func(*args, **kwargs)

    def copy(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Copy a tensor; note if it changes the device and the host waits."""
        to_other = func is aten._to_copy.default
        source = args[0] if to_other else args[1]
        target = torch.device(kwargs.get("device") or source.device) if to_other else args[0].device
        if source.device == target:
            return func(*args, **kwargs)
        if target == DEVICE and (kwargs.get("non_blocking") or (not to_other and len(args) > 2 and args[2])):
            self.copies += 1
        elif source.ndim or target != DEVICE:
            self.note(func, "to the device" if target == DEVICE else "to the host")
        return func(to_host(source), *args[1:], **kwargs) if to_other else func(args[0], to_device(source))

    def note(self, func: Any, what: str = "") -> None:
        """Note that the host waits."""
        frames = [one for one in traceback.extract_stack() if "site-packages/torch/" not in one.filename]
        frame = [one for one in frames if one.filename != __file__][-1]
        self.waits.append(f"{func} {what} in {frame.filename.rsplit('/', 2)[-1]}:{frame.lineno} {frame.line}")


class FunctionWatch(TorchFunctionMode):
    """Notes for a `DeviceWatch` the tensors on the device that are made of values of the host."""

    def __init__(self, watch: DeviceWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_copied = func in FROM_VALUES and not isinstance(args[-1], torch.Tensor)
        if is_copied and result.device == DEVICE:
            self.watch.note(func.__name__, "of values of the host")
        return result


def by_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator selects or sets elements by a mask, which has to be read to know how many."""
    if func not in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def to_host(value: Any) -> Any:
    """Return a tensor of the device as ones on the host; other values as they are."""
    is_there = isinstance(value, torch.Tensor) and value.device == DEVICE
    return torch.ones(value.shape, dtype=value.dtype) if is_there else value


def to_device(value: Any) -> Any:
    """Return a tensor on the device without its values; other values as they are."""
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value
