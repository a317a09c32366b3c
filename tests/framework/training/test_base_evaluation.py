"""`trainer.evaluate_base` evaluates the model before the first step, and changes nothing else."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from partita import Model
from partita.runs.row_results import evaluation_path, read_header
from partita.training.base_evaluation import cost_in_words
from partita_schema.errors import ConfigError
from partita_schema.load import load_config

from ...classifiers import make_rows as make_classifier_rows
from ...classifiers import settings as classifier_settings
from ...classifiers import write_classifier
from ...json_lines import log_of, write_json_lines
from ..recorded_results import read_rows

BASE = "validation-base.jsonl"
LORA = {"type": "lora", "r": 4, "dropout": 0.2}


@pytest.fixture(scope="module")
def pretrained(colours: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that was trained a little."""
    run = tmp_path_factory.mktemp("pretrained") / "run"
    config = colours.config(output_features=[{"name": "colour", "type": "category"}], trainer={"max_steps": 20})
    Model(config, quiet=True).train(run=run)
    return run / "model"


def configured(colours: Any, base: Path | str, **changes: Any) -> dict[str, Any]:
    trainer = {"epochs": 1, "effective_batch_size": 8, "batch_size": 8, **changes.pop("trainer", {})}
    changes = {"generation": {"max_new_tokens": 4, "do_sample": True}} | changes
    config: dict[str, Any] = colours.config(
        output_features=[{"name": "colour", "type": "category"}],
        preprocessing={"sample_size": 160},
        trainer=trainer,
        **changes,
    )
    return config | {"base_model": str(base)}


def manifest_of(run: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((run / "manifest.json").read_text(encoding="utf8"))
    return manifest


def test_training_takes_the_same_steps_with_and_without(colours: Any, pretrained: Path, tmp_path: Path) -> None:
    for name, evaluate_base in (("with", True), ("without", False)):
        trainer = {"evaluate_base": evaluate_base, "evaluate_generated": True}
        config = configured(colours, pretrained, adapter=LORA, trainer=trainer)
        Model(config, quiet=True).train(run=tmp_path / name)
    one, other = (load_file(tmp_path / name / "model/adapter_model.safetensors") for name in ("with", "without"))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)
    assert log_of(tmp_path / "with") == log_of(tmp_path / "without")
    manifests = [manifest_of(tmp_path / name) for name in ("with", "without")]
    assert manifests[0]["metrics"] == manifests[1]["metrics"]
    assert manifests[0]["evaluations"] == manifests[1]["evaluations"]
    assert "metrics_base" not in manifests[1]
    files = sorted(path.name for path in (tmp_path / "without" / "evaluations").iterdir())
    assert files == ["test.jsonl", "validation.jsonl"]


def test_the_base_has_the_metrics_of_a_zero_shot_evaluation_on_the_same_rows(
    colours: Any, pretrained: Path, tmp_path: Path
) -> None:
    config = configured(colours, pretrained, trainer={"evaluate_base": True})
    result = Model(config, quiet=True).train(run=tmp_path / "run")
    zero_shot = Model(config | {"trainer": {"type": "none", "batch_size": 8}}, quiet=True).train(run=tmp_path / "zero")
    base = manifest_of(tmp_path / "run")["metrics_base"]
    assert base == {split: pytest.approx(values) for split, values in zero_shot.metrics.items()}
    assert base["test"]["loss"] != result.metrics["test"]["loss"]
    for split in ("validation", "test"):
        base_path = evaluation_path(tmp_path / "run", split, base=True)
        header, trained = read_header(base_path), read_header(evaluation_path(tmp_path / "run", split))
        assert (header.model, header.step, header.metrics) == ("base", 0, base[split])
        assert (header.fingerprint, header.rows) == (trained.fingerprint, trained.rows)
        assert len(read_rows(base_path)) == header.rows


