"""Device memory: how much is available, how much a batch takes, and which errors mean that it is full.

This module knows nothing about the work itself. Accelerators report their memory. On a CPU, where the system would kill
the process instead of refusing an allocation, a limit is set at which allocations fail.
"""

import gc
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from partita_schema.sections.memory_size import parse_memory
from partita_trainers.batch_size import linux

T = TypeVar("T")

FULL = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudnn_status_not_supported",
    "handles_.at",
    "ur_result_error_out_of_",
    "nvml_success == r",
    "bad_alloc",
    "could not create a primitive",
    "could not create a memory object",
)
"""Texts of plain RuntimeErrors that mean out of memory.

cuDNN reports an unsupported operation if it cannot allocate its workspace, a handle pool asserts, the report of a full
device fails itself if NVML does not answer, and oneDNN cannot create a primitive.
"""
TOO_LARGE = (
    "invalid configuration argument",
    "canuse32bitindexmath",
    "integer out of range",
    "indexed with int32",
    "without overflow",
    "32-bit index",
    "2^31",
    "2**31",
    "int_max",
    "invalid buffer size",
)
"""Texts of errors from kernels that cannot index so many elements or rows."""
BROKEN = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
    "uncorrectable ecc",
    "device kernel image is invalid",
    "launch timed out",
    "ur_result_error_device_lost",
)
"""Texts of errors after which a device no longer works."""

SHARE_OF_HOST, SHARE_OF_DEVICE = 0.8, 0.98
DEVICE_MARGIN = 256 * 10**6
"""Bytes of a GPU reserved for allocations by libraries."""
OVERSHOOT, OVERSHOOT_BYTES = 1.05, 64 * 10**6
"""Factor and bytes by which the work may exceed its budget on a CPU before allocations fail.

The limit also counts memory that is allocated but not resident.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory is full, and not another failure."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return says(error, FULL) and not is_broken_device(error)


def is_too_large(error: BaseException) -> bool:
    """Return whether an error means that a kernel cannot index so many rows; fewer rows work."""
    return says(error, TOO_LARGE) and not is_out_of_memory(error) and not is_broken_device(error)


def is_broken_device(error: BaseException) -> bool:
    """Return whether all later work on this device would fail as well."""
    return says(error, BROKEN) or (
        isinstance(error, torch.AcceleratorError) and not says(error, FULL) and not says(error, TOO_LARGE)
    )


def says(error: BaseException, texts: tuple[str, ...]) -> bool:
    """Return whether a RuntimeError contains one of the texts. Errors of other types do not come from devices."""
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    return any(text in message for text in texts)


def attempt(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of a call, or the error if it does not fit on the device, after freeing what the call held.

    Other errors are raised.
    """
    try:
        return call(), None
    except Exception as error:
        if not (is_out_of_memory(error) or is_too_large(error)):
            raise
        failure = error
    # The error's traceback references the frames of the call, and keeps their tensors alive.
    failure.__traceback__ = failure.__context__ = failure.__cause__ = None
    free_everything()
    return None, failure


def free_everything() -> None:
    """Collect garbage and release cached memory of the allocators."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.xpu.is_available():
        torch.xpu.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
    if sys.platform == "linux":
        linux.give_back()


@dataclass
class Peak:
    """Peak memory of the work above what was held before, in bytes; None if the device cannot measure it."""

    used_bytes: int | None = None
    """Peak of the memory held at once."""
    taken_bytes: int | None = None
    """Peak of the memory taken from the device, including fragmentation."""


class DeviceMemory(Protocol):
    """The memory of one device as seen by this process."""

    @property
    def slows_work(self) -> bool:
        """Whether measuring slows the work down."""

    @property
    def identity(self) -> str:
        """The device's name and total memory, which determine how much there is."""

    def budget(self) -> int:
        """Return the bytes that may be taken in addition to what is held now."""

    def describe(self) -> str:
        """Return the calculation of the budget in one line."""

    def measure(self) -> AbstractContextManager[Peak]:
        """Measure the peak inside the context; the result is set on exit, also after an error."""

    def guard(self, *, exact: bool = False) -> AbstractContextManager[None]:
        """Turn excessive memory use inside the context into an error, instead of the end of the process.

        With `exact`, freed memory is returned to the system at once. This costs time, and makes the peak equal what is
        held.
        """

    def clear(self) -> None:
        """Release unused memory. Do not call this while handling an error, whose traceback keeps its memory alive."""


