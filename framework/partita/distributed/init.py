"""Initialization of the process group: the device, threads and peers of this process."""

import logging
import os
from functools import cache

from partita.distributed.world import DistributedEnv, get_world
from partita_schema.common.text import counted
from partita_schema.errors import PartitaError
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

logger = logging.getLogger(__name__)

THREADS_BY_HAND = "PARTITA_THREADS"
"""Set by the launcher if the user chose the number of threads: torchrun itself sets OMP_NUM_THREADS=1."""


@cache
def init_process_group(timeout_seconds: float, *, on_cpu: bool) -> ProcessGroup:
    """Set this process's device and threads, and connect to the other processes; runs once per process."""
    import torch

    from partita.distributed.process_group import DistributedGroup

    world = get_world()
    device = torch.device("cpu")
    for kind in () if on_cpu else ("cuda", "xpu"):
        library = getattr(torch, kind)
        if library.is_available():
            device = torch.device(kind, local_device_index(kind))
            library.set_device(device)
            break
    threads = own_threads(world, cores=available_cores(), environment=dict(os.environ))
    torch.set_num_threads(threads)
    logger.info(
        "%s, %d of them on %s with %s each",
        counted(world.world_size, "process", "processes"),
        world.local_world_size,
        world.node,
        counted(threads, "thread"),
    )
    return DistributedGroup(world, device=device, timeout_seconds=timeout_seconds)


def joined_process_group(timeout_seconds: float = 1800.0) -> ProcessGroup:
    """Return the process group that the program has initialized with torch.distributed, else a single process.

    If there are several processes, all of them call this in the same order.

    Args:
        timeout_seconds: Seconds that a process waits for another.

    Raises:
        PartitaError: The process was started as one of several, and torch.distributed is not initialized.
    """
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if (started := get_world().world_size) > 1:
            raise PartitaError(
                f"this is one of {started} processes, and torch.distributed is not initialized, so each would read all "
                "rows; call torch.distributed.init_process_group() first"
            )
        return SINGLE_PROCESS
    if dist.get_world_size() == 1:
        return SINGLE_PROCESS
    from partita.distributed.process_group import DistributedGroup

    started_as = get_world()
    world = DistributedEnv(dist.get_rank(), dist.get_world_size(), started_as.local_rank, started_as.local_world_size)
    return DistributedGroup(world, device=torch.device("cpu"), timeout_seconds=timeout_seconds)


def local_device_index(kind: str) -> int:
    """Return the index of this process's GPU. Raises PartitaError if the machine has more processes than GPUs."""
    import torch

    world, count = get_world(), getattr(torch, kind).device_count()
    if world.local_world_size > count:
        raise PartitaError(
            f"{world.local_world_size} processes on {world.node}, and {count} devices of {kind}: start as many "
            "processes "
            "as there are devices, or write model_parameters: {device: cpu}"
        )
    return world.local_rank


def own_threads(world: DistributedEnv, *, cores: int, environment: dict[str, str]) -> int:
    """Return the number of threads of a process: the user's OMP_NUM_THREADS, else its share of the cores."""
    written = environment.get("OMP_NUM_THREADS", "")
    by_torchrun = written == "1" and "TORCHELASTIC_RUN_ID" in environment and THREADS_BY_HAND not in environment
    if written.isdigit() and int(written) > 0 and not by_torchrun:
        return int(written)
    return max(1, cores // world.local_world_size)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
