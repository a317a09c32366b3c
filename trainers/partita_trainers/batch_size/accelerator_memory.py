"""The memory of GPUs, as counted by the allocators of torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from partita_trainers.batch_size.device_errors import free_everything
from partita_trainers.batch_size.memory import Peak, gigabytes, within

SHARE_OF_DEVICE = 0.98
DEVICE_MARGIN = 256 * 10**6
"""Bytes of a GPU reserved for allocations by libraries."""


class AcceleratorMemory:
    """The memory of a CUDA, ROCm or XPU GPU, as counted by torch's allocator and the driver."""

    slows_work = False

    def __init__(self, device: torch.device, allowed: int | float | None) -> None:
        self.device = device
        self.library: Any = getattr(torch, device.type)
        self.total = int(self.library.mem_get_info(device)[1])
        self.allowed = within(self.total, allowed)
        self.limit_name = "memory_budget"
        # PYTORCH_ALLOC_CONF or the user's program may have limited the allocator.
        fraction = self.memory_fraction()
        limit = int(fraction * self.total)
        if fraction < 1 and (self.allowed is None or limit < self.allowed):
            self.allowed, self.limit_name = limit, "torch's memory fraction"
        self.expected_free = 0
        """Free bytes when the latest budget was computed, less what the budget does not use."""

    @property
    def identity(self) -> str:
        """The name of the device and its total memory."""
        return f"{self.library.get_device_name(self.device)}, {self.total} bytes"

    def memory_fraction(self) -> float:
        """Return the fraction of the device that the allocator may take; 1.0 if torch has no such limit for it."""
        read = getattr(self.library, "get_per_process_memory_fraction", None)
        return 1.0 if read is None else float(read(self.device))

    def held(self) -> int:
        """Return the bytes of this process's tensors."""
        return int(self.library.memory_allocated(self.device))

    def free_bytes(self, held: int) -> int:
        """Return free device memory plus unused memory in the allocator, for tensors of `held` bytes."""
        return int(self.library.mem_get_info(self.device)[0] + self.library.memory_reserved(self.device)) - held

    def budget(self) -> int:
        """Return 98 % of the free memory minus 256 MB, or what a limit leaves if that is less."""
        held = self.held()
        free_bytes = self.free_bytes(held)
        safe = max(0, int(SHARE_OF_DEVICE * free_bytes) - DEVICE_MARGIN)
        budget = safe if self.allowed is None else max(0, min(safe, self.allowed - held))
        self.expected_free = free_bytes - (safe - budget)
        return budget

    def describe(self) -> str:
        """Return the calculation of the budget in one line."""
        held = self.held()
        free_bytes = self.free_bytes(held)
        if self.allowed is not None and self.allowed - held <= SHARE_OF_DEVICE * free_bytes - DEVICE_MARGIN:
            return f"{self.limit_name} {gigabytes(self.allowed)} less {gigabytes(held)} that the process holds"
        return f"{SHARE_OF_DEVICE} x {gigabytes(free_bytes)} free less {gigabytes(DEVICE_MARGIN)}"

    @contextmanager
    def measure(self) -> Iterator[Peak]:
        """Measure the peaks of allocated and reserved memory above what was allocated before, within the limit.

        What is no longer free since the budget was computed is counted too. Libraries load kernels and allocate
        buffers outside torch's allocator when they first need them, and other processes may take memory.
        """
        peak = Peak()
        self.library.synchronize(self.device)
        self.library.empty_cache()
        self.library.reset_peak_memory_stats(self.device)
        before = self.held()
        with self.guard():
            try:
                yield peak
            finally:
                lost = max(0, self.expected_free - self.free_bytes(before))
                peak.used_bytes = int(self.library.max_memory_allocated(self.device)) - before + lost
                peak.taken_bytes = int(self.library.max_memory_reserved(self.device)) - before + lost

    @contextmanager
    def guard(self, *, exact: bool = False) -> Iterator[None]:
        """Enforce a user-set limit in the allocator. Without one the device itself refuses allocations."""
        if self.allowed is None or not hasattr(self.library, "get_per_process_memory_fraction"):
            yield
            return
        before = self.memory_fraction()
        self.library.set_per_process_memory_fraction(min(1.0, self.allowed / self.total), self.device)
        try:
            yield
        finally:
            self.library.set_per_process_memory_fraction(before, self.device)

    def clear(self) -> None:
        """Collect garbage and release cached memory of the allocator."""
        free_everything()


class AppleMemory:
    """The memory of MPS, which keeps all memory it has taken: the amount after the work is the peak."""

    slows_work = False

    def __init__(self, device: torch.device, allowed: int | float | None) -> None:
        self.total = int(torch.mps.recommended_max_memory())
        self.allowed = within(self.total, allowed)

    @property
    def identity(self) -> str:
        """The kind of device and its total memory."""
        return f"mps, {self.total} bytes"

    def budget(self) -> int:
        """Return 98 % of the recommended memory that is not held, minus 256 MB, or what a user-set limit leaves."""
        held = int(torch.mps.current_allocated_memory())
        free_bytes = int(SHARE_OF_DEVICE * (self.total - held)) - DEVICE_MARGIN
        return max(0, free_bytes if self.allowed is None else min(free_bytes, self.allowed - held))

    def describe(self) -> str:
        """Return the calculation of the budget in one line."""
        return f"{gigabytes(self.allowed or self.total)} less {gigabytes(int(torch.mps.current_allocated_memory()))}"

    @contextmanager
    def measure(self) -> Iterator[Peak]:
        """Measure the driver's memory before and after."""
        peak = Peak()
        torch.mps.synchronize()
        torch.mps.empty_cache()
        before = torch.mps.driver_allocated_memory()
        try:
            yield peak
        finally:
            torch.mps.synchronize()
            peak.used_bytes = peak.taken_bytes = max(0, torch.mps.driver_allocated_memory() - before)

    @contextmanager
    def guard(self, *, exact: bool = False) -> Iterator[None]:
        """Enforce a user-set limit in the allocator. Without one the device itself refuses allocations.

        torch.mps cannot tell the limit that was set before, so this one stays.
        """
        if self.allowed is not None:
            torch.mps.set_per_process_memory_fraction(min(1.0, self.allowed / self.total))
        yield

    def clear(self) -> None:
        """Collect garbage and release cached memory of the allocator."""
        free_everything()
