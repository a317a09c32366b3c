"""Measurements of batch sizes by a formula, so that observations do not depend on what else the machine does."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from partita_trainers.batch_size import tune
from partita_trainers.batch_size.probe import ProbeResult, Timing
from partita_trainers.batch_size.probe_runner import ProbeRunner

BYTES = 10**6
"""Memory of a row."""
SECONDS = 0.001
"""Time of a batch of any size."""
measured_probe, measured_time, measured_step = ProbeRunner.probe, ProbeRunner.time, ProbeRunner.step


def fix_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the times and the memory that probes of batch sizes measure; the probes run, and the budgets are real."""

    def probe(self: ProbeRunner, rows: int) -> ProbeResult:
        result = measured_probe(self, rows)
        if result.taken_bytes is None:
            return result
        taken = rows * BYTES
        times = {"prefill_seconds": SECONDS, "decode_seconds": SECONDS, "seconds": SECONDS}
        return replace(result, used_bytes=taken, taken_bytes=taken, **times)

    def time(self: ProbeRunner, rows: int) -> Timing | None:
        return Timing(SECONDS, SECONDS) if measured_time(self, rows) is not None else None

    def step(self: ProbeRunner, rows: int) -> float | None:
        return SECONDS if measured_step(self, rows) is not None else None

    for replacement in (probe, time, step):
        monkeypatch.setattr(ProbeRunner, replacement.__name__, replacement)
    monkeypatch.setattr(tune, "time", SimpleNamespace(perf_counter=lambda: 0.0))
