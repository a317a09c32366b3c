"""The processes of hogwild, seen from the one that started them: begun, set to work, watched and ended."""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from partita_schema.errors import TrainingError
from partita_trainers.hogwild_worker import CONTEXT, SharedState, work

LOOK_SECONDS = 0.2
"""How often progress is looked at."""
SECONDS_TO_END = 5.0
"""What a worker has to end by itself."""
SHARED_MEMORY = Path("/dev/shm")
GO_ON = "train again with the same --run to go on from the last checkpoint"


class HogwildWorkers:
    """Processes that train until they are told that it is enough. None of them outlives this one."""

    def __init__(self, shared: SharedState, count: int) -> None:
        self.shared = shared
        self.links: list[Connection] = []
        self.processes: list[Any] = []
        with interrupts_ignored():  # which new processes inherit
            for number in range(count):
                ours, theirs = CONTEXT.Pipe()
                process = CONTEXT.Process(target=work, args=(shared, theirs), name=f"hogwild-{number}", daemon=True)
                process.start()
                theirs.close()  # so that a worker that is gone closes its end
                self.links.append(ours)
                self.processes.append(process)

    def run(self, until: int, *, look: Callable[[], None]) -> float:
        """Work off the batches before `until`, which is in this epoch; CPU seconds of all workers come back.

        `look` and errors are as for `answers`.
        """
        for number, link in enumerate(self.links):
            try:
                link.send(until)
            except OSError:
                raise self.gone(number) from None
        return self.answers(look=look)

    def answers(self, *, look: Callable[[], None]) -> float:
        """The sum of what all workers tell next: when they are ready, and behind an epoch its CPU seconds.

        `look` is called every now and then. Raises TrainingError where a worker fails or is gone.
        """
        left, seconds = dict(enumerate(self.links)), 0.0
        while left:
            ready = wait(list(left.values()), timeout=LOOK_SECONDS)
            look()
            for number in [number for number, link in left.items() if link in ready]:
                seconds += self.told(number)
                del left[number]
        return seconds

    def told(self, number: int) -> float:
        """CPU seconds that a worker tells of. Raises TrainingError for anything else."""
        try:
            found = self.links[number].recv()
        except (EOFError, OSError):
            raise self.gone(number) from None
        if isinstance(found, float):
            return found
        raised = str(found).strip()
        last = raised.splitlines()[-1]
        advice = "; write a lower trainer.learning_rate" if last.startswith("FloatingPointError") else ""
        raise TrainingError(f"hogwild's worker {number} failed: {last}{advice}\n{raised}")

    def gone(self, number: int) -> TrainingError:
        """What is said of a worker that has ended in the middle of its work."""
        process = self.processes[number]
        process.join(SECONDS_TO_END)
        code = process.exitcode
        if code is not None and code < 0:
            return TrainingError(f"hogwild's worker {number} was ended by {signal.Signals(-code).name}; {GO_ON}")
        told = f"hogwild's worker {number} ended with exit code {code}"
        if self.shared.counts.claimed == 0:
            return TrainingError(
                f"{told} before it had begun; what it said stands above. A script that trains needs "
                "`if __name__ == '__main__':` around its calls, because the workers read it as well"
            )
        return TrainingError(f"{told}; {GO_ON}")

    def close(self) -> None:
        """End all workers: what they are told, then by signals where they do not."""
        for link in self.links:
            link.close()  # a worker that waits for work ends; one that works is told to stop below
        self.shared.counts.stop.value = 1
        for process in self.processes:
            process.join(SECONDS_TO_END)
            for end in (process.terminate, process.kill):
                if process.is_alive():
                    end()
                    process.join(SECONDS_TO_END)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for process in self.processes:
                process.kill()
        self.close()


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Inside, Ctrl-C is ignored, where this thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def share(tensors: tuple[torch.Tensor, ...]) -> None:
    """Move tensors into memory that processes share. Raises TrainingError where there is too little of it."""
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        free = shutil.disk_usage(SHARED_MEMORY).free
        if needed > free:  # the system would end the process where it writes, not here
            raise TrainingError(
                f"hogwild needs {needed / 2**20:,.0f} MiB of shared memory, and {SHARED_MEMORY} has "
                f"{free / 2**20:,.0f} free; give the container more (docker run --shm-size), or write a smaller "
                "base_model.buckets or base_model.embedding_dim"
            )
    for tensor in tensors:
        tensor.share_memory_()  # type: ignore[no-untyped-call]  # torch has no types there
