"""How much memory a device has to give, what a batch takes of it, and how it says that it is full.

Nothing here knows what the work is. A device that can be asked is asked; a CPU, whose system would rather end the
process than refuse, is given a limit that it refuses at.
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

from partita_schema.memory_size import parse_memory
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
"""What devices and allocators write in a plain RuntimeError when memory is full.

cuDNN says that something is not supported where its workspace cannot be had, a pool of handles asserts, the report of
a full device fails itself where NVML does not answer, and oneDNN cannot create a primitive without memory for it.
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
"""What kernels write that cannot count so many elements or rows."""
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
"""What a device writes that answers nothing any more."""

SHARE_OF_HOST, SHARE_OF_DEVICE = 0.8, 0.98
DEVICE_MARGIN = 256 * 10**6
"""Bytes of a GPU that libraries may still take for themselves."""
OVERSHOOT, OVERSHOOT_BYTES = 1.05, 64 * 10**6
"""How far beyond its budget the work may go before a CPU refuses: data that was asked for and is not in memory counts
there too."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is full, and not that something else is wrong."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return says(error, FULL) and not is_broken_device(error)


def is_too_large(error: BaseException) -> bool:
    """Whether an error says that a kernel cannot count so many rows: with fewer it works."""
    return says(error, TOO_LARGE) and not is_out_of_memory(error) and not is_broken_device(error)


def is_broken_device(error: BaseException) -> bool:
    """Whether everything that comes after this error on this device would fail as well."""
    return says(error, BROKEN) or (
        isinstance(error, torch.AcceleratorError) and not says(error, FULL) and not says(error, TOO_LARGE)
    )


def says(error: BaseException, texts: tuple[str, ...]) -> bool:
    """Errors of devices are RuntimeErrors; any other kind with such words speaks of something else."""
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    return any(text in message for text in texts)


def attempt(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What a call gives; or, where it does not fit the device, the error, once everything that it held is free.

    Any other error is raised.
    """
    try:
        return call(), None
    except Exception as error:
        if not (is_out_of_memory(error) or is_too_large(error)):
            raise
        failure = error
    # The traceback holds the frames of the call, and with them its tensors, as long as anything holds the error.
    failure.__traceback__ = failure.__context__ = failure.__cause__ = None
    free_everything()
    return None, failure


def free_everything() -> None:
    """Nothing that is not used is held any more, neither by Python nor by the allocators."""
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
    """What work took at its peak, on top of what was held before, in bytes; None where the device cannot tell."""

    used_bytes: int | None = None
    """What it held at once."""
    taken_bytes: int | None = None
    """What the process took from the device for it: blocks that could not be filled are in it."""


class DeviceMemory(Protocol):
    """The memory of one device, as this process sees it."""

    @property
    def slows_work(self) -> bool:
        """Whether work takes longer while it is measured."""

    @property
    def identity(self) -> str:
        """What decides how much there is: the device's name and its memory."""

    def budget(self) -> int:
        """Bytes that may be taken on top of what is held now."""

    def describe(self) -> str:
        """The arithmetic of the budget, in a line."""

    def measure(self) -> AbstractContextManager[Peak]:
        """Inside, the peak is followed; it stands in what the context gives when that ends, also by an error."""

    def guard(self, *, exact: bool = False) -> AbstractContextManager[None]:
        """Around work: taking too much is an error of the work, and does not end the process.

        With `exact`, freed memory is given back at once, which costs time and makes the peak what is held.
        """

    def clear(self) -> None:
        """Give back what is not used. Not while an error is handled: it would hold what it holds."""


def device_memory(
    device: torch.device, *, memory_budget: str | int | float | None = None, processes: int = 1
) -> DeviceMemory:
    """The memory of a device. `memory_budget` is what the process may hold there in all, the model included.

    On the machine there are so many `processes` of the job, which share what is not on a device of their own.
    """
    allowed = None if memory_budget is None else parse_memory(memory_budget)
    kind = MEMORIES.get(device.type)
    return HostMemory(device, allowed, processes=processes) if kind is None else kind(device, allowed)


def within(total: int, allowed: int | float | None) -> int | None:
    """A user's amount in bytes: a share is one of `total`."""
    if allowed is None:
        return None
    return int(allowed * total) if isinstance(allowed, float) else allowed


BETWEEN_PROCESSES = 1.02
"""What the same work may take in another process, whose memory is cut up differently."""


