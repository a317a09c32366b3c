"""Ranks on Ray Train, which starts and stops processes and places them on machines.

If a rank is lost, Ray restarts all of them, which resume at the newest checkpoint by themselves.
"""

import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from partita.backends.ray.connection import (
    RANK_RESOURCE,
    connect,
    imported_ray,
    is_own,
    resources,
    train_library,
    why_not_picklable,
    worker_and_gpu_counts,
)
from partita.backends.ray.event_queue import EventQueue, JobFinished, Message, Posted
from partita.backends.ray.rank import run_rank
from partita.backends.ray.rank_monitor import RankWork
from partita.backends.ray.worker_pool import LONGEST_REASON
from partita.outputs.base import clip
from partita_schema.common.garbage_collection import permanent_imports
from partita_schema.errors import DataError, JobError
from partita_schema.sections.backend import RayBackendConfig

LEAVE_SECONDS = 5.0
"""Seconds that ranks have to exit by themselves after one failed, before Ray stops them."""
END_SECONDS = 20.0
"""Seconds that Ray has to stop everything that belongs to a training."""


class RayRankLauncher:
    """A `partita.backends.ray.rank_monitor.RankLauncher` on Ray Train's TorchTrainer.

    The ranks end with the process.
    """

    def __init__(
        self,
        backend: RayBackendConfig,
        call: partial[Any],
        *,
        work: RankWork,
        device: str,
        threads: str,
        quiet: bool,
        storage: Path,
    ) -> None:
        """Start the ranks.

        Args:
            backend: Backend section of the configuration.
            call: Runs on each rank; must be picklable. Its keywords `dataset` and `callbacks` are objects of the user.
            work: What the ranks do, for messages.
            device: The configured device.
            threads: OMP_NUM_THREADS of the command, "" if unset.
            quiet: Whether ranks report less log output.
            storage: Folder that Ray may write to.

        Raises:
            ConfigError: Ray is not installed.
            JobError: Ray cannot be reached.
            DataError: The call cannot be pickled.
        """
        self.ray, self.work = connect(backend), work
        warnings.filterwarnings("ignore", module=r"ray\.")  # Ray's warnings about itself do not concern users
        train, torch_trainer = train_library()
        self.workers, gpus = worker_and_gpu_counts(self.ray, backend, device=device)
        here = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            self.ray.get_runtime_context().get_node_id(), soft=False
        )
        self.board = self.ray.remote(num_cpus=0, scheduling_strategy=here)(EventQueue).remote()
        self.known: dict[str, Any] = {}
        try:
            sent = self.ray.put(call)
        except Exception as error:  # PicklingError, or any error of a user's object
            raise DataError(unsent_text(call, error)) from error
        board = self.board

        def rank() -> None:
            """Run on every worker."""
            work_as_rank(sent, board, threads=threads, quiet=quiet)

        self.trainer = torch_trainer.TorchTrainer(
            rank,
            torch_config=torch_trainer.TorchConfig(
                backend="cpu:gloo,cuda:nccl" if gpus else "gloo", timeout_s=math.ceil(backend.timeout_seconds)
            ),
            scaling_config=scaling_config(self.ray, train, workers=self.workers, gpus=gpus),
            run_config=train.RunConfig(
                name="partita",
                storage_path=str(storage),
                failure_config=train.FailureConfig(max_failures=backend.max_failures),
                callbacks=[restart_callback(train, board)],
            ),
        )
        self.thread = threading.Thread(target=self.fit, name="partita-ray-train", daemon=True)
        self.thread.start()

    def fit(self) -> None:
        """Run the TorchTrainer and report its end; runs in a separate thread."""
        over = JobFinished()
        try:
            self.trainer.fit()
        except Exception as error:  # Ray's own errors; a rank reports its error itself
            over = JobFinished(" ".join(str(error).split()), type(error).__name__ == "WorkerGroupError")
        with suppress(Exception):  # Ray may already be gone when the process ends
            self.ray.get(self.board.post.remote("", over))

    def poll(self, timeout_seconds: float) -> Sequence[Posted]:
        """Return new messages. Raises an error if Ray is gone."""
        self.thread.join(timeout_seconds)
        try:
            messages, self.known = self.ray.get(self.board.fetch.remote())
        except self.ray.exceptions.RayError as error:
            reason = clip(" ".join(str(error).split()), most=LONGEST_REASON)
            raise self.work.error(f"Ray is gone ({reason}); {self.work.advice}") from error
        return list(messages)

    def stop(self) -> None:
        """Ask all ranks to stop."""
        self.ray.get(self.board.stop.remote())

    def end(self, sender: str) -> None:
        """Kill the actor of a rank."""
        with suppress(self.ray.exceptions.RayError):
            self.ray.kill(self.known[sender])

    def close(self) -> None:
        """Kill the remaining ranks and wait for Ray."""
        if self.thread.is_alive():
            with suppress(self.ray.exceptions.RayError, JobError):
                self.stop()
                self.poll(0)
            for sender in [sender for sender, rank in self.known.items() if rank is not None]:
                self.end(sender)
            self.thread.join(END_SECONDS)

    def resources(self) -> Mapping[str, float]:
        """Return the CPUs and GPUs of all machines."""
        return resources(self.ray)


