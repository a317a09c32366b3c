"""The memory of a machine, for models on a CPU: peaks are measured, and a limit is set at which allocations fail."""

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from partita_trainers.batch_size import linux
from partita_trainers.batch_size.memory import Peak, gigabytes, within

SHARE_OF_HOST = 0.8
OVERSHOOT, OVERSHOOT_BYTES = 1.05, 64 * 10**6
"""Factor and bytes by which the work may exceed its budget on a CPU before allocations fail.

The limit also counts memory that is allocated but not resident.
"""
BETWEEN_PROCESSES = 1.02
"""Factor between the peaks of the same work in two processes with different fragmentation."""


class HostMemory:
    """Host memory. Peaks are measured on Linux and unknown elsewhere."""

    slows_work = True

    def __init__(self, allowed: int | float | None, *, processes: int = 1) -> None:
        """Give each of `processes` on the machine an equal part of its memory, and of what is `allowed`."""
        self.processes = processes
        totals = (linux.cgroup_total(), linux.meminfo("MemTotal") or physical_memory())
        self.total = min((total for total in totals if total), default=0)
        limit = within(self.total, allowed)
        self.allowed = None if limit is None else limit // processes

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
        """Return 80 % of the tightest limit, or what the part of the user-set limit leaves if that is less."""
        free_bytes = int(SHARE_OF_HOST * min(self.free_bytes().values(), default=ASSUMED_FREE_BYTES))
        return free_bytes if self.allowed is None else max(0, min(free_bytes, self.allowed - self.held()))

    def describe(self) -> str:
        """Return the calculation of the budget in one line."""
        name, free = min(self.free_bytes().items(), key=lambda item: item[1], default=("assumed", ASSUMED_FREE_BYTES))
        if self.allowed is not None and self.allowed - self.held() <= SHARE_OF_HOST * free:
            part = f" / {self.processes} processes" if self.processes > 1 else ""
            whole = gigabytes(self.allowed * self.processes)
            return f"memory_budget {whole}{part} less {gigabytes(self.held())} that the process holds"
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
