"""Tests of adapters whose base model lies elsewhere, has changed, is gone, or is replaced by another one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from partita import Model
from partita_schema.errors import ModelError, ResumeError

from ..json_lines import write_json_lines
from .conftest import Command

GONE = (
    "base_model: {saved} is an adapter of the model in the folder {base}, which is not there; name the folder that "
    "holds the model with --set base_model=FOLDER, in Python with overrides=['base_model=FOLDER']"
)
OTHER = "{base} has other weights than the base model that the adapter in {saved} was trained on"


@pytest.fixture(scope="module")
def trained(colours: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the models `base` and `other`, and the run of an adapter trained on `base`."""
    folder = tmp_path_factory.mktemp("adapters")
    write_json_lines(folder / "rows.jsonl", colours.rows(16))
    base = Model(colours.config(), quiet=True)
    base.train(colours.rows(64), run=folder / "base-run")
    base.save(folder / "base")
    Model(colours.config(trainer={"type": "none"}), quiet=True).save(folder / "other")
    (folder / "lora.yaml").write_text(
        "base_model: base\ninput_features: [{name: text}]\noutput_features: [{name: colour, type: category}]\n"
        "adapter: {type: lora, r: 2}\ngeneration: {max_new_tokens: 4}\ndata: {source: rows.jsonl}\n"
        "trainer: {type: finetune, max_steps: 2, batch_size: 8, learning_rate: 0.01}\n",
        encoding="utf8",
    )
    Model(folder / "lora.yaml", quiet=True).train(run=folder / "run")
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder, whose run names the copy's models."""
    copy = tmp_path / "place"
    shutil.copytree(trained, copy)
    manifest = json.loads((copy / "run" / "manifest.json").read_text(encoding="utf8"))
    manifest.pop("checksum", None)
    manifest["folder"] = str(copy)
    (copy / "run" / "manifest.json").write_text(json.dumps(manifest), encoding="utf8")
    return copy


def answers(folder: Path, rows: list[dict[str, Any]], **options: Any) -> list[Any]:
    return [row["colour_raw"] for row in Model.load(folder, quiet=True, **options).predict(rows)]


