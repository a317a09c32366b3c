"""Jobs of several ranks for benchmarks: forks of this process, behind the imports, that find each other by gloo."""

import importlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
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
"""What each rank would spend its first seconds on."""


@dataclass(frozen=True)
class Kill:
    """Which rank is killed, and when."""

    rank: int
    files: str
    """A glob."""
    lines: int
    """Once the files have so many lines together."""
    delay: float
    """And so many seconds later."""
    end_others: bool = False
    """Whether the others get SIGTERM a moment later, as from a launcher."""


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    status: list[int]
    """Exit status of every rank, as `os.waitpid` gives it."""
    seconds_after: float
    """Time from a kill to the end of the last rank."""


def import_all() -> None:
    """Import the libraries once, for all forks."""
    import torch

    for name in HEAVY:
        importlib.import_module(name)
    torch.set_num_threads(1)


def run_ranks(ranks: int, work: Callable[[int], object], *, folder: Path, kill: Kill | None = None) -> Ended:
    """Call `work` with its rank in so many forks, and wait for all of them; `folder` is where files of a kill are."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pids = [fork(rank, ranks, port, work) for rank in range(ranks)]
    killed = time.monotonic()
    if kill is not None and wait_for(pids[kill.rank], folder, kill):
        time.sleep(kill.delay)
        os.kill(pids[kill.rank], signal.SIGKILL)
        killed = time.monotonic()
        if kill.end_others:
            time.sleep(0.1)
            for pid in pids:
                os.kill(pid, signal.SIGTERM)  # those that have ended wait for their parent, and mind nothing
    status = [os.waitpid(pid, 0)[1] for pid in pids]
    return Ended(status, time.monotonic() - killed)


def fork(rank: int, ranks: int, port: int, work: Callable[[int], object]) -> int:
    """The process of a rank; one alone does not know that there could be others."""
    pid = os.fork()
    if pid:
        return pid
    if ranks > 1:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    try:
        work(rank)
    except BaseException as error:
        if type(error).__name__ != "OtherRankError":  # another one has said why
            traceback.print_exc()
        os._exit(1)
    os._exit(0)


def wait_for(pid: int, folder: Path, kill: Kill) -> bool:
    """Whether the files came to so many lines before the rank ended."""
    while sum(path.read_bytes().count(b"\n") for path in folder.glob(kill.files)) < kill.lines:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return False
        time.sleep(0.001)
    return True