def unsent_text(call: partial[Any], error: Exception) -> str:
    """Return which object of the user cannot be sent to workers, and what to do.

    Args:
        call: What was to be sent.
        error: The error of Ray, whose text has many lines.
    """
    for callback in call.keywords.get("callbacks", ()):
        if reason := why_not_picklable(callback):
            name = type(callback).__name__
            advice = f"create what it holds in on_start, or name {name} in the file, under callbacks"
            return f"the callback {name} cannot be sent to workers ({reason}); {advice}"
    reason = why_not_picklable(call.keywords.get("dataset")) or str(error)
    return f"the dataset cannot be sent to workers ({reason}); write it to a file, and name that"


def work_as_rank(sent: Any, board: Any, *, threads: str, quiet: bool) -> None:
    """Run the work as one of Ray Train's workers.

    Args:
        sent: Reference to the pickled work.
        board: Actor of the event queue.
        threads: OMP_NUM_THREADS of the command, "" if unset.
        quiet: Whether to report less log output.
    """
    ray = imported_ray()
    context = ray.get_runtime_context()
    sender, actor = context.get_actor_id(), context.current_actor

    def send(message: Message) -> None:
        ray.get(board.post.remote(sender, message, actor))

    def is_stopping() -> bool:
        return bool(ray.get(board.is_stopping.remote()))

    run_rank(lambda: received(sent)(), send=send, is_stopping=is_stopping, threads=threads, quiet=quiet)


def received(sent: Any) -> Callable[[], Any]:
    """Return the work that was sent to this rank. Raise DataError if an object of the user cannot be unpickled here."""
    ray = imported_ray()
    try:
        with permanent_imports():  # unpickling imports the libraries
            work: Callable[[], Any] = ray.get(sent)
    except ray.exceptions.RaySystemError as error:
        reason = str(error).splitlines()[0].removeprefix("System error: ")
        raise DataError(
            f"an object that you passed cannot be read on a worker ({reason}); the module of its class must be "
            "importable there"
        ) from None
    return work


def restart_callback(train: Any, board: Any) -> Any:
    """Return a Ray Train callback that raises after a worker failed if a restart would not help."""

    class RestartCallback(train.UserCallback):  # type: ignore[misc]  # Ray's classes are known once it is imported
        def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
            ray = imported_ray()
            if ray.get(board.record_deaths.remote(list(worker_exceptions))):
                end = time.monotonic() + LEAVE_SECONDS
                while ray.get(board.is_at_work.remote()) and time.monotonic() < end:
                    time.sleep(0.1)  # the other ranks need time to notice and report their end
                raise JobError("the training is over")

    return RestartCallback()


def scaling_config(ray: Any, train: Any, *, workers: int, gpus: int) -> Any:
    """Return Ray Train's ScalingConfig.

    Args:
        ray: The Ray module.
        train: The module `ray.train`.
        workers: Number of ranks.
        gpus: Number of the cluster's GPUs that they may use.
    """
    # On a Ray that this process started, ranks are limited by a resource of ours: they may be more than its CPUs.
    each = {RANK_RESOURCE: 1.0} if is_own(ray) else {"CPU": 1.0}
    per_worker = {**each, "GPU": 1.0} if gpus else each
    return train.ScalingConfig(num_workers=workers, use_gpu=bool(gpus), resources_per_worker=per_worker)
