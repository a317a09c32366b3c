"""Tests of the checks of a Ray rank before training."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from partita import PartitaError
from partita.backends.context import RunContext
from partita.backends.ray.backend import train_as_rank
from partita.backends.ray.ranks import shared_marker
from partita_schema.load import load_config


def test_a_folder_missing_on_a_machine_is_reported_with_the_machine(tmp_path: Path) -> None:
    config = {
        "base_model": "base",
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
    }
    context = RunContext(load_config(config))
    mark = tmp_path / ".ray-of-another-machine"

    with pytest.raises(PartitaError) as error:
        train_as_rank(context, dataset=None, folder=tmp_path, mark=mark, start=tmp_path)

    assert str(error.value) == (
        f"the folder of the run, {tmp_path}, is another one on {os.uname().nodename}: name one with --run that all "
        "machines of the cluster see under this name"
    )


def test_a_run_that_did_not_start_leaves_no_files(tmp_path: Path) -> None:
    with shared_marker(tmp_path / "runs" / "one") as mark:
        assert mark.parent == tmp_path / "runs" / "one"
        assert mark.is_dir()

    assert not (tmp_path / "runs" / "one").exists()


@pytest.mark.parametrize(
    ("existed", "left", "kept"), [(False, None, False), (False, "log.jsonl", True), (True, None, True)]
)
def test_a_run_that_failed_before_its_first_step_leaves_no_directory(
    existed: bool, left: str | None, kept: bool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    if existed:
        run.mkdir()
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(ZeroDivisionError))
        stack.enter_context(shared_marker(run))
        (run / "tokenizer").mkdir()
        for name in ("manifest.json", *([left] if left is not None else [])):
            (run / name).write_text("{}")
        _ = 1 / 0

    assert run.exists() == kept
    assert not list(tmp_path.glob("run/.ray-*"))
