"""Tests of the Ray backend that need no cluster."""

from pathlib import Path
from typing import Any

from partita.backends.context import RunContext
from partita.backends.local import LocalBackend
from partita.backends.ray.backend import RayBackend
from partita_schema.load import load_config

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