def device_memory(
    device: torch.device, *, memory_budget: str | int | float | None = None, processes: int = 1
) -> DeviceMemory:
    """Return the memory of a device.

    `memory_budget` limits what the process may hold there in total, including the model. `processes` is the number of
    processes of the job on this machine, which share its host memory.
    """
    allowed = None if memory_budget is None else parse_memory(memory_budget)
    kind = MEMORIES.get(device.type)
    return HostMemory(device, allowed, processes=processes) if kind is None else kind(device, allowed)


def within(total: int, allowed: int | float | None) -> int | None:
    """Return a user-set limit in bytes; a float is a fraction of `total`."""
    if allowed is None:
        return None
    return int(allowed * total) if isinstance(allowed, float) else allowed


BETWEEN_PROCESSES = 1.02
"""Factor between the peaks of the same work in two processes with different fragmentation."""


class HostMemory:
    """Host memory. Peaks are measured on Linux and unknown elsewhere."""

    slows_work = True

    def __init__(self, device: torch.device, allowed: int | float | None, *, processes: int = 1) -> None:
        self.processes = processes
        totals = (linux.cgroup_total(), linux.meminfo("MemTotal") or physical_memory())
        self.total = min((total for total in totals if total), default=0)
        self.allowed = within(self.total, allowed)

    @property
    def identity(self) -> str:
        """The processor and the total memory."""
        return f"{linux.processor() or platform.processor() or platform.machine()}, {self.total} bytes"

    def free_bytes(self) -> dict[str, int]:
        """Return what each limit of the machine leaves for this process, by name."""
        shared = {"available": linux.available_memory(), "of the control group": linux.cgroup_free_bytes()}
        per_process = {name: free // self.processes for name, free in shared.items() if free is not None}
        own = linux.limit_free_bytes() if sys.platform != "win32" else None
        return per_process if own is None else per_process | {"of the process's limit": own}

    def held(self) -> int:
        """Return the resident bytes of the process."""
        return linux.status("VmRSS") or 0

    def budget(self) -> int:
        """Return 80 % of the tightest limit, or what the user-set limit leaves if that is less."""
        free_bytes = int(SHARE_OF_HOST * min(self.free_bytes().values(), default=ASSUMED_FREE_BYTES))
        return free_bytes if self.allowed is None else max(0, min(free_bytes, self.allowed - self.held()))

    def describe(self) -> str:
        """Return the calculation of the budget in one line."""
        name, free = min(self.free_bytes().items(), key=lambda item: item[1], default=("assumed", ASSUMED_FREE_BYTES))
        if self.allowed is not None and self.allowed - self.held() <= SHARE_OF_HOST * free:
            return f"memory_budget {gigabytes(self.allowed)} less {gigabytes(self.held())} that the process holds"
        return f"{SHARE_OF_HOST} x {gigabytes(free)} {name}"

    @contextmanager
    def measure(self) -> Iterator[Peak]:
        """Measure VmHWM over VmRSS, while freed memory is returned to the system at once.

        If VmHWM cannot be reset, as in some containers, a peak below an earlier one is unknown.
        """
        peak = Peak()
        with ExitStack() as stack:
            stack.enter_context(self.guard(exact=True))
            from_here = linux.reset_peak()
            before, highest = linux.status("VmRSS"), linux.status("VmHWM")
            try:
                yield peak
            finally:
                after = linux.status("VmHWM")
                if before is not None and highest is not None and after is not None and (from_here or after > highest):
                    peak.used_bytes = max(0, after - before)
                    peak.taken_bytes = int(BETWEEN_PROCESSES * peak.used_bytes)

    @contextmanager
    def guard(self, *, exact: bool = False) -> Iterator[None]:
        """Limit the process's data to slightly above the budget; without `exact`, freed memory is kept for reuse."""
        if sys.platform != "linux":
            yield
            return
        linux.give_back()
        with (
            linux.data_limit(int(OVERSHOOT * self.budget()) + OVERSHOOT_BYTES),
            linux.exact_allocations() if exact else linux.kept_allocations(),
        ):
            yield

    def clear(self) -> None:
        """Return freed memory to the system.

        Garbage is not collected, which takes longer than a probe; it counts as held.
        """
        if sys.platform == "linux":
            linux.give_back()


def physical_memory() -> int | None:
    """Return the bytes of physical memory on systems without /proc; None if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


ASSUMED_FREE_BYTES = 4 * 10**9
"""Free memory to assume if the machine does not report any."""


class AcceleratorMemory:
    """The memory of a CUDA, ROCm or XPU GPU, as counted by torch's allocator."""

    slows_work = False

    def __init__(self, device: torch.device, allowed: int | float | None) -> None:
        self.device = device
        self.library: Any = getattr(torch, device.type)
        self.total = int(self.library.mem_get_info(device)[1])
        self.allowed = within(self.total, allowed)

    @property
    def identity(self) -> str:
        """The name of the device and its total memory."""
        return f"{self.library.get_device_name(self.device)}, {self.total} bytes"

    def free_bytes(self) -> int:
        """Return free device memory plus unused memory in this process's allocator."""
        free = int(self.library.mem_get_info(self.device)[0])
        unused = self.library.memory_reserved(self.device) - self.library.memory_allocated(self.device)
        return free + int(unused)

    def budget(self) -> int:
        """Return 98 % of the free memory minus 256 MB, or what the user-set limit leaves if that is less."""
        free_bytes = int(SHARE_OF_DEVICE * self.free_bytes()) - DEVICE_MARGIN
        if self.allowed is not None:
            free_bytes = min(free_bytes, self.allowed - int(self.library.memory_allocated(self.device)))
        return max(0, free_bytes)

    def describe(self) -> str:
        """Return the calculation of the budget in one line."""
        free_bytes, held = self.free_bytes(), int(self.library.memory_allocated(self.device))
        if self.allowed is not None and self.allowed - held <= SHARE_OF_DEVICE * free_bytes - DEVICE_MARGIN:
            return f"memory_budget {gigabytes(self.allowed)} less {gigabytes(held)} that the process holds"
        return f"{SHARE_OF_DEVICE} x {gigabytes(free_bytes)} free less {gigabytes(DEVICE_MARGIN)}"

    @contextmanager
    def measure(self) -> Iterator[Peak]:
        """Measure the peaks of allocated and reserved memory above what was allocated before."""
        peak = Peak()
        self.library.synchronize(self.device)
        self.library.empty_cache()
        self.library.reset_peak_memory_stats(self.device)
        before = self.library.memory_allocated(self.device)
        try:
            yield peak
        finally:
            peak.used_bytes = int(self.library.max_memory_allocated(self.device) - before)
            peak.taken_bytes = int(self.library.max_memory_reserved(self.device) - before)

    @contextmanager
    def guard(self, *, exact: bool = False) -> Iterator[None]:
        """Enforce a user-set limit in the allocator. Without one the device itself refuses allocations."""
        if self.allowed is None or not hasattr(self.library, "get_per_process_memory_fraction"):
            yield
            return
        before = self.library.get_per_process_memory_fraction(self.device)
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
        """Enforce a user-set limit in the allocator. Without one the device itself refuses allocations."""
        if self.allowed is not None:
            torch.mps.set_per_process_memory_fraction(min(1.0, self.allowed / self.total))
        yield

    def clear(self) -> None:
        """Collect garbage and release cached memory of the allocator."""
        free_everything()


MEMORIES: dict[str, Callable[[torch.device, int | float | None], DeviceMemory]] = {
    "cuda": AcceleratorMemory,
    "xpu": AcceleratorMemory,
    "mps": AppleMemory,
}
"""Memory class by device type, constructed as `Memory(device, allowed)`."""


def gigabytes(count: int) -> str:
    """Format a number of bytes."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
