"""The rank of this process and the world size, read from the environment variables of torchrun, accelerate or slurm."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from partita_schema.errors import PartitaError

LAUNCHED = "PARTITA_LAUNCHED"
"""Set in processes that the command itself launched."""
FAILURE_GRACE_SECONDS = 5.0
"""Seconds that a process waits before it exits after another one failed, so that the other is reported first."""


@dataclass(frozen=True)
class DistributedEnv:
    """The position of one process in its job."""

    rank: int = 0
    """Rank among all processes, from 0."""
    world_size: int = 1
    """Number of processes."""
    local_rank: int = 0
    """Rank among the processes of this machine, from 0; selects the device."""
    local_world_size: int = 1
    """Number of processes on this machine."""

    @property
    def node(self) -> str:
        """Host name of this machine, for messages."""
        return os.uname().nodename


@cache
def get_world() -> DistributedEnv:
    """Return the position of this process; read once."""
    return read_world(os.environ)


def read_world(environment: Mapping[str, str]) -> DistributedEnv:
    """Read a position from the variables of torchrun and accelerate, else of slurm's srun; otherwise a single process.

    Raises PartitaError if the variables contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:  # set by srun; sbatch itself starts one process
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
    else:
        return DistributedEnv()
    rank, world_size = (int(environment[name]) for name in names[:2])
    local_rank = int(environment.get(names[2], 0))
    # slurm counts as in "4(x2),3": 4 on each of two machines, 3 on a third.
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", environment.get(names[3], "1"))
    local_world_size = max(map(int, counts), default=1)
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        variables = ", ".join(f"{name}={environment[name]}" for name in names if name in environment)
        raise PartitaError(
            f"these variables contradict each other: {variables}; start the job by torchrun, or unset them"
        )
    return DistributedEnv(rank, world_size, local_rank, local_world_size)
