"""Device memory: how much is available, and how much a batch takes.

Accelerators report their memory (`accelerator_memory.py`). On a CPU, where the system would kill the process instead of
refusing an allocation, a limit is set at which allocations fail (`host_memory.py`).
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


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


def within(total: int, allowed: int | float | None) -> int | None:
    """Return a user-set limit in bytes; a float is a fraction of `total`."""
    if allowed is None:
        return None
    return int(allowed * total) if isinstance(allowed, float) else allowed


def gigabytes(count: int) -> str:
    """Format a number of bytes."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
