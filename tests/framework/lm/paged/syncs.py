"""Counts what makes the host wait for the device, or copies to it, and the shapes of all operations.

Only the first two are operations of torch's dispatcher on a CPU; `tolist` and `torch.tensor` are seen as functions.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "nonzero_static",
    "is_nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
)
"""Operations whose result or its shape the host needs."""
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
"""Operations that wait for the number of ones of a mask."""
READING = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__len__of_mask__")
WRITING = ("tensor", "as_tensor", "from_numpy")


class Operations(TorchDispatchMode):
    """Records the operations of a region."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.shapes: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        tensors = [value for value in tree_leaves((args, kwargs)) if torch.is_tensor(value)]
        indices = tree_leaves(args[1]) if name in INDEXING else []
        if name in WAITING or any(torch.is_tensor(one) and one.dtype == torch.bool for one in indices):
            self.waits[name] += 1
        self.shapes.append((name, tuple(tuple(one.shape) for one in tensors)))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Counts the functions that read tensors on the host, or create them from values of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.writes: Counter[str] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in READING:
            self.reads[name] += 1
        if name in WRITING:
            self.writes[name] += 1
        return func(*args, **(kwargs or {}))


class Seen:
    """What a call did."""

    def __init__(self, work: Callable[[], Any]) -> None:
        operations, functions = Operations(), Functions()
        with functions, operations:
            self.result = work()
        self.waits, self.shapes = operations.waits, operations.shapes
        self.reads, self.writes = functions.reads, functions.writes

    @property
    def host_waits(self) -> int:
        """How often the host waited for the device."""
        return sum(self.waits.values()) + sum(self.reads.values())
