"""Tests of the Ray backend that need no cluster."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partita.backends.context import RunContext
from partita.backends.local import LocalBackend
from partita.backends.ray.backend import RayBackend, RayEvaluator
from partita.data.ledger import Ledger
from partita.data.sources.sources import open_rows
from partita.generation.oom_backoff import BatchBudget
from partita.pipeline.build import LocalPipeline
from partita.pipeline.dataset_loss import DatasetLoss, batch_loss, dataset_loss
from partita.pipeline.eval_dataset import build_eval_dataset
from partita_schema.load import load_config
from partita_trainers.base import Batch
from partita_trainers.batch_size.probe import BatchSize
from partita_trainers.objective import Objective, ObjectiveContext
from partita_trainers.objectives.of_config import evaluation_objective

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
    backend._pool = backend._pipeline = of_another_run

    backend.train(None, run)

    assert backend._pool is None
    assert backend._pipeline is None
    assert backend.context.run == run


class WorkersHere:
    """Workers that compute in this process; tasks and results are pickled, as on the way between processes."""

    def __init__(self, pipeline: LocalPipeline) -> None:
        self.pipeline, self.tokenizer, self.answer_context = pipeline, pipeline.lm.tokenizer, None

    def ask(self, method: str, *arguments: Any, **named: Any) -> list[BatchSize]:
        return [BatchSize(rows=4, origin="file", device="cpu")]

    def each(self, method: str, tasks: Iterable[tuple[Batch, Objective]], *, size: BatchSize) -> list[Any]:
        context = ObjectiveContext(self.pipeline.lm, self.pipeline.lm.module)
        losses = []
        for task in tasks:
            batch, objective = pickle.loads(pickle.dumps(task))
            with torch.no_grad():
                loss = batch_loss(objective, context, batch, budget=BatchBudget(size.rows))
            losses.append(pickle.loads(pickle.dumps(loss)))
        return losses


def evaluated(folder: Path, config: dict[str, Any]) -> tuple[DatasetLoss, DatasetLoss]:
    """Return the loss of rows.jsonl with workers and in one process."""
    backend = LocalBackend(RunContext(load_config(config)))
    if config["trainer"]["type"] != "none":
        backend.train(None, folder / "run")
    pipeline = backend.pipeline()
    rows = open_rows(folder / "rows.jsonl", folder=Path())
    encoded = build_eval_dataset(pipeline, rows, split="test", ledger=Ledger(None, max_bad_rows=1.0)).encoded
    objective = evaluation_objective(pipeline.config, undesirable_weight=None)
    workers: Any = WorkersHere(pipeline)
    found = RayEvaluator(pipeline, workers, batch_size=None, objective=objective).loss(encoded)
    return found, dataset_loss(pipeline, encoded, budget=BatchBudget(4), objective=objective)


SHAPE = {"type": "scratch", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "context_length": 16}


def test_the_losses_of_rows_from_workers_are_those_of_one_process(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", [{"text": f"{n}" * (n % 5), "answer": f"{n}"} for n in range(1, 30)])
    found, expected = evaluated(
        tmp_path,
        {
            "base_model": {"vocab_size": 300, **SHAPE},
            "input_features": [{"name": "text"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "data": {"source": str(tmp_path / "rows.jsonl")},
            "trainer": {"type": "none", "batch_size": 4},
        },
    )

    assert found.metrics == pytest.approx(expected.metrics)
    assert found.rows is not None
    assert expected.rows is not None
    assert found.rows.sums_N.tolist() == expected.rows.sums_N.tolist()
    assert found.rows.tokens_N.tolist() == expected.rows.tokens_N.tolist()
    assert np.all(found.rows.tokens_N > 0)


def test_the_metrics_of_texts_from_workers_are_those_of_one_process(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", [{"text": f"{n} balls"} for n in range(1, 12)])
    found, expected = evaluated(
        tmp_path,
        {
            "base_model": {"vocab_size": 300, **SHAPE},
            "output_features": [{"name": "text", "type": "text"}],
            "data": {"source": str(tmp_path / "rows.jsonl")},
            "trainer": {"type": "none", "batch_size": 4},
        },
    )

    assert set(found.metrics) == {"loss", "perplexity", "bits_per_byte"}
    assert found.metrics == expected.metrics


@pytest.mark.parametrize(
    ("trainer", "metrics"),
    [
        ({"type": "reward", "center": 0.1}, 5),
        ({"type": "preference", "loss": {"type": "orpo"}}, 7),
        ({"type": "preference", "loss": {"type": "simpo"}}, 7),
    ],
    ids=["reward", "orpo", "simpo"],
)
def test_pairs_are_evaluated_with_workers_as_in_one_process(
    tmp_path: Path, trainer: dict[str, Any], metrics: int
) -> None:
    rows = [{"text": f"{n}" * (1 + n % 4), "chosen": f"{n} is", "rejected": f"{n % 7}"} for n in range(1, 60)]
    write_json_lines(tmp_path / "rows.jsonl", rows)
    steps = {"batch_size": 8, "epochs": 1, "learning_rate": 0.01, "skip_all_evaluation": True}
    found, expected = evaluated(
        tmp_path,
        {
            "base_model": {"tokenizer": "byte", **SHAPE},
            "input_features": [{"name": "text"}],
            "output_features": [{"name": "answer", "type": "preference"}],
            "data": {"source": str(tmp_path / "rows.jsonl"), "split": {"type": "random", "probabilities": [1, 0, 0]}},
            "trainer": trainer | steps,
        },
    )

    assert found.metrics == expected.metrics
    assert len(found.metrics) == metrics
    assert found.metrics["rewards/margins"] != 0
    assert found.rows is not None
    assert expected.rows is not None
    assert found.rows.sums_N.tolist() == expected.rows.sums_N.tolist()
    assert found.rows.values == expected.rows.values
