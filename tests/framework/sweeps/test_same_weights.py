"""Tests of sweeps that continue after the weights in a local base model or adapter folder have changed."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from partita import Model, Sweep
from partita.runs.directory import RunDirectory
from partita.runs.manifest import read_manifest
from partita.sweeps.same_weights import check_same_weights
from partita.tokenizers.saved_adapters import folder_hashes
from partita_schema.errors import ResumeError
from partita_schema.load import load_config
from partita_schema.records import FORMAT_VERSION

ADVICE = "restore them, or name another folder for the sweep with --folder"


def trial_of(folder: Path, name: str, *, base_model: str = "m", adapter: str | None = None) -> Path:
    """Write the manifest of a trial in a sweep, as training writes it."""
    config = load_config(
        {
            "base_model": base_model,
            "input_features": [{"name": "text"}],
            "output_features": [{"name": "label", "type": "category"}],
            "trainer": {"type": "finetune"},
            "adapter": None if adapter is None else {"type": "lora", "pretrained_adapter_weights": adapter},
        }
    ).config
    run = folder / "trials" / name
    run.mkdir(parents=True)
    hashes = folder_hashes(config, folder=folder)
    settings = config.model_dump(mode="json")
    RunDirectory(run, config=config).note(
        format_version=FORMAT_VERSION, config=settings, initial_weights=hashes, status="done"
    )
    return run


def write_weights(folder: Path, content: bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize("finished", [True, False])
def test_a_base_model_whose_weights_have_changed_is_refused(tmp_path: Path, finished: bool) -> None:
    for name in "mn":
        write_weights(tmp_path / name, b"old")
    trial_of(tmp_path, "000-0", base_model="n")
    run = trial_of(tmp_path, "001-1")
    check_same_weights(tmp_path, origin=tmp_path, finished=finished)
    write_weights(tmp_path / "m", b"new")
    with pytest.raises(ResumeError) as caught:
        check_same_weights(tmp_path, origin=tmp_path, finished=finished)
    assert str(caught.value) == f"the weights in m have changed since {run} was trained; {ADVICE}"


def test_the_weights_of_an_adapter_are_compared_as_well(tmp_path: Path) -> None:
    for name in "ma":
        write_weights(tmp_path / name, b"old")
    run = trial_of(tmp_path, "000-0", adapter="a")
    write_weights(tmp_path / "a", b"new")
    with pytest.raises(ResumeError, match=f"the weights in a have changed since {run} was trained"):
        check_same_weights(tmp_path, origin=tmp_path, finished=False)


def test_a_folder_that_is_gone_matters_only_if_trials_are_left(tmp_path: Path) -> None:
    write_weights(tmp_path / "m", b"old")
    run = trial_of(tmp_path, "000-0")
    shutil.rmtree(tmp_path / "m")
    check_same_weights(tmp_path, origin=tmp_path, finished=True)
    with pytest.raises(ResumeError) as caught:
        check_same_weights(tmp_path, origin=tmp_path, finished=False)
    assert str(caught.value) == f"m, from which {run} was trained, has no weights any more; {ADVICE}"


def test_a_model_of_the_hub_is_not_compared(tmp_path: Path) -> None:
    run = trial_of(tmp_path, "000-0", base_model="some/model")
    assert read_manifest(run)["initial_weights"] == {}
    check_same_weights(tmp_path, origin=tmp_path, finished=False)


@pytest.mark.long
def test_a_sweep_does_not_continue_with_another_base_model_under_the_same_name(colours: Any, tmp_path: Path) -> None:
    trainer = {"epochs": 1, "evaluate_generated": False, "evaluate_test": False}
    rows = colours.rows(32)
    for seed in (1, 2):
        config = colours.config(trainer=trainer) | {"seed": seed}
        Model(config, quiet=True).train(rows, run=tmp_path / f"run-{seed}")
    base = tmp_path / "m"
    shutil.copytree(tmp_path / "run-1" / "model", base)
    section = {"parameters": {"trainer.learning_rate": [0.01, 0.001]}, "sampler": "grid"}
    config = colours.config(trainer=trainer) | {"base_model": str(base), "sweep": {**section, "trials": 1}}
    Sweep(config, quiet=True).run(rows, tmp_path / "sweep")
    shutil.rmtree(base)
    shutil.copytree(tmp_path / "run-2" / "model", base)
    with pytest.raises(
        ResumeError, match=f"the weights in {base} have changed since .*/trials/000-[0-9a-f]* was trained"
    ):
        Sweep(config | {"sweep": section}, quiet=True).run(rows, tmp_path / "sweep")
