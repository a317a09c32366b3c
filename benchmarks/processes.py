"""Forks of this process: jobs with several ranks, and killed jobs.

Each fork starts after the imports, so that a benchmark with many processes imports the libraries once.
"""

import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

HEAVY = (
    "accelerate",
    "bitsandbytes",
    "datasets",
    "peft",
    "sympy",
    "transformers.models.llama.modeling_llama",
    "partita.model",
    "partita_trainers.finetune",
)
"""Modules that each rank would otherwise import in its first seconds."""


@dataclass(frozen=True)
class Kill:
    """Which rank is killed, and when."""

    rank: int
    due: Callable[[], bool]
    """Returns whether the job has reached the point of the kill."""
    delay: float
    """Seconds between `due` and the kill."""
    end_others: bool = False
    """Whether the other ranks get SIGTERM shortly after, as from a launcher."""


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    status: list[int]
    """Exit status of every rank, as `os.waitpid` returns it."""
    seconds_after: float
    """Time from a kill to the end of the last rank."""


def import_all() -> None:
    """Import the libraries once, for all forks."""
    import torch

    for name in HEAVY:
        importlib.import_module(name)
    torch.set_num_threads(1)


def fork(work: Callable[[], object]) -> int:
    """Start `work` in a fork and return its process id. The exit status is 1 after an exception."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:
        if type(error).__name__ != "OtherRankError":  # the failed rank prints the reason
            traceback.print_exc()
    finally:
        os._exit(code)


def run_fork(work: Callable[[], object]) -> None:
    """Run `work` in a fork to its end."""
    kill_when(fork(work), lambda: False)


def kill_when(pid: int, due: Callable[[], bool], *, delay: Callable[[], float] = lambda: 0.0) -> bool:
    """Kill a fork `delay` seconds after `due` is true, and wait for its end.

    Returns:
        Whether it was killed; False if it ended before.
    """
    if wait_until(due, pid):
        time.sleep(delay())
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit("a process of the benchmark failed")
    return os.WIFSIGNALED(status)


def wait_until(due: Callable[[], bool], pid: int) -> bool:
    """Return True once `due` is true, and False if the process ends before."""
    while not due():
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        time.sleep(0.001)
    return True


def run_ranks(ranks: int, work: Callable[[int], object], *, kill: Kill | None = None) -> Ended:
    """Call `work` with its rank in `ranks` forks that communicate over gloo, and wait for all of them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pids = [fork(partial(as_rank, rank, ranks, port, work)) for rank in range(ranks)]
    killed = time.monotonic()
    if kill is not None and wait_until(kill.due, pids[kill.rank]):
        time.sleep(kill.delay)
        os.kill(pids[kill.rank], signal.SIGKILL)
        killed = time.monotonic()
        if kill.end_others:
            time.sleep(0.1)
            for pid in pids:
                os.kill(pid, signal.SIGTERM)  # no effect on zombies
    status = [os.waitpid(pid, 0)[1] for pid in pids]
    return Ended(status, time.monotonic() - killed)


def must_run_ranks(ranks: int, work: Callable[[int], object]) -> None:
    """Run a job of several ranks, and end the benchmark if one fails."""
    if any(run_ranks(ranks, work).status):
        sys.exit("a rank failed")


def as_rank(rank: int, ranks: int, port: int, work: Callable[[int], object]) -> None:
    """Call `work` with the environment of a rank; a single process has none."""
    if ranks > 1:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    work(rank)


def count_lines(folder: Path, pattern: str) -> int:
    """Return the number of lines in the files of a folder that match a pattern."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob(pattern) if path.is_file())
