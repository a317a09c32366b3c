"""Tests of the Ray backend that need no cluster."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partita.backends.context import RunContext
from partita.backends.local import LocalBackend
from partita.backends.ray.backend import RayBackend, RayEvaluator
from partita.data.ledger import Ledger
from partita.data.sources.sources import open_rows
from partita.generation.oom_backoff import BatchBudget
from partita.pipeline.build import Pipeline
from partita.pipeline.dataset_loss import batch_loss, dataset_loss
from partita.pipeline.eval_dataset import build_eval_dataset
from partita_schema.load import load_config
from partita_trainers.base import Batch
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.objective import CROSS_ENTROPY, ObjectiveContext

from ....json_lines import write_json_lines


def test_a_finished_run_replaces_the_model_on_the_workers(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", [{"text": f"{n}", "answer": f"{n % 3}"} for n in range(30)])
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "context_length": 16}
    config = {
        "base_model": {"type": "scratch", "vocab_size": 300, **shape},
        "input_features": [{"name": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "data": {"source": str(tmp_path / "rows.jsonl")},
        "trainer": {"type": "finetune", "batch_size": 4, "max_steps": 1, "skip_all_evaluation": True},
        "backend": {"type": "ray"},
    }
    run = tmp_path / "run"
    LocalBackend(RunContext(load_config(config))).train(None, run)
    backend = RayBackend(RunContext(load_config(config)))
    of_another_run: Any = object()
    backend._pool = backend._parts = of_another_run

    backend.train(None, run)

    assert backend._pool is None
    assert backend._parts is None
    assert backend.context.run == run


class WorkersHere:
    """Workers that compute in this process; results are pickled, as on the way between processes."""

    def __init__(self, parts: Pipeline) -> None:
        self.parts, self.tokenizer, self.answer_context = parts, parts.lm.tokenizer, None

    def ask(self, method: str, *arguments: Any, **named: Any) -> list[BatchSize]:
        return [BatchSize(rows=4, origin="file", device="cpu")]

    def each(self, method: str, batches: Iterable[Batch], *, size: BatchSize) -> list[Any]:
        context = ObjectiveContext(self.parts.lm, self.parts.lm.module)
        losses = [batch_loss(CROSS_ENTROPY, context, batch, budget=BatchBudget(size.rows)) for batch in batches]
        results: list[Any] = pickle.loads(pickle.dumps(losses))
        return results


def test_the_losses_of_rows_from_workers_are_those_of_one_process(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", [{"text": f"{n}" * (n % 5), "answer": f"{n}"} for n in range(1, 30)])
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "context_length": 16}
    config = {
        "base_model": {"type": "scratch", "vocab_size": 300, **shape},
        "input_features": [{"name": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "data": {"source": str(tmp_path / "rows.jsonl")},
        "trainer": {"type": "none", "batch_size": 4},
    }
    parts = LocalBackend(RunContext(load_config(config))).parts()
    rows = open_rows(tmp_path / "rows.jsonl", folder=Path())
    encoded = build_eval_dataset(parts, rows, split="test", ledger=Ledger(None, max_bad_rows=1.0)).encoded
    workers: Any = WorkersHere(parts)

    found = RayEvaluator(parts, workers, batch_size=None).loss(encoded)

    expected = dataset_loss(parts, encoded, budget=BatchBudget(4))
    assert found.metrics == pytest.approx(expected.metrics)
    assert found.rows is not None
    assert expected.rows is not None
    assert found.rows.sums_N.tolist() == expected.rows.sums_N.tolist()
    assert found.rows.tokens_N.tolist() == expected.rows.tokens_N.tolist()
    assert np.all(found.rows.tokens_N > 0)
