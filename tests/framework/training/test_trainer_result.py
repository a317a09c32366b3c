"""Tests of what a custom trainer returns and saves."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from partita import ConfigError, Model, TrainingError
from partita.runs.opening import open_run
from partita.training.trainer_result import EXAMPLE, check_result, plain_result, report_unless_reported
from partita_schema.load import load_config
from partita_trainers import TrainResult
from partita_trainers.zero_shot import ZeroShot

CODE = """
import sys

from partita_trainers import TrainResult


class Returns:
    def __init__(self, section):
        self.steps = section.options["steps"]

    def train(self, context):
        if self.steps is None:
            return None
        if self.steps == "none":
            sys.exit(3)
        return TrainResult(run=context.run.folder, metrics={}, steps=self.steps)


class Measures:
    def __init__(self, section):
        self.reported = section.options["reported"]

    def train(self, context):
        import numpy as np

        context.run.truncate_log(0)
        if self.reported is not None:
            context.run.report({"loss": self.reported}, step=2, split="validation")
        metrics = {"validation": {"loss": np.float32(0.5)}, "test": {}}
        return TrainResult(run=context.run.folder, metrics=metrics, steps=np.int64(3))
"""


SMALL: dict[str, Any] = {
    "base_model": "some/model",
    "input_features": [{"name": "text"}],
    "output_features": [{"name": "answer", "type": "text"}],
}


def file_with_trainer(folder: Path, colours: Any, *, steps: int | str | None) -> Path:
    """Write a configuration with a trainer next to it that returns its option."""
    (folder / "returning.py").write_text(CODE)
    trainer = {"type": "custom", "target": "returning:Returns", "batch_size": 16, "options": {"steps": steps}}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(colours.config(trainer=trainer)))
    return file


@pytest.mark.parametrize(("steps", "found"), [(None, "None"), ("many", "'many' as steps")])
def test_a_trainer_that_returns_no_result_is_named_and_the_run_has_failed(
    steps: str | None, found: str, colours: Any, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    message = f"trainer.target: Returns.train returned {found}; return a TrainResult, such as {EXAMPLE}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Model(file_with_trainer(tmp_path, colours, steps=steps), quiet=True).train(run=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "failed"


def test_a_trainer_that_calls_sys_exit_has_failed(colours: Any, tmp_path: Path) -> None:
    message = (
        "code of the training called sys.exit(3) (returning.py, line 15); remove that call, or raise an exception, and "
        "rerun the same command to resume"
    )
    (tmp_path / "run").mkdir()
    with pytest.raises(TrainingError, match=f"^{re.escape(message)}$"):
        Model(file_with_trainer(tmp_path, colours, steps="none"), quiet=True).train(run=tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (manifest["status"], manifest["error"]) == ("failed", f"TrainingError: {message}")


@pytest.mark.parametrize(
    ("result", "found"),
    [
        ({"loss": 1.0}, "{'loss': 1.0}"),
        (TrainResult(run=Path("run"), metrics={}, steps=-1), "-1 as steps"),
        (TrainResult(run=Path("run"), metrics=0.5, steps=1), "0.5 as metrics"),  # type: ignore[arg-type]
        (
            TrainResult(run=Path("run"), metrics={"test": 0.5}, steps=1),  # type: ignore[dict-item]
            "0.5 as the metrics of test",
        ),
        (
            TrainResult(run=Path("run"), metrics={"test": {"loss": "low"}}, steps=1),  # type: ignore[dict-item]
            "'low' as the metric loss of test",
        ),
    ],
)
def test_the_part_of_a_result_that_does_not_fit_is_named(result: object, found: str) -> None:
    trainer = ZeroShot(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=re.escape(f"ZeroShot.train returned {found}; return a TrainResult")):
        check_result(result, trainer)
    check_result(TrainResult(run=Path("run"), metrics={"test": {"loss": 1}}, steps=0), trainer)


def test_a_tensor_without_dimensions_is_a_metric() -> None:
    result = TrainResult(run=Path("run"), metrics={"test": {"loss": torch.tensor(0.5)}}, steps=1)  # type: ignore[dict-item]
    check_result(result, ZeroShot(None))  # type: ignore[arg-type]
    assert plain_result(result).metrics == {"test": {"loss": 0.5}}


@pytest.mark.parametrize(
    ("reported", "steps"),
    [(None, [3]), (0.5, [2]), (0.75, [2, 3])],
    ids=["not reported", "reported", "other metrics reported"],
)
def test_the_metrics_of_a_result_are_those_of_the_run(
    reported: float | None, steps: list[int], colours: Any, tmp_path: Path
) -> None:
    (tmp_path / "returning.py").write_text(CODE)
    options = {"reported": reported}
    trainer = {"type": "custom", "target": "returning:Measures", "batch_size": 16, "options": options}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(colours.config(trainer=trainer)))

    def train() -> TrainResult:
        return Model(tmp_path / "run.yaml", quiet=True).train(run=tmp_path / "run")

    result = train()
    assert (result.metrics, result.steps) == ({"validation": {"loss": 0.5}, "test": {}}, 3)
    assert (type(result.metrics["validation"]["loss"]), type(result.steps)) == (float, int)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert [(one["split"], one["step"]) for one in manifest["evaluations"]] == [("validation", step) for step in steps]
    again = train()
    assert (again.metrics, again.steps) == ({"validation": {"loss": 0.5}}, 3)


def test_metrics_of_an_earlier_training_are_not_taken_for_reported_ones(tmp_path: Path) -> None:
    config = load_config({**SMALL, "trainer": {"type": "finetune", "epochs": 1}}).config
    longer = load_config({**SMALL, "trainer": {"type": "finetune", "epochs": 2}}).config
    result = TrainResult(run=tmp_path, metrics={"validation": {"loss": 0.5}}, steps=3)
    for settings in (config, longer):
        with open_run(tmp_path, config=settings, text=None, resolved="", origin=tmp_path) as run:
            for _ in range(2):
                report_unless_reported(result, run)
            run.note(status="done")
    assert len(run.manifest["evaluations"]) == 2


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (3, "Returns has saved no model: context.lm is saved in {folder}, with the weights it has now"),
        (
            0,
            (
                "Returns has saved no model and took no steps: context.lm is saved in {folder}, with weights that no "
                "step has trained"
            ),
        ),
    ],
)
def test_the_weights_that_are_saved_for_a_trainer_are_named(
    steps: int, message: str, colours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="partita")
    Model(file_with_trainer(tmp_path, colours, steps=steps), quiet=True).train(run=tmp_path / "run")
    assert message.format(folder=tmp_path / "run" / "model") in caplog.messages
    assert (tmp_path / "run" / "model").is_dir()