def test_an_adapter_answers_with_the_base_model_that_the_caller_names(
    place: Path, colours: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows, other = colours.rows(6), str(place / "other")
    before = answers(place / "run", rows)
    assert "has other weights" not in caplog.text
    replaced = answers(place / "run", rows, overrides=[f"base_model={other}"])
    assert replaced != before
    assert OTHER.format(base=other, saved=place / "run" / "model") in caplog.text
    shutil.rmtree(place / "base")
    (place / "other").rename(place / "base")
    assert answers(place / "run", rows) == replaced


def test_the_same_base_model_elsewhere_answers_the_same_without_a_warning(
    place: Path, colours: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = colours.rows(6)
    before = answers(place / "run", rows)
    (place / "base").rename(place / "moved")
    assert answers(place / "run", rows, overrides=[f"base_model={place / 'moved'}"]) == before
    assert "has other weights" not in caplog.text


def test_other_weights_in_the_folder_of_the_base_model_are_noticed(
    place: Path,
    colours: Any,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_json_lines(place / "asked.jsonl", colours.rows(6))
    words = ("predict", place / "run", "--dataset", place / "asked.jsonl", "--output", place / "answers.jsonl")
    assert command(*words) == 0
    assert "has other weights" not in caplog.text
    shutil.copy(place / "other" / "model.safetensors", place / "base" / "model.safetensors")
    (place / "base" / "partita-checksums.json").unlink()
    assert command(*words) == 2, "its answers are of another model"
    assert OTHER.format(base=place / "base", saved=place / "run" / "model") in caplog.text
    assert "holds answers of another job: model changed" in capsys.readouterr().err


@pytest.mark.parametrize("saved", [False, True])
def test_the_hub_is_not_asked_for_a_base_model_whose_folder_is_gone(
    place: Path, colours: Any, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("the Hub was asked")

    run = place / "run"
    if saved:
        Model.load(run, quiet=True).save(place / "saved")
    shutil.rmtree(place / "base")
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    model = place / "saved" if saved else run / "model"
    with pytest.raises(ModelError) as error:
        Model.load(place / "saved" if saved else run, quiet=True).predict(colours.rows(2))
    assert str(error.value) == GONE.format(saved=model, base=place / "base")


def test_answers_with_another_base_model_are_another_job(place: Path, colours: Any) -> None:
    rows, other = colours.rows(6), [f"base_model={place / 'other'}"]
    Model.load(place / "run", quiet=True).predict(rows, place / "answers.jsonl")
    with pytest.raises(ResumeError, match="holds answers of another job: model changed"):
        Model.load(place / "run", overrides=other, quiet=True).predict(rows, place / "answers.jsonl")


def test_an_evaluation_with_another_base_model_is_not_that_of_the_run(
    place: Path, colours: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = place / "run" / "evaluations"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with caplog.at_level("INFO"):
        Model.load(place / "run", overrides=[f"base_model={place / 'other'}"], quiet=True).evaluate(colours.rows(8))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert "not recorded in the run: the base model is not that of training" in caplog.text


def test_a_pushed_adapter_uses_the_base_model_that_is_named_not_another_folder_of_its_name(
    place: Path, colours: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Model.load(place / "run", quiet=True).push_to_hub("somebody/colours", dry_run=place / "dry")
    record = json.loads((place / "dry" / "partita-base.json").read_text(encoding="utf8"))
    assert record["base_model"] == "base"
    program = place / "program"
    program.mkdir()
    monkeypatch.chdir(program)
    with pytest.raises(ModelError, match="is an adapter of the model in the folder base, which is not there"):
        answers(place / "dry", colours.rows(2))
    shutil.copytree(place / "other", program / "base")
    rows = colours.rows(6)
    wanted = answers(place / "run", rows)
    assert answers(place / "dry", rows, overrides=[f"base_model={place / 'base'}"]) == wanted
    assert "has other weights" not in caplog.text
    assert answers(place / "dry", rows) != wanted
    assert "base has other weights than the base model that the adapter in" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"), [("rms_norm_eps", 0.1), ("transformers_version", "4.0.0"), ("mlp_bias", ...)]
)
def test_a_run_is_not_resumed_with_another_config_of_its_base_model(
    place: Path, colours: Any, key: str, value: object
) -> None:
    settings = colours.config(
        base_model=str(place / "base"), trainer={"max_steps": 1, "steps_per_checkpoint": 1, "evaluate_generated": False}
    )
    Model(settings, quiet=True).train(run=place / "whole")
    (place / "base" / "partita-checksums.json").unlink()  # as models from elsewhere have none
    file = place / "base" / "config.json"
    written = json.loads(file.read_bytes()) | {key: value}
    if value is ...:  # a key with its default, which older versions of transformers did not write
        del written[key]
    file.write_text(json.dumps(written))
    longer = Model(settings, overrides=["trainer.max_steps=2"], quiet=True)
    if key != "rms_norm_eps":
        assert longer.train(run=place / "whole").resumed_from == 1
        return
    with pytest.raises(ResumeError) as caught:
        longer.train(run=place / "whole")
    assert str(caught.value) == (
        f"the config.json of {place / 'base'} has changed since the run in {place / 'whole'} began (rms_norm_eps: "
        "1e-06 before, 0.1 now); restore it, or give this run another folder with --run"
    )


def test_an_adapter_is_not_trained_further_on_other_weights(place: Path) -> None:
    shutil.rmtree(place / "base")
    shutil.copytree(place / "other", place / "base")
    recorded = (place / "run" / "model" / "partita-base.json").read_bytes()
    with pytest.raises(ResumeError) as caught:
        Model(place / "lora.yaml", overrides=["trainer.max_steps=3"], quiet=True).train(run=place / "run")
    assert str(caught.value) == (
        f"the weights in base have changed since the run in {place / 'run'} began, and its checkpoints hold an adapter "
        "for the earlier ones; restore them, or give this run another folder with --run"
    )
    assert json.loads((place / "run" / "manifest.json").read_bytes())["status"] == "done"
    assert (place / "run" / "model" / "partita-base.json").read_bytes() == recorded