def test_it_is_not_repeated_when_a_run_is_resumed(
    colours: Any, pretrained: Path, tmp_path: Path, train_killed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured(colours, pretrained, trainer={"evaluate_base": True})
    run = tmp_path / "run"
    with caplog.at_level(logging.INFO):
        train_killed(Model(config, quiet=True), run, after=2)
        before = (run / "evaluations" / BASE).read_bytes()
        assert caplog.text.count("evaluating the model before training on validation") == 1
        (run / "evaluations" / "test-base.jsonl").unlink()
        Model(config, quiet=True).train(run=run)
    assert caplog.text.count("evaluating the model before training on validation") == 1
    assert caplog.text.count("evaluating the model before training on test") == 2
    assert (run / "evaluations" / BASE).read_bytes() == before
    assert set(manifest_of(run)["metrics_base"]) == {"validation", "test"}


def test_changed_validation_rows_are_compared_with_no_value_of_the_earlier_ones(
    colours: Any, pretrained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [json.loads(line) for line in (colours.path / "rows.jsonl").read_text(encoding="utf8").splitlines()]
    write_json_lines(tmp_path / "train.jsonl", rows[:60])
    write_json_lines(tmp_path / "validation.jsonl", rows[60:80])
    config = configured(colours, pretrained, trainer={"evaluate_base": True, "evaluate_test": False, "epochs": 1})
    config["data"] = {name: str(tmp_path / f"{name}.jsonl") for name in ("source", "validation")}
    config["data"]["source"] = str(tmp_path / "train.jsonl")
    Model(config, quiet=True).train(run=tmp_path / "run")
    before = manifest_of(tmp_path / "run")
    write_json_lines(tmp_path / "validation.jsonl", rows[80:100])
    config["trainer"]["epochs"] = 2

    Model(config, quiet=True).train(run=tmp_path / "run")

    after, best = manifest_of(tmp_path / "run"), before["best"]
    assert after["metrics_base"]["validation"] != before["metrics_base"]["validation"]
    assert after["best_step"] > before["best_step"]
    assert (
        f"the validation rows have changed: the best loss so far, {best:.4g} at step {before['best_step']}, was that "
        "of other rows and is not compared with new ones"
    ) in caplog.messages


def test_a_start_with_another_model_evaluates_that_one(
    colours: Any, pretrained: Path, tmp_path: Path, train_killed: Any
) -> None:
    config = configured(colours, pretrained, trainer={"evaluate_base": True, "steps_per_checkpoint": 90})
    run = tmp_path / "run"
    train_killed(Model(config, quiet=True), run, after=1)
    first = manifest_of(run)["metrics_base"]
    other = config | {"prompt": {"task": "Which colour?"}}
    Model(other, quiet=True).train(run=run)
    assert manifest_of(run)["metrics_base"]["test"]["loss"] != first["test"]["loss"]


def test_auto_evaluates_it_if_that_costs_less_than_a_tenth_of_the_training(
    colours: Any, pretrained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, steps in (("short", 4), ("long", 40)):
        trainer = {"epochs": None, "max_steps": steps, "steps_per_evaluation": 40, "evaluate_test": False}
        config = configured(colours, pretrained, trainer=trainer, generation={"max_new_tokens": 1})
        with caplog.at_level(logging.INFO):
            Model(config, quiet=True).train(run=tmp_path / name)
    assert not (tmp_path / "short/evaluations" / BASE).exists()
    assert (tmp_path / "long/evaluations" / BASE).exists()
    assert not (tmp_path / "long/evaluations/test-base.jsonl").exists()
    assert "the model is not evaluated before training, which would cost about" in caplog.text
    assert "write trainer.evaluate_base: true for it" in caplog.text


def test_a_cost_is_a_percentage_or_a_number_of_times() -> None:
    shares = (0.256, 1.99, 2.0, 1234.5)
    assert [cost_in_words(share) for share in shares] == [
        "26 % of the training",
        "199 % of the training",
        "2 times the training",
        "1,234 times the training",
    ]


def test_a_new_model_has_no_base(colours: Any, tmp_path: Path) -> None:
    config = colours.config(trainer={"max_steps": 2, "evaluate_base": "auto", "epochs": None})
    Model(config, quiet=True).train(run=tmp_path / "run")
    assert "metrics_base" not in manifest_of(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        load_config(colours.config(trainer={"evaluate_base": True}))
    assert "trainer.evaluate_base: a new model has random weights, so that its metrics say nothing" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": {"skip_all_evaluation": True}}, "evaluate_base needs evaluations; remove it or"),
        (
            {"adapter": {"type": "prompt_tuning"}},
            "new virtual tokens disturb the model until they are trained, so that its metrics say nothing; remove",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(colours: Any, changes: dict[str, Any], message: str) -> None:
    config = configured(colours, "some/model", **changes)
    config["trainer"]["evaluate_base"] = True
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert f"trainer.evaluate_base: {message}" in str(caught.value)


def test_a_new_head_has_no_base_and_one_of_the_checkpoint_has(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", make_classifier_rows(60))
    write_classifier(tmp_path / "model", "distilbert")
    trainer = {"type": "finetune", "batch_size": 8, "max_steps": 3, "evaluate_base": True}
    config = classifier_settings(
        "distilbert", base_model=str(tmp_path / "model"), data={"source": str(tmp_path / "rows.jsonl")}, trainer=trainer
    )
    Model(config, quiet=True).train(run=tmp_path / "run")
    assert manifest_of(tmp_path / "run")["metrics_base"]["test"]["label.accuracy"] >= 0
    other = {"name": "colour", "column": "label", "type": "category", "decoder": {"labels": ["blue", "green"]}}
    rows = [row for row in make_classifier_rows(60) if row["label"] != "red"]
    with pytest.raises(ConfigError) as caught:
        Model(config | {"output_features": [other]}, quiet=True).train(rows, run=tmp_path / "other")
    assert "trainer.evaluate_base: a new head has random weights, so that its metrics say nothing; remove" in str(
        caught.value
    )
