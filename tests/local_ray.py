"""A Ray on this machine for tests."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def local_ray() -> Iterator[Any]:
    """Start Ray on this machine, and stop it on exit."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    os.environ |= {"RAY_worker_niceness": "0"}  # otherwise another Ray on this machine would be used
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'partita[ray]'")
    terminate = signal.getsignal(signal.SIGTERM)
    settings = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    ray.init(log_to_driver=False, logging_level="ERROR", **settings)
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield ray
    finally:
        ray.shutdown()
