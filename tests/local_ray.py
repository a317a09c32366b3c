"""A Ray on this machine for tests."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def local_ray() -> Iterator[Any]:
    """Start Ray on this machine, with resources for eight workers, and stop it on exit."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
    os.environ |= {"RAY_worker_niceness": "0"}  # Ray's default of 15 leaves its workers no time beside other tests
    os.environ |= {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}  # one process less for each training
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'partita[ray]'")
    terminate = signal.getsignal(signal.SIGTERM)
    settings = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    ray.init(log_to_driver=False, logging_level="ERROR", **settings)
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield ray
    finally:
        ray.shutdown()
