"""What a run takes: time, CPU seconds and memory, summed over its starts."""

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

SUMS = ("cpu_seconds", "gpu_seconds")
"""Values that are summed over the ranks. Of the others, the largest counts."""


class Cost:
    """Measures this process from now on, and adds what earlier starts of the run took."""

    def __init__(self, earlier: Mapping[str, float]) -> None:
        self._earlier = dict(earlier)
        self._started, self._cpu_started = time.perf_counter(), cpu_seconds()

    def record(self) -> dict[str, float]:
        """Return the cost so far.

        The keys are `seconds`, `cpu_seconds` (of this process and its children that have ended), `peak_memory_bytes`
        (resident memory of this process) and with a GPU `gpu_seconds` and `peak_gpu_memory_bytes`.
        """
        seconds, memory = time.perf_counter() - self._started, gpu_memory()
        own = {"seconds": seconds, "cpu_seconds": cpu_seconds() - self._cpu_started}
        own |= {} if memory is None else {"gpu_seconds": seconds}
        sums = {name: self._earlier.get(name, 0.0) + value for name, value in own.items()}
        peaks = {"peak_memory_bytes": peak_memory()} | ({} if memory is None else {"peak_gpu_memory_bytes": memory})
        # Measurements of batch sizes reset the peaks, so that a later one may be lower.
        self._earlier |= {name: max(self._earlier.get(name, 0), value) for name, value in peaks.items()}
        return {**self._earlier, **sums}


def merged(costs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the cost of all ranks: CPU and GPU seconds are summed, and of time and memory the largest counts."""
    names = dict.fromkeys(name for cost in costs for name in cost)
    return {name: (sum if name in SUMS else max)(cost[name] for cost in costs if name in cost) for name in names}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def peak_memory() -> int:
    """Return the peak of this process's resident memory in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def gpu_memory() -> int | None:
    """Return the peak of the memory that torch has allocated on a GPU, in bytes; None if it uses none."""
    torch: Any = sys.modules.get("torch")  # importing it would take a second
    if torch is None or not torch.cuda.is_initialized():
        return None
    return max(int(torch.cuda.max_memory_allocated(device)) for device in range(torch.cuda.device_count()))
