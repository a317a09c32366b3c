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

from ....device_watch import SIZES_FROM_VALUES, by_mask

WAITING = ("_local_scalar_dense", "is_nonzero", "equal")
"""Operations whose result the host needs."""
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
        if name in WAITING or func in SIZES_FROM_VALUES or by_mask(func, tuple(args)):
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
