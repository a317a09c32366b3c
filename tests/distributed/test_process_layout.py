"""Tests of the process layout that `explain` reports before any process is started."""

from typing import Any

import pytest

from partita.backends.process_layout import process_layout
from partita_schema.config import Config


def plan_lines(backend: dict[str, Any], *, batching: str = "bucket", **trainer: Any) -> list[str]:
    config = Config.model_validate(
        {
            "base_model": "unused",
            "input_features": [{"name": "text", "type": "text"}],
            "output_features": [{"name": "label", "type": "text"}],
            "data": {"batching": {"type": batching}},
            "backend": {"type": "torchrun", **backend},
            "trainer": {"type": "finetune", **trainer},
        }
    )
    layout = process_layout(config)
    assert layout is not None
    return layout.lines()


def test_machines_processes_and_a_step_are_reported() -> None:
    cluster = {"processes": 8, "nodes": 2, "address": "node-0:29500"}

    assert plan_lines(cluster, batch_size=4, effective_batch_size=128) == [
        "2 machines, 8 processes on each, 16 in all",
        "a step: 128 rows = 16 processes x 2 batches x 4 rows",
    ]


@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        ({"batch_size": 4}, "a step: 16 rows = 2 processes x 2 batches x 4 rows"),
        ({"batch_size": 16}, "a step: 32 rows = 2 processes x 1 batch x 16 rows"),
        ({"batch_size": 4, "gradient_accumulation_steps": 3}, "a step: 24 rows = 2 processes x 3 batches x 4 rows"),
        ({}, "a step: 16 rows = 2 processes; batch_size is auto and found when the run begins"),
        ({"gradient_accumulation_steps": 3}, "a step: 3 batches for each process"),
        (
            {"effective_batch_size": 15},
            "a step: 15 rows, which 2 processes cannot share evenly; write another trainer.effective_batch_size",
        ),
    ],
)
def test_the_processes_share_a_step(trainer: dict[str, Any], line: str) -> None:
    assert plan_lines({"processes": 2}, **trainer) == ["1 machine, 2 processes on each", line]


def test_values_known_only_on_the_machine_are_not_reported() -> None:
    assert plan_lines({}, batch_size=4, effective_batch_size=32) == [
        "1 machine, one process for each GPU on each",
        "a step: 32 rows = the processes x 4 rows",
    ]
    assert plan_lines({"processes": 2}, batching="token_budget") == ["1 machine, 2 processes on each"]


def test_workers_of_ray_share_a_step_on_any_machines() -> None:
    ray = {"type": "ray", "workers": 4}

    assert plan_lines(ray, batch_size=4, effective_batch_size=64) == [
        "4 workers, on machines that Ray finds",
        "a step: 64 rows = 4 processes x 4 batches x 4 rows",
    ]
    assert plan_lines({"type": "ray"}, batch_size=4, effective_batch_size=32) == [
        "one worker for each GPU of the Ray cluster, else one",
        "a step: 32 rows = the processes x 4 rows",
    ]


def test_the_workers_that_run_the_trials_of_a_sweep_share_no_step() -> None:
    config = Config.model_validate(
        {
            "base_model": "unused",
            "input_features": [{"name": "text", "type": "text"}],
            "output_features": [{"name": "label", "type": "text"}],
            "backend": {"type": "ray", "workers": 4},
            "trainer": {"type": "finetune", "batch_size": 4},
            "sweep": {"parameters": {"trainer.epochs": [1, 2]}},
        }
    )
    layout = process_layout(config)
    assert layout is not None
    assert layout.lines() == ["4 workers, on machines that Ray finds"]


def test_a_single_process_has_no_layout() -> None:
    config = Config.model_validate(
        {
            "base_model": "unused",
            "input_features": [{"name": "text", "type": "text"}],
            "output_features": [{"name": "label", "type": "text"}],
            "trainer": {"type": "none"},
        }
    )

    assert process_layout(config) is None


def test_shared_weights_are_reported() -> None:
    lines = plan_lines({"processes": 4, "nodes": 2, "address": "node-0:29500", "sharding": "full"}, batch_size=2)
    assert lines[-1] == "weights, gradients and optimizer state: each process holds 1/8 of them"
    lines = plan_lines({"sharding": "full"}, batch_size=2)
    assert lines[-1] == "weights, gradients and optimizer state: each process holds its part of them"