class HostMemory:
    """The memory of a machine. On Linux peaks are measured; elsewhere they are not known."""

    slows_work = True

    def __init__(self, device: torch.device, allowed: int | float | None, *, processes: int = 1) -> None:
        self.processes = processes
        totals = (linux.cgroup_total(), linux.meminfo("MemTotal") or physical_memory())
        self.total = min((total for total in totals if total), default=0)
        self.allowed = within(self.total, allowed)

    @property
    def identity(self) -> str:
        """The processor and the memory."""
        return f"{linux.processor() or platform.processor() or platform.machine()}, {self.total} bytes"

    def rooms(self) -> dict[str, int]:
        """What each limit of the machine leaves to this process, by its name."""
        shared = {"available": linux.available_memory(), "of the control group": linux.cgroup_room()}
        rooms = {name: room // self.processes for name, room in shared.items() if room is not None}
        own = linux.limit_room() if sys.platform != "win32" else None
        return rooms if own is None else rooms | {"of the process's limit": own}

    def held(self) -> int:
        """Bytes of the process in memory."""
        return linux.status("VmRSS") or 0

    def budget(self) -> int:
        """The tightest limit less a fifth, or what the user's leaves."""
        room = int(SHARE_OF_HOST * min(self.rooms().values(), default=UNKNOWN_ROOM))
        return room if self.allowed is None else max(0, min(room, self.allowed - self.held()))

    def describe(self) -> str:
        """The arithmetic of the budget."""
        name, room = min(self.rooms().items(), key=lambda item: item[1], default=("assumed", UNKNOWN_ROOM))
        if self.allowed is not None and self.allowed - self.held() <= SHARE_OF_HOST * room:
            return f"memory_budget {gigabytes(self.allowed)} less {gigabytes(self.held())} that the process holds"
        return f"{SHARE_OF_HOST} x {gigabytes(room)} {name}"

    @contextmanager
    def measure(self) -> Iterator[Peak]:
        """VmHWM over VmRSS, while memory is given back as soon as it is free.

        Where VmHWM may not be reset, as in some containers, a peak below an earlier one is not known.
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
        """A limit on the process's data, a little above the budget; where memory is plenty, what is freed is kept."""
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
        """Give freed memory back. Garbage is not looked for, which takes longer than a probe: it counts as held."""
        if sys.platform == "linux":
            linux.give_back()


def physical_memory() -> int | None:
    """Bytes of the machine, from systems without a /proc; None where they do not say it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


UNKNOWN_ROOM = 4 * 10**9
"""What a machine is taken to have free that says nothing."""


class AcceleratorMemory:
    """The memory of a GPU of CUDA, ROCm or XPU, whose allocator counts."""

    slows_work = False

    def __init__(self, device: torch.device, allowed: int | float | None) -> None:
        self.device = device
        self.library: Any = getattr(torch, device.type)
        self.total = int(self.library.mem_get_info(device)[1])
        self.allowed = within(self.total, allowed)

    @property
    def identity(self) -> str:
        """The name of the device and its memory."""
        return f"{self.library.get_device_name(self.device)}, {self.total} bytes"

    def room(self) -> int:
        """What nobody has, and what this process's allocator has and does not use."""
        free = int(self.library.mem_get_info(self.device)[0])
        unused = self.library.memory_reserved(self.device) - self.library.memory_allocated(self.device)
        return free + int(unused)

    def budget(self) -> int:
        """98 % of what is free less 256 MB, or what the user's limit leaves."""
        room = int(SHARE_OF_DEVICE * self.room()) - DEVICE_MARGIN
        if self.allowed is not None:
            room = min(room, self.allowed - int(self.library.memory_allocated(self.device)))
        return max(0, room)

    def describe(self) -> str:
        """The arithmetic of the budget."""
        room, held = self.room(), int(self.library.memory_allocated(self.device))
        if self.allowed is not None and self.allowed - held <= SHARE_OF_DEVICE * room - DEVICE_MARGIN:
            return f"memory_budget {gigabytes(self.allowed)} less {gigabytes(held)} that the process holds"
        return f"{SHARE_OF_DEVICE} x {gigabytes(room)} free less {gigabytes(DEVICE_MARGIN)}"

    @contextmanager
    def measure(self) -> Iterator[Peak]:
        """Peaks of what is allocated and of what is reserved, over what was allocated before."""
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
        """The device refuses by itself; with a limit of the user's, the allocator does so there."""
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
        """Collect garbage, and give the device back what the allocator keeps."""
        free_everything()


class AppleMemory:
    """The memory of MPS, which keeps what it has taken: what it has after the work is the peak."""

    slows_work = False

    def __init__(self, device: torch.device, allowed: int | float | None) -> None:
        self.total = int(torch.mps.recommended_max_memory())
        self.allowed = within(self.total, allowed)

    @property
    def identity(self) -> str:
        """The kind of device and its memory."""
        return f"mps, {self.total} bytes"

    def budget(self) -> int:
        """98 % of what is recommended and not held, less 256 MB, or what the user's limit leaves."""
        held = int(torch.mps.current_allocated_memory())
        room = int(SHARE_OF_DEVICE * (self.total - held)) - DEVICE_MARGIN
        return max(0, room if self.allowed is None else min(room, self.allowed - held))

    def describe(self) -> str:
        """The arithmetic of the budget."""
        return f"{gigabytes(self.allowed or self.total)} less {gigabytes(int(torch.mps.current_allocated_memory()))}"

    @contextmanager
    def measure(self) -> Iterator[Peak]:
        """What the driver has given, before and after."""
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
        """The device refuses by itself; with a limit of the user's, the allocator does so there."""
        if self.allowed is not None:
            torch.mps.set_per_process_memory_fraction(min(1.0, self.allowed / self.total))
        yield

    def clear(self) -> None:
        """Collect garbage, and give the device back what the allocator keeps."""
        free_everything()


MEMORIES: dict[str, Callable[[torch.device, int | float | None], DeviceMemory]] = {
    "cuda": AcceleratorMemory,
    "xpu": AcceleratorMemory,
    "mps": AppleMemory,
}
"""By type of device, made as `Memory(device, allowed)`."""


def gigabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
