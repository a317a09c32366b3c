"""Where this process stands among those of its job: read once from what torchrun, accelerate or slurm have written."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from partita_schema.errors import PartitaError

LAUNCHED = "PARTITA_LAUNCHED"
"""Set in processes that the command has started itself."""


@dataclass(frozen=True)
class World:
    """One process among those of a job."""

    rank: int = 0
    """Place among all, from 0."""
    world_size: int = 1
    """Number of all."""
    local_rank: int = 0
    """Place among those of this machine, from 0: the device that this process has."""
    local_world_size: int = 1
    """Number of those of this machine."""

    @property
    def node(self) -> str:
        """This process's machine, for what is said to people."""
        return os.uname().nodename


@cache
def get_world() -> World:
    """The place of this process, the same whenever it is asked for."""
    return read_world(os.environ)


def read_world(environment: Mapping[str, str]) -> World:
    """The place that variables tell: those of torchrun and accelerate, else of slurm's srun, else alone.

    Raises PartitaError where they contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # of srun; what sbatch itself starts is one process
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    else:
        return World()
    rank, ranks = (int(environment[name]) for name in names[:2])
    local_rank = int(environment.get(names[2], 0))
    # slurm counts as in "4(x2),3": 4 on each of two machines, 3 on a third.
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", environment.get(names[3], "1"))
    local_ranks = max(map(int, counts), default=1)
    if not (0 <= rank < ranks and 0 <= local_rank < local_ranks <= ranks):
        told = ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
        raise PartitaError(f"these variables contradict each other: {told}; start the job by torchrun, or unset them")
    return World(rank, ranks, local_rank, local_ranks)
