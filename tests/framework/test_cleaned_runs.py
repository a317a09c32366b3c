"""A finished run whose checkpoints were removed answers as before; what it loses is the way to train on."""

import logging
import shutil
import time
from pathlib import Path

import pytest

from partita import Model, ResumeError
from partita.runs.cleaning import removable_of_runs, remove
from partita.runs.listing import read_runs

from ..classifiers import make_rows, settings
from ..json_lines import write_json_lines
from .conftest import TrainKilled


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the finished run `runs/cleaned`, and with `runs/whole`, which has its checkpoints."""
    folder = tmp_path_factory.mktemp("cleaned")
    write_json_lines(folder / "rows.jsonl", make_rows(40))
    Model(configuration(folder), quiet=True).train(run=folder / "runs" / "cleaned")
    shutil.copytree(folder / "runs" / "cleaned", folder / "kept")
    (item,) = removable_of_runs(read_runs(folder / "runs"), older_than_days=0, now=time.time())
    assert remove(item).freed > 0
    shutil.move(folder / "kept", folder / "runs" / "whole")
    return folder


def configuration(folder: Path, *, max_steps: int = 3, **trainer: object) -> dict[str, object]:
    chosen = settings(data={"source": str(folder / "rows.jsonl")})
    return chosen | {"trainer": chosen["trainer"] | {"max_steps": max_steps, "steps_per_checkpoint": 1} | trainer}


@pytest.mark.long
def test_a_cleaned_run_predicts_and_evaluates_as_before(cleaned: Path) -> None:
    before, after = (Model.load(cleaned / "runs" / name, quiet=True) for name in ("whole", "cleaned"))
    rows = make_rows(8, seed=3)
    assert after.predict(rows).to_pandas().equals(before.predict(rows).to_pandas())
    assert after.evaluate(rows) == before.evaluate(rows)
    weights = cleaned / "runs" / "cleaned" / "model" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    for trainer in ({}, {"keep_checkpoints": 1, "evaluate_test": False}):
        again = Model(configuration(cleaned, **trainer), quiet=True).train(run=cleaned / "runs" / "cleaned")
        assert again.steps == 3
        assert weights.stat().st_mtime_ns == written, "it is not trained again"


@pytest.mark.long
@pytest.mark.parametrize(("name", "start"), [("whole", "continued"), ("cleaned", "trained again from its first step")])
def test_a_cleaned_run_is_trained_longer_only_from_the_beginning(
    name: str, start: str, cleaned: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(cleaned / "runs" / name, run)
    with caplog.at_level(logging.INFO):
        result = Model(configuration(cleaned, max_steps=5)).train(run=run)
    assert f"run directory: {run} ({start}" in caplog.text
    assert (result.steps, result.resumed_from) == (5, 3 if name == "whole" else None)


@pytest.mark.long
def test_nothing_is_left_of_an_unfinished_run(cleaned: Path, tmp_path: Path, train_killed: TrainKilled) -> None:
    run = tmp_path / "runs" / "killed"
    train_killed(Model(configuration(cleaned), quiet=True), run, after=2)
    (item,) = removable_of_runs(read_runs(tmp_path / "runs"), older_than_days=0, now=time.time() + 1)
    assert item.what == "failed run, 0 days old"  # here the kill is an exception
    remove(item)
    assert not run.exists()


@pytest.mark.long
def test_a_damaged_model_of_a_cleaned_run_cannot_be_written_again(cleaned: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(cleaned / "runs" / "cleaned", run)
    (run / "model" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ResumeError, match="the run has no checkpoint to write it from; restore it"):
        Model(configuration(cleaned), quiet=True).train(run=run)
