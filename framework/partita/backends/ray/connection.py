"""The connection to Ray. No other module imports it."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from partita.distributed.init import available_cores
from partita_schema.errors import ConfigError, JobError, Problem
from partita_schema.sections.backend import RayBackendConfig

STORE_BYTES = 256 * 2**20
"""Object store size of a Ray that partita starts: nothing large is sent."""
RANK_RESOURCE = "partita"
"""A resource of a Ray that partita starts. Each rank takes one, and no other resource is counted there."""
RANK_RESOURCE_AMOUNT = 1_000_000
KNOCK_SECONDS = 20
"""Timeout for a connection to the address of a cluster, in seconds."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's future default, of which it warns: do not hide devices from workers that request no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Errors of the other workers after a job failed are not read.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    # Ray prints a long text to standard output, where results go; the worker pool logs the failure itself.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^A worker died or was killed",
    # Interval in which lost ranks are noticed.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # Keep relative paths relative to the folder of the command.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
"""Environment variables that Ray reads when imported; values that are already set are kept."""


def connect(backend: RayBackendConfig) -> Any:
    """Return the ray module, connected to the existing connection of this process, else to the configured address.

    Without an address, start a local Ray that ends with the process. Raises ConfigError if Ray is not installed, and
    JobError if it cannot be reached.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        message = "Ray is not installed; run `pip install 'partita[ray]'`, or remove backend"
        raise ConfigError([Problem("backend.type", message)]) from None
    if ray.is_initialized():
        return ray
    where = f"at {backend.address} (backend.address)" if backend.address else "on this machine"
    own = {
        "num_cpus": available_cores(),
        "resources": {RANK_RESOURCE: RANK_RESOURCE_AMOUNT},
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
    }
    with same_signals():
        try:
            if backend.address is not None:
                check_is_there(backend.address)
            ray.init(
                address=backend.address or "local",
                log_to_driver=False,
                logging_level="ERROR",
                **({} if backend.address else own),
            )
        except (OSError, RuntimeError, ValueError) as error:
            advice = "start a cluster with `ray start --head`, or correct it" if backend.address else "see its logs"
            raise JobError(f"Ray cannot be reached {where}: {error}; {advice}") from error
    return ray


def check_is_there(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT: Ray itself would retry for many minutes."""
    host, _, port = address.rpartition(":")
    if host:
        socket.create_connection((host, int(port)), timeout=KNOCK_SECONDS).close()


@contextmanager
def same_signals() -> Iterator[None]:
    """Restore this process's SIGTERM handler on exit."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def imported_ray() -> Any:
    """Return the module `ray`, for code that runs in a process that Ray started."""
    import ray

    return ray


def why_not_picklable(value: Any) -> str | None:
    """Return why Ray cannot send an object; None if it can."""
    try:
        imported_ray().cloudpickle.dumps(value)
    except Exception as error:  # PicklingError, or any error of a user's object
        return str(error)
    return None


def train_library() -> tuple[Any, Any]:
    """Return ray.train and ray.train.torch. Raises ConfigError if this version of Ray lacks them."""
    try:
        import ray.train
        import ray.train.torch

        _ = ray.train.UserCallback
    except (ImportError, AttributeError) as error:
        message = f"this Ray cannot train ({error}); run `pip install 'partita[ray]'`"
        raise ConfigError([Problem("backend.type", message)]) from None
    return ray.train, ray.train.torch


def resources(ray: Any) -> dict[str, float]:
    """Return the CPUs and GPUs of all machines."""
    total = ray.cluster_resources()
    return {"CPUs": total.get("CPU", 0.0), "GPUs": total.get("GPU", 0.0)}


def is_own(ray: Any) -> bool:
    """Return whether `connect` started this Ray."""
    return RANK_RESOURCE in ray.cluster_resources()


def worker_and_gpu_counts(ray: Any, backend: RayBackendConfig, *, device: str) -> tuple[int, int]:
    """Return the number of workers, and of the cluster's GPUs that they may use."""
    gpus = 0 if device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    return (gpus or 1) if backend.workers == "auto" else backend.workers, gpus
