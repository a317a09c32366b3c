"""Several processes: their launch with torchrun's elastic agent, and the process group of each.

If a process fails, the agent stops the others. The error of the first one is printed, and its exit code becomes that of
the command.
"""

import ctypes
import logging
import math
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from partita.distributed.init import THREADS_BY_HAND, available_cores, init_process_group
from partita.distributed.world import LAUNCHED, get_world
from partita_schema.common.text import describe_error
from partita_schema.config import Config
from partita_schema.errors import ConfigError, JobError, Problem
from partita_schema.sections.backend import RayBackendConfig, TorchrunBackendConfig
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
"""Linux: signal to send to this process when its parent exits."""
DEFAULT_TIMEOUT = 1800.0
"""Seconds that a process waits for another if the configuration sets no timeout."""


def get_process_group(config: Config) -> ProcessGroup:
    """Return the process group of this process: a single process, unless it was started as one of several."""
    world = get_world()
    if world.world_size == 1:
        return SINGLE_PROCESS
    device = config.model_parameters.device
    if ":" in device and world.local_world_size > 1:
        kind = device.partition(":")[0]
        message = f"{device} is one device, and each of {world.local_world_size} processes needs its own; write {kind}"
        raise ConfigError([Problem("model_parameters.device", message)])
    backend = config.backend
    timeout = (
        backend.timeout_seconds if isinstance(backend, TorchrunBackendConfig | RayBackendConfig) else DEFAULT_TIMEOUT
    )
    return init_process_group(timeout, on_cpu=device == "cpu")


def num_processes(backend: TorchrunBackendConfig) -> int:
    """Return the number of processes on this machine: as configured, else one per GPU, else one."""
    if backend.processes != "auto":
        return backend.processes
    import torch

    return max(1, torch.cuda.device_count() if torch.cuda.is_available() else 1)


def is_to_be_launched(config: Config) -> bool:
    """Return whether the configuration asks for several processes and this is not one of them yet."""
    backend = config.backend
    if (
        not isinstance(backend, TorchrunBackendConfig)
        or get_world().world_size > 1
        or "TORCHELASTIC_RUN_ID" in os.environ
    ):
        return False
    return backend.nodes > 1 or num_processes(backend) > 1


def launch(config: Config, arguments: Sequence[str]) -> int:
    """Run `partita` with these arguments in all processes of this machine and return the exit code.

    On several machines, the same command is started on each. Raises JobError if a signal ended one of the processes,
    and KeyboardInterrupt if the signal was for all of them.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
    from torch.distributed.launcher.api import elastic_launch

    backend = config.backend
    if not isinstance(backend, TorchrunBackendConfig):
        raise AssertionError("only a file with backend: {type: torchrun} is launched")
    for name in logging.root.manager.loggerDict:  # each sets its own level
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    settings = launch_settings(backend)
    if backend.nodes > 1:
        logger.info(
            "waiting up to %g seconds for %d machines at %s; for this one alone, add --set 'backend={type: local}'",
            *(settings.rdzv_configs["join_timeout"], backend.nodes, settings.rdzv_endpoint),
        )
    os.environ[LAUNCHED] = str(os.getpid())
    if "OMP_NUM_THREADS" in os.environ:
        os.environ[THREADS_BY_HAND] = "1"
    else:
        os.environ["OMP_NUM_THREADS"] = str(max(1, available_cores() // settings.nproc_per_node))
    try:
        # -P: the current folder is not searched, as by this command; it may have a random.py.
        elastic_launch(settings, sys.executable)("-P", "-m", "partita", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            raise JobError(
                f"rank {rank} was ended by {name}, and the others with it; rerun the same command to resume from "
                "what is saved"
            ) from None
        return int(failure.exitcode)
    except RendezvousError as error:
        is_late = isinstance(error, RendezvousTimeoutError)
        reason = f"in {backend.timeout_seconds:g} seconds" if is_late else f"({describe_error(error)})"
        raise JobError(
            f"{backend.nodes} machines did not meet at {settings.rdzv_endpoint} {reason}; start the same command on "
            "each of them, and write backend.address as one that all of them reach"
        ) from error
    except SignalException:
        raise KeyboardInterrupt from None
    finally:
        del os.environ[LAUNCHED]
    return 0


def launch_settings(backend: TorchrunBackendConfig) -> "LaunchConfig":
    """Return the settings of torchrun's launcher."""
    from torch.distributed.launcher.api import LaunchConfig

    timeout_seconds = math.ceil(backend.timeout_seconds)  # the agent takes whole seconds, and refuses 0
    return LaunchConfig(
        min_nodes=backend.nodes,
        max_nodes=backend.nodes,
        nproc_per_node=num_processes(backend),
        run_id="partita" if backend.nodes > 1 else f"partita-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint=backend.address or "localhost:0",
        rdzv_configs={"join_timeout": timeout_seconds},
        max_restarts=0,
        # After Ctrl-C or SIGTERM, a step, its evaluation and a checkpoint are finished first. Once a process has
        # failed, the agent gives the others half a minute, whatever this says.
        shutdown_timeout=timeout_seconds,
    )


def end_with_launcher() -> None:
    """Let this process receive SIGTERM when its launcher is gone, however that ended.

    The job could otherwise continue without it and keep the run locked.
    """
    if LAUNCHED in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(os.environ[LAUNCHED]):  # it exited before prctl was called
            raise KeyboardInterrupt
