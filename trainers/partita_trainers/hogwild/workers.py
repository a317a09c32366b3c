"""The worker processes of hogwild as seen by the parent: start, run, monitor and stop."""

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
from partita_trainers.hogwild.worker import CONTEXT, SharedState, work

LOOK_SECONDS = 0.2
"""Interval between progress updates, in seconds."""
SECONDS_TO_END = 5.0
"""Time that a worker has to exit by itself."""
SHARED_MEMORY = Path("/dev/shm")
GO_ON = "train again with the same --run to resume from the last checkpoint"


class HogwildWorkers:
    """Worker processes that train until they are stopped. None of them outlives this process."""

    def __init__(self, shared: SharedState, count: int) -> None:
        self.shared = shared
        self.links: list[Connection] = []
        self.processes: list[Any] = []
        with interrupts_ignored():  # new processes inherit this
            for number in range(count):
                ours, theirs = CONTEXT.Pipe()
                process = CONTEXT.Process(target=work, args=(shared, theirs), name=f"hogwild-{number}", daemon=True)
                process.start()
                theirs.close()  # so that the pipe breaks when the worker exits
                self.links.append(ours)
                self.processes.append(process)

    def run(self, until: int, *, look: Callable[[], None]) -> float:
        """Train the batches before `until`, an index in this epoch, and return the CPU seconds of all workers.

        `look` and errors are as in `answers`.
        """
        for number, link in enumerate(self.links):
            try:
                link.send(until)
            except OSError:
                raise self.worker_error(number) from None
        return self.answers(look=look)

    def answers(self, *, look: Callable[[], None]) -> float:
        """Wait for one message from every worker and return their sum: 0 when ready, CPU seconds after an epoch.

        `look` is called periodically. Raises TrainingError if a worker fails or is gone.
        """
        left, seconds = dict(enumerate(self.links)), 0.0
        while left:
            ready = wait(list(left.values()), timeout=LOOK_SECONDS)
            look()
            for number in [number for number, link in left.items() if link in ready]:
                seconds += self.cpu_seconds(number)
                del left[number]
        return seconds

    def cpu_seconds(self, number: int) -> float:
        """Receive a worker's CPU seconds. Raises TrainingError for any other message."""
        try:
            message = self.links[number].recv()
        except (EOFError, OSError):
            raise self.worker_error(number) from None
        if isinstance(message, float):
            return message
        raised = str(message).strip()
        last = raised.splitlines()[-1]
        advice = "; write a lower trainer.learning_rate" if last.startswith("FloatingPointError") else ""
        raise TrainingError(f"hogwild's worker {number} failed: {last}{advice}\n{raised}")

    def worker_error(self, number: int) -> TrainingError:
        """Return the error for a worker that exited during its work."""
        process = self.processes[number]
        process.join(SECONDS_TO_END)
        code = process.exitcode
        if code is not None and code < 0:
            return TrainingError(f"hogwild's worker {number} was ended by {signal.Signals(-code).name}", GO_ON)
        failure = f"hogwild's worker {number} ended with exit code {code}"
        if self.shared.counts.claimed == 0:
            return TrainingError(
                f"{failure} before it started; see its output above. A script that trains needs "
                "`if __name__ == '__main__':` around its calls, because the workers read it as well"
            )
        return TrainingError(failure, GO_ON)

    def close(self) -> None:
        """Stop all workers: first by closing their pipes and the stop flag, then by signals."""
        for link in self.links:
            link.close()  # waiting workers exit; busy ones see the stop flag set below
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
    """Ignore Ctrl-C inside the context, if called in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def share(tensors: tuple[torch.Tensor, ...]) -> None:
    """Move tensors into shared memory. Raises TrainingError if there is not enough of it."""
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        free = shutil.disk_usage(SHARED_MEMORY).free
        if needed > free:  # otherwise the system kills the process when it writes
            raise TrainingError(
                f"hogwild needs {needed / 2**20:,.0f} MiB of shared memory, and {SHARED_MEMORY} has "
                f"{free / 2**20:,.0f} free; give the container more (docker run --shm-size), or write a smaller "
                "base_model.buckets or base_model.embedding_dim"
            )
    for tensor in tensors:
        tensor.share_memory_()  # type: ignore[no-untyped-call]  # torch has no types there
