"""The memory of a device, by its type."""

from collections.abc import Callable

import torch

from partita_schema.sections.memory_size import parse_memory
from partita_trainers.batch_size.accelerator_memory import AcceleratorMemory, AppleMemory
from partita_trainers.batch_size.host_memory import HostMemory
from partita_trainers.batch_size.memory import DeviceMemory


def device_memory(
    device: torch.device, *, memory_budget: str | int | float | None = None, processes: int = 1
) -> DeviceMemory:
    """Return the memory of a device.

    `memory_budget` limits what the job may hold there in total, including the model. `processes` is the number of
    processes of the job on this machine, which share its host memory and there also the budget.
    """
    allowed = None if memory_budget is None else parse_memory(memory_budget)
    kind = MEMORIES.get(device.type)
    return HostMemory(allowed, processes=processes) if kind is None else kind(device, allowed)


MEMORIES: dict[str, Callable[[torch.device, int | float | None], DeviceMemory]] = {
    "cuda": AcceleratorMemory,
    "xpu": AcceleratorMemory,
    "mps": AppleMemory,
}
"""Memory class by device type, constructed as `Memory(device, allowed)`."""
