"""Run directories as training leaves them, made without a model, for tests of runs and reports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from partita.runs.opening import open_run
from partita_schema.config import Config
from partita_trainers.checkpoints.file_sums import summed

MakeRun = Callable[..., Path]


def config_of(**changes: Any) -> Config:
    return Config.model_validate(
        {
            "base_model": "owner/small-model",
            "input_features": [{"name": "message", "type": "text"}],
            "output_features": [{"name": "team", "type": "category"}],
            "data": {"source": "data/tickets.csv"},
            "trainer": {"type": "finetune"},
            **changes,
        }
    )


def write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)


def write_run(
    base: Path, name: str, *, status: str = "done", note: dict[str, Any] | None = None, **config: Any
) -> Path:
    """Write the run `base/runs/NAME`, with a model if it is done, and return its folder."""
    folder = base / "runs" / name
    text = f"base_model: owner/small-model # {name}\n"
    with open_run(folder, config=config_of(**config), text=text, resolved="", origin=base) as run:
        write(folder / "log.jsonl", 100)
        write(folder / "checkpoints" / "step-000004" / "model.safetensors", 5000)
        if status == "done":
            with summed(folder / "model"):
                write(folder / "model" / "model.safetensors", 1000)
        run.note(status=status, **(note or {}))
    return folder
