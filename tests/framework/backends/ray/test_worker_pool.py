"""Tests of what a pool of workers reports."""

from typing import Any

import numpy as np
import pytest

from partita.backends.ray.messages import Offer
from partita.backends.ray.worker_pool import WorkerPool, log_smallest
from partita.lm.base import GenerationOptions
from partita_trainers.batch_size.probe import BatchSize, Origin


def sizes(*rows: int, origin: Origin = "tuned", fits: int | None = 20) -> list[BatchSize]:
    return [BatchSize(rows=number, origin=origin, device="cpu", max_fitting=fits) for number in rows]


@pytest.mark.parametrize(
    ("measured", "lines"),
    [
        (sizes(16, 16, 16), ["batch size for generation: 16 rows on each of 3 workers; up to 20 fit"]),
        (
            sizes(16, 1, origin="cached"),
            ["batch size for generation: 1 row on each of 2 workers (another measured 16); up to 20 fit"],
        ),
        (sizes(8, 8, origin="file", fits=None), []),
    ],
    ids=["equal", "different", "not measured"],
)
def test_a_measured_batch_size_is_logged(
    measured: list[BatchSize], lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    log_smallest("generation", measured)
    assert caplog.messages == lines


def test_a_batch_size_that_stays_the_same_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Any = None
    pool = WorkerPool(nothing, nothing, tokenizer=nothing, workers=2, timeout_seconds=1)
    caplog.set_level("INFO")
    for rows in (16, 16, 8):
        monkeypatch.setattr(pool, "ask", lambda *args, rows=rows, **named: [Offer(sizes(rows)[0], None)] * 2)
        pool.offer(
            GenerationOptions({}),
            lengths=np.ones(3, dtype=np.int64),
            shared_tokens=0,
            batch_size=None,
            max_new_tokens=4,
        )
    assert caplog.messages == [
        f"batch size for generation: {rows} rows on each of 2 workers; up to 20 fit" for rows in (16, 8)
    ]
