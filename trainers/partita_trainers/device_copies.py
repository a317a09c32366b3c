"""Copies between host and device with few synchronizations.

Kernels on an accelerator are queued, and the host continues at once. It has to wait for all of them where it reads a
value, or copies from memory that is not pinned. A training step therefore computes everything that depends on the batch
alone on the host, copies it without waiting, and reads what it reports together, once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

if TYPE_CHECKING:
    from partita_trainers.base import Batch

Inputs = TypeVar("Inputs")


@runtime_checkable
class PrefetchingModel(Protocol):
    """A language model that can copy the inputs of a batch to its device before it computes with them."""

    def prefetch(self, batch: "Batch") -> None:
        """Begin to copy what `loss` or `token_log_probs` of this batch need; called while another is computed."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device. The host does not wait for the device: the memory is pinned for it."""
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "mps")


def fetch_scalars(values: Sequence[torch.Tensor | float]) -> list[float]:
    """Return numbers and scalar tensors as numbers, with a single copy from the device."""
    tensors = {index: value for index, value in enumerate(values) if isinstance(value, torch.Tensor)}
    far = {index: tensor for index, tensor in tensors.items() if tensor.device.type != "cpu"}
    numbers = [0.0 if index in far else float(value) for index, value in enumerate(values)]
    if far:
        # float64 represents int32 and float32 exactly; mps has no float64.
        dtype = torch.float32 if any(tensor.device.type == "mps" for tensor in far.values()) else torch.float64
        together = torch.stack([tensor.detach().reshape(()).to(dtype) for tensor in far.values()])
        for index, number in zip(far, together.tolist(), strict=True):
            numbers[index] = number
    return numbers


class Prefetch(Generic[Inputs]):
    """The inputs of the next batch, which are copied to the device while it computes with those of another one."""

    def __init__(self, device: torch.device) -> None:
        """Create the copy stream of a CUDA device."""
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._next: tuple[Batch, Inputs] | None = None

    def begin(self, batch: "Batch", copy: Callable[["Batch"], Inputs]) -> None:
        """Begin to copy the inputs of a batch with `copy`, which returns a dataclass. Nothing is copied to a CPU."""
        if self.device.type == "cpu":
            return
        with self._copying():
            self._next = batch, copy(batch)

    def take(self, batch: "Batch", copy: Callable[["Batch"], Inputs]) -> Inputs:
        """Return the inputs of a batch, which are copied now if `begin` was not called with it."""
        prefetched, self._next = self._next, None
        if prefetched is None or prefetched[0] is not batch:
            return copy(batch)
        inputs = prefetched[1]
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            for tensor in tensors_of(inputs):
                tensor.record_stream(current)  # the allocator must not reuse its memory before these kernels have run
        return inputs

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Use the copy stream, if there is one."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield


def tensors_of(inputs: Any) -> list[torch.Tensor]:
    """Return the tensors in the fields of a dataclass that are on an accelerator."""
    values = (getattr(inputs, field.name) for field in fields(inputs))
    return [value for value in values if isinstance(value, torch.Tensor) and value.device.type != "cpu"]
