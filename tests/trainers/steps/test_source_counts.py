"""Tests of counts by source, of a step and of an interrupted run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from partita_schema.config import Config
from partita_trainers.base import Batch, GlobalBatch
from partita_trainers.steps.source_counts import SourceCounts

from ..conftest import Killed, run


def batch(keys: list[str], lengths: list[int]) -> Batch:
    ids = torch.ones(len(keys), max(lengths), dtype=torch.int64)
    return Batch(ids, ids, torch.tensor(lengths), tuple(keys))


def test_rows_and_tokens_are_counted_by_source() -> None:
    counts = SourceCounts(["wiki", "chat", "rare"])
    step = GlobalBatch((batch(["wiki/a:1", "chat/b:1"], [5, 3]), batch(["wiki/a:2"], [4])), data_position={}, epoch=0.5)

    assert counts.add(step) == {
        "rows/wiki": 2, "rows/chat": 1, "rows/rare": 0, "tokens/wiki": 9, "tokens/chat": 3, "tokens/rare": 0,
    }  # fmt: skip
    counts.add(step)
    assert counts.state_dict() == {"wiki": {"rows": 4, "tokens": 18}, "chat": {"rows": 2, "tokens": 6}}


def test_packed_rows_are_counted_one_by_one() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0]])
    ids = torch.ones(2, 6, dtype=torch.int64)
    packed = Batch(ids, ids, torch.tensor([6, 2]), ("a/x:1", "b/x:1", "a/x:2", "b/x:2"), position_ids_BT=positions)
    counts = SourceCounts(["a", "b"])

    counts.add(GlobalBatch((packed,), data_position={}, epoch=0.5))
    assert counts.state_dict() == {"a": {"rows": 2, "tokens": 4}, "b": {"rows": 2, "tokens": 4}}


def test_without_a_mix_nothing_is_counted() -> None:
    step = GlobalBatch((batch(["a.jsonl:1"], [5]),), data_position={}, epoch=0.5)

    assert SourceCounts([]).add(step) == {}
    assert SourceCounts(["wiki", "chat"]).add(step) == {}


def mixed(work: Any) -> Any:
    """Return the context with rows of two sources."""
    values = work.config.model_dump(exclude_unset=True)
    values["data"] = {"mix": [{"source": "even.jsonl"}, {"source": "odd.jsonl"}]}
    config = Config.model_validate(values)
    make = work.batches.batch

    def named(chosen: torch.Tensor) -> Batch:
        keys = tuple(f"{('even', 'odd')[int(row) % 2]}/row:{int(row)}" for row in chosen)
        return replace(make(chosen), keys=keys)

    work.batches.batch = named
    return replace(work, config=config)


def test_counts_of_a_run_survive_a_kill(make_work: Any, tmp_path: Path) -> None:
    work = mixed(make_work(run=make_work.recorder(tmp_path / "run"), epochs=2, steps_per_checkpoint=2))
    log_step = work.run.log_step

    def log_then_die(record: dict[str, Any]) -> None:
        log_step(record)
        if record["step"] == 7:
            raise Killed

    work.run.log_step = log_then_die
    with pytest.raises(Killed):
        run(work)
    recorder = make_work.recorder(tmp_path / "run")
    recorder.log = work.run.log
    again = mixed(make_work(run=recorder, epochs=2, steps_per_checkpoint=2))
    run(again)

    assert {name: counts["rows"] for name, counts in recorder.noted["sources"].items()} == {"even": 48, "odd": 48}
    for name in ("even", "odd"):
        assert recorder.noted["sources"][name]["tokens"] == sum(record[f"tokens/{name}"] for record in recorder.log)
        assert sum(record[f"rows/{name}"] for record in recorder.log) == 48
    assert all(record["rows/even"] + record["rows/odd"] == record["rows"] for record in recorder.log)
