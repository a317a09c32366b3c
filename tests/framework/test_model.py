"""Tests of `Model` from end to end, on a new model."""

import copy
import json
import logging
import pickle
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from partita import ConfigError, DataError, Model, PartitaError, ResumeError
from partita_schema.errors import TrainingError
from partita_trainers import TrainingState

from ..json_lines import read_json_lines, write_json_lines

LEARNS = {"epochs": 10, "learning_rate": 0.006}


@pytest.fixture(scope="module")
def trained(colours: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model trained to high accuracy, with its run."""
    model = Model(colours.config(trainer=LEARNS), quiet=True)
    result = model.train(run=tmp_path_factory.mktemp("trained") / "run")
    return model, result


def test_a_new_model_is_trained_to_high_accuracy(trained: Any, colours: Any) -> None:
    _, result = trained
    assert result.metrics["test"]["exact_match"] >= 0.9
    zero_shot = Model(colours.config(trainer={"type": "none", "batch_size": 32, "evaluate": ["test"]}), quiet=True)
    before = zero_shot.train(run=result.run.parent / "before").metrics["test"]
    assert before["exact_match"] <= 0.05
    assert before["loss"] > 5 * result.metrics["test"]["loss"]


def test_predictions_are_in_input_order_with_input_columns(trained: Any, colours: Any) -> None:
    model, _ = trained
    rows = colours.rows(40)
    for number, row in enumerate(rows):
        row["id"] = number
    result = model.predict([{"id": row["id"], "text": row["text"]} for row in rows])
    assert [row["id"] for row in result] == list(range(40))
    assert {row["status"] for row in result} == {"ok"}
    right = sum(
        row["colour"] == wanted["colour"] and row["number"] == wanted["number"]
        for row, wanted in zip(result, rows, strict=True)
    )
    assert right >= 34
    assert list(result.to_pandas()["id"]) == list(range(40))
    assert result["id"] == list(range(40))
    assert list(result.head(3)["id"]) == [0, 1, 2]
    assert list(result.head().columns) == list(result.columns)
    with pytest.raises(
        KeyError, match="no column is named 'colours'; there are key, id, text, colour, colour_raw, num"
    ):
        result["colours"]
    columns = "key, id, text, colour, colour_raw, number, number_raw, status, error, finish_reason, tokens"
    assert repr(result) == f"<Predictions: 40 rows with {columns}>"


def test_a_loaded_run_gives_the_predictions_of_the_trained_model(trained: Any, colours: Any, tmp_path: Path) -> None:
    model, result = trained
    rows = colours.rows(30, seed=5)
    wanted = [row["colour_raw"] + str(row["number"]) for row in model.predict(rows, fresh=True)]
    loaded = Model.load(result.run, quiet=True)
    assert [row["colour_raw"] + str(row["number"]) for row in loaded.predict(rows, fresh=True)] == wanted
    loaded.save(tmp_path / "saved")
    again = Model.load(tmp_path / "saved", quiet=True)
    assert [row["colour_raw"] + str(row["number"]) for row in again.predict(rows)] == wanted


def test_the_repr_of_a_model_describes_it(trained: Any, colours: Any) -> None:
    model, result = trained
    assert repr(model) == f"<Model run: finetune of scratch llama; 1 input, 2 outputs, run {result.run}>"
    assert repr(Model(colours.config(), quiet=True)) == "<Model run: finetune of scratch llama; 1 input, 2 outputs>"


def test_saved_answers_are_not_generated_again(trained: Any, colours: Any, tmp_path: Path) -> None:
    model, result = trained
    rows = colours.rows(20, seed=6)
    first = model.predict(rows, output=tmp_path / "out.csv")
    assert first.stats.resumed == 0
    again = Model.load(result.run, quiet=True).predict(rows, output=tmp_path / "out.csv")
    assert again.stats.resumed == 20
    assert again.stats.batches == 0
    assert len(pd.read_csv(tmp_path / "out.csv")) == 20


def test_a_journal_of_other_rows_is_refused(trained: Any, colours: Any, tmp_path: Path) -> None:
    model, _ = trained
    model.predict(colours.rows(5, seed=7), output=tmp_path / "out.jsonl")
    with pytest.raises(ResumeError, match="dataset"):
        model.predict(colours.rows(5, seed=8), output=tmp_path / "out.jsonl")
    assert model.predict(colours.rows(5, seed=8), output=tmp_path / "out.jsonl", fresh=True).stats.resumed == 0


def test_evaluation_gives_metrics_by_output(trained: Any, colours: Any) -> None:
    model, _ = trained
    scores = model.evaluate(colours.rows(60, seed=9))
    assert scores["colour"]["accuracy"] >= 0.9
    assert scores["number"]["mae"] <= 0.5
    assert scores["model"]["loss"] < 0.5
    assert model.evaluate()["colour"]["n"] == 64


def test_plain_prompts_are_continued_without_a_template(trained: Any) -> None:
    model, _ = trained
    one = model.generate("3 red balls")
    several = model.generate(["3 red balls", "I see 7 balls and they are green"])
    assert several[0] == one[0]
    assert json.loads(one[0]) == {"colour": "red", "number": 3}
    with pytest.raises(DataError, match="a prompt has 200 tokens and the model's context is 96; shorten it"):
        model.generate(" red" * 200)
    with pytest.raises(DataError, match="a prompt is empty; write at least a character"):
        model.generate([""])


@pytest.mark.parametrize("value", [0, -3, "8", 2.5, True, [8]])
@pytest.mark.parametrize("name", ["batch_size", "max_new_tokens"])
def test_numbers_of_rows_and_tokens_are_checked_before_anything_is_loaded(colours: Any, name: str, value: Any) -> None:
    model = Model(colours.config(), quiet=True)
    calls = [lambda: model.generate("a", **{name: value})]
    if name == "batch_size":
        calls += [
            lambda: model.predict([{"text": "a"}], batch_size=value),
            lambda: model.evaluate(batch_size=value),
            lambda: model.simulate(batch_size=value),
        ]
    for call in calls:
        with pytest.raises(DataError) as caught:
            call()
        assert str(caught.value) == f"{name} is {value!r}; write a whole number of at least 1"


def test_arguments_of_another_kind_are_refused_in_words(colours: Any) -> None:
    model = Model(colours.config(), quiet=True)
    wrong: Any = 5
    for call, message in (
        (lambda: model.generate(wrong), "a prompt is 5; write a text, or a list of texts"),
        (lambda: model.generate(["a", wrong]), "a prompt is 5; write a text, or a list of texts"),
        (lambda: model.predict([{"text": "a"}], output=wrong), "output is 5; write a path"),
        (lambda: model.simulate(wrong), "output is 5; write a path"),
        (lambda: model.train(run=wrong), "run is 5; write a path"),
        (lambda: model.save(wrong), "folder is 5; write a path"),
        (lambda: Model.load(wrong), "folder is 5; write a path"),
    ):
        with pytest.raises(DataError) as caught:
            call()
        assert str(caught.value) == message
    for value in (None, 5, []):
        with pytest.raises(ConfigError) as refused:
            Model(value)  # type: ignore[arg-type]
        assert str(refused.value) == (
            f"the configuration is {value!r}; write a path, YAML text, a dictionary, a Config, or a list of them"
        )


def test_a_model_is_not_saved_into_the_directory_of_a_run(trained: Any) -> None:
    model, result = trained
    before = sorted(result.run.rglob("*"))
    with pytest.raises(DataError) as caught:
        model.save(result.run)
    assert str(caught.value) == f"{result.run} is the directory of a run; name another folder to save the model in"
    assert sorted(result.run.rglob("*")) == before


def test_a_finished_run_is_not_trained_again(trained: Any, colours: Any) -> None:
    _, result = trained
    before = (result.run / "log.jsonl").read_bytes()
    again = Model(colours.config(trainer=LEARNS), quiet=True).train(run=result.run)
    assert again.steps == result.steps
    assert again.metrics == result.metrics
    assert (result.run / "log.jsonl").read_bytes() == before


def test_another_configuration_in_the_same_run_is_refused_with_the_differences(trained: Any, colours: Any) -> None:
    _, result = trained
    with pytest.raises(ResumeError, match=r"trainer\.learning_rate: 0\.006 -> 0\.5"):
        Model(colours.config(trainer={**LEARNS, "learning_rate": 0.5}), quiet=True).train(run=result.run)


def test_values_that_only_training_uses_are_refused_for_a_finished_run(trained: Any) -> None:
    _, result = trained
    overrides = ["base_model=other", "trainer.epochs=9", "adapter={type: lora, r: 3}", "trainer.eval_batch_size=4"]
    with pytest.raises(ConfigError) as caught:
        Model.load(result.run, overrides=overrides, quiet=True)
    what = f"has no effect on the model in {result.run}, which is trained"
    why = f"{what}; to train with other values, change the YAML file"
    assert {(problem.path, problem.message) for problem in caught.value.problems} == {
        ("base_model", why),
        ("trainer.epochs", why),
        ("adapter", why),
    }


def test_defaults_are_refused_for_a_finished_run(trained: Any) -> None:
    _, result = trained
    with pytest.raises(ConfigError) as caught:
        Model.load(result.run, overrides=["defaults.text.preprocessing.max_sequence_length=3"], quiet=True)
    assert str(caught.value) == (
        "defaults: has no effect on a run, whose inputs have their own values; set input_features.0.preprocessing.KEY"
    )


def test_the_code_of_a_folder_is_allowed_by_an_option_and_not_by_an_override(trained: Any) -> None:
    _, result = trained
    with pytest.raises(ConfigError) as caught:
        Model.load(result.run, overrides=["trust_remote_code=true"], quiet=True)
    assert str(caught.value) == (
        "trust_remote_code: has no effect for a folder; set the option --trust-remote-code instead, or in Python "
        "Model.load(folder, trust_remote_code=True)"
    )


def test_values_that_use_a_trained_model_differently_are_accepted(trained: Any) -> None:
    _, result = trained
    for override in ("trainer.eval_batch_size=4", "generation.max_new_tokens=2", "trainer.memory_budget=2GB"):
        Model.load(result.run, overrides=[override], quiet=True)


def test_the_run_directory_has_the_documented_files(trained: Any) -> None:
    _, result = trained
    manifest = json.loads((result.run / "manifest.json").read_text())
    assert manifest["status"] == "done"
    assert manifest["batch_sizes"]["training"] == {"rows": 16, "origin": "file", "device": "cpu"}
    assert manifest["labels"] == {"colour": ["blue", "green", "red"]}
    assert manifest["metrics"]["test"] == result.metrics["test"]
    assert manifest["data"]["training"]["rows"] == 512
    assert manifest["versions"]["torch"]
    log = read_json_lines(result.run / "log.jsonl")
    assert [line["step"] for line in log] == list(range(1, result.steps + 1))
    wanted = {
        "step",
        "epoch",
        "loss",
        "learning_rate",
        "rows",
        "loss_tokens",
        "tokens",
        "padding",
        "seconds",
        "batch_hash",
    }
    assert wanted <= log[0].keys()
    for name in ("config.yaml", "resolved.yaml", "ledger.json", "quarantine.jsonl", "model/model.safetensors"):
        assert (result.run / name).exists(), name
    assert (
        Model(result.run / "config.yaml", quiet=True).config == Model(result.run / "resolved.yaml", quiet=True).config
    )


def test_a_finished_run_without_its_model_is_named_and_writes_it_again(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, rows = Model(colours.config(), quiet=True), colours.rows(8)
    model.train(rows, run="run")
    wanted = model.predict(rows).to_pandas()
    shutil.rmtree("run/model")
    with pytest.raises(PartitaError) as error:
        Model.load("run", quiet=True).predict(rows)
    assert str(error.value) == (
        "run has no model/ with the trained weights; restore it from a copy, or write it again from the newest "
        "checkpoint with partita train FILE --run run"
    )
    Model(colours.config(), quiet=True).train(rows, run="run")
    assert Model.load("run", quiet=True).predict(rows).to_pandas().equals(wanted)


def test_prediction_before_training_reports_what_to_do(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        PartitaError,
        match=r"nothing has been trained with this file yet: train first, .* or write trainer: \{type: none\}",
    ):
        Model(colours.config(), quiet=True).predict(colours.rows(2))


def test_zero_shot_predicts_without_any_training(colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = Model(colours.config(trainer={"type": "none", "batch_size": 4}), quiet=True).predict(colours.rows(6))
    assert len(result) == 6
    assert result.stats.batches == 2


@pytest.mark.long
def test_a_run_without_a_directory_takes_the_next_free_name(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    import yaml

    settings = colours.config(trainer={"epochs": 1, "evaluate_generated": False})
    Path("small.yaml").write_text(yaml.safe_dump(settings))
    first = Model("small.yaml", quiet=True).train()
    second = Model("small.yaml", quiet=True).train()
    assert (first.run, second.run) == (Path("runs/small"), Path("runs/small-2"))
    assert Model("small.yaml", quiet=True).predict(colours.rows(2)).stats.rows == 2


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("nowhere", "is neither a run directory nor a saved model"),
        ("begun", r"is not finished \(dead\); partita runs show .*begun prints the command that continues it"),
    ],
)
def test_only_finished_runs_are_loaded(tmp_path: Path, folder: str, message: str) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "manifest.json").write_text('{"format_version": 1, "status": "running"}')
    with pytest.raises(PartitaError, match=message):
        Model.load(tmp_path / folder)


def test_a_run_in_use_is_refused(colours: Any, tmp_path: Path) -> None:
    from partita.runs.locks import lock

    with lock(tmp_path), pytest.raises(ResumeError, match="is in use by another process; wait for it"):
        Model(colours.config(), quiet=True).train(run=tmp_path)


def test_a_failed_run_is_recorded_and_can_be_trained_later(colours: Any, tmp_path: Path) -> None:
    short = {"epochs": 1, "evaluate_generated": False}
    with pytest.raises(DataError, match="has no column 'colour'"):
        Model(colours.config(trainer=short), quiet=True).train([{"text": "x", "color": "red"}], run=tmp_path / "run")
    assert not (tmp_path / "run").exists(), "it failed before its first step"
    # Nothing was trained yet: the folder can be used with a corrected configuration too.
    corrected = colours.config(trainer={**short, "batch_size": 32})
    assert Model(corrected, quiet=True).train(run=tmp_path / "run").steps == 16


@pytest.mark.parametrize(
    ("metric", "hint"),
    [
        ("acuracy", "did you mean accuracy"),
        ("number.maee", "did you mean number.mae"),
        ("x", "there are loss, colour."),
        ("colour.n", "there are loss, colour."),
        ("exact_match", "did you mean number.exact_match"),
    ],
)
def test_a_misspelt_metric_is_reported_before_training(colours: Any, tmp_path: Path, metric: str, hint: str) -> None:
    settings = colours.config(trainer={"validation_metric": metric})
    with pytest.raises(ConfigError, match=f"trainer.validation_metric: no metric is named {metric}; {hint}"):
        Model(settings, quiet=True)


def test_a_finished_run_continues_with_more_epochs(colours: Any, tmp_path: Path) -> None:
    short = {"evaluate_generated": False, "learning_rate_scheduler": {"decay": "constant"}}
    Model(colours.config(trainer={**short, "max_steps": 8}), quiet=True).train(run=tmp_path / "run")
    longer = Model(colours.config(trainer={**short, "max_steps": 12}), quiet=True).train(run=tmp_path / "run")
    assert (longer.resumed_from, longer.steps) == (8, 12)


@pytest.mark.long
def test_an_interrupted_run_is_resumed_with_more_epochs(
    colours: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train_killed: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    short = {"evaluate_generated": False, "learning_rate_scheduler": {"decay": "constant"}, "batch_size": 128}
    begun = Model(colours.config(trainer={**short, "epochs": 2, "steps_per_checkpoint": 2}), quiet=True)
    train_killed(begun, Path("runs/run"), after=5)
    with caplog.at_level("INFO", logger="partita"):
        result = Model(colours.config(trainer={**short, "epochs": 3, "steps_per_checkpoint": 2}), quiet=True).train()
    assert (result.run, result.resumed_from, result.steps) == (Path("runs/run"), 4, 12)
    assert caplog.messages[:2] == [
        "run directory: runs/run (continued)",
        "changed since the run began: trainer.epochs: 2 -> 3",
    ]


def test_a_run_that_cannot_be_resumed_reports_the_changed_key(
    colours: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train_killed: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    short = {"evaluate_generated": False, "batch_size": 128, "steps_per_checkpoint": 1, "max_steps": 2}
    train_killed(Model(colours.config(trainer=short), quiet=True), Path("runs/run"), after=1)
    with caplog.at_level("INFO", logger="partita"):
        result = Model(colours.config(trainer={**short, "learning_rate": 0.02}), quiet=True).train()
    assert result.run == Path("runs/run-2")
    assert caplog.messages[:2] == [
        "run directory: runs/run-2 (new)",
        (
            "the unfinished run in runs/run is not continued, because other keys changed: "
            'trainer.learning_rate: 0.01 -> 0.02; to continue it, undo that: train(run="runs/run")'
        ),
    ]


def test_a_finished_run_is_found_with_other_generation_options(
    colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = {"max_steps": 4, "evaluate_generated": False}
    Model(colours.config(trainer=short), quiet=True).train()
    other = Model(
        colours.config(
            trainer={**short, "eval_batch_size": 4, "memory_budget": "9GB"}, generation={"max_new_tokens": 3}
        ),
        quiet=True,
    )
    assert {row["tokens"] for row in other.predict(colours.rows(3))} == {3}
    with pytest.raises(PartitaError, match=r"runs/run is of another file: trainer\.learning_rate: 0\.01 -> 0\.5"):
        Model(colours.config(trainer={**short, "learning_rate": 0.5}), quiet=True).predict(colours.rows(1))


def test_skipped_rows_are_reported(colours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*colours.rows(60), {"text": None, "colour": "red", "number": 1}]
    split = {"type": "random", "probabilities": [1, 0, 0]}
    settings = colours.config(trainer={"max_steps": 2}, data={"max_bad_rows": 3, "split": split})
    Model(settings, quiet=True).train(rows, run=tmp_path / "run")
    assert "training: 1 of 61 rows left out (column text is missing or empty); see" in caplog.text
    assert "quarantine.jsonl" in caplog.text
    caplog.clear()
    rows += [{"text": "a ball", "colour": None, "number": 1}] * 2
    Model(settings, quiet=True).train(rows, run=tmp_path / "other")
    reasons = "2 x column colour is missing or empty; 1 x column text is missing or empty"
    assert f"training: 3 of 63 rows left out ({reasons}); see" in caplog.text


def test_evaluation_rows_with_an_unknown_label_are_left_out_and_recorded(
    colours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [*colours.rows(7), {"text": "a pink ball", "colour": "pink", "number": 1}]
    write_json_lines(tmp_path / "validation.jsonl", rows)
    data = {"max_bad_rows": 0, "validation": str(tmp_path / "validation.jsonl")}
    trainer = {"max_steps": 1, "evaluate_generated": False}
    settings = colours.config(trainer=trainer, data=data, preprocessing={"sample_size": 40})
    Model(settings, quiet=True).train(run=tmp_path / "run")
    reason = "column colour: 'pink' is none of the labels blue, green, red"
    assert f"validation: 1 of 8 rows left out ({reason}); see {tmp_path}/run/quarantine.jsonl" in caplog.messages
    [left_out] = read_json_lines(tmp_path / "run" / "quarantine.jsonl")
    assert (left_out["key"], left_out["reasons"]) == ("validation.jsonl:8", [reason])


def test_rows_that_replace_a_mix_give_a_warning(colours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("first", "second"):
        write_json_lines(tmp_path / f"{name}.jsonl", colours.rows(40))
    data = {"source": None, "mix": [{"source": str(tmp_path / f"{name}.jsonl")} for name in ("first", "second")]}
    settings = colours.config(trainer={"max_steps": 1, "skip_all_evaluation": True}, data=data)
    message = (
        "the passed rows replace data.mix: its sources first, second are not read; pass no rows to train on the mix"
    )
    Model(settings, quiet=True).train(run=tmp_path / "mixed")
    assert message not in caplog.messages
    Model(settings, quiet=True).train(colours.rows(40), run=tmp_path / "passed")
    assert message in caplog.messages


def test_training_rows_with_a_single_label_give_a_warning(
    colours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = "colour: all training rows have the label 'red', so the model learns no other; check the data"
    settings = colours.config(trainer={"max_steps": 1, "skip_all_evaluation": True}, data={"source": None})
    Model(settings, quiet=True).train(colours.rows(20), run=tmp_path / "several")
    assert message not in caplog.messages
    rows = [row | {"colour": "red"} for row in colours.rows(20)]
    Model(settings, quiet=True).train(rows, run=tmp_path / "one")
    assert caplog.messages.count(message) == 1


def test_a_split_with_unknown_labels_only_is_not_evaluated(
    colours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_json_lines(tmp_path / "validation.jsonl", [{"text": "a pink ball", "colour": "pink", "number": 1}])
    trainer = {"max_steps": 1, "evaluate_generated": False}
    data = {"validation": str(tmp_path / "validation.jsonl")}
    settings = colours.config(trainer=trainer, data=data, preprocessing={"sample_size": 40})

    result = Model(settings, quiet=True).train(run=tmp_path / "run")

    assert "validation is not evaluated: none of its 1 rows has a label of the training rows" in caplog.messages
    assert result.steps == 1
    assert "validation" not in result.metrics


def test_a_split_whose_few_rows_are_all_bad_is_not_evaluated_if_it_was_split_off(
    colours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [row | {"split": "training"} for row in colours.rows(40)]
    bad = rows[0] | {"number": "one", "split": "validation"}
    write_json_lines(tmp_path / "all.jsonl", [*rows, bad])
    write_json_lines(tmp_path / "rows.jsonl", rows)
    write_json_lines(tmp_path / "bad.jsonl", [bad])
    split_off = {"source": str(tmp_path / "all.jsonl"), "split": {"type": "fixed"}, "max_bad_rows": 1}
    named = {"source": str(tmp_path / "rows.jsonl"), "validation": str(tmp_path / "bad.jsonl"), "max_bad_rows": 1}
    trainer = {"max_steps": 1, "evaluate_generated": False}

    result = Model(colours.config(trainer=trainer, data=split_off), quiet=True).train(run=tmp_path / "run")

    found = "no validation row can be used, of 1:\n  1 x column number"
    assert any(message.startswith(f"validation is not evaluated: {found}") for message in caplog.messages)
    assert result.steps == 1
    assert "validation" not in result.metrics
    with pytest.raises(DataError, match=re.escape(found)):
        Model(colours.config(trainer=trainer, data=named), quiet=True).train(run=tmp_path / "named")


def test_a_trainer_in_the_folder_of_the_configuration_is_found(colours: Any, tmp_path: Path) -> None:
    import yaml

    code = (
        "from partita_trainers.base import TrainResult\n"
        "class Nothing:\n"
        "    def __init__(self, section): self.options = section.options\n"
        "    def train(self, work): return TrainResult(run=work.run.folder, metrics={}, steps=self.options['steps'])\n"
    )
    (tmp_path / "beside_the_file.py").write_text(code)
    target = {"type": "custom", "target": "beside_the_file:Nothing", "batch_size": 16, "options": {"steps": 3}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(colours.config(trainer=target)))
    assert Model(tmp_path / "run.yaml", quiet=True).train(run=tmp_path / "run").steps == 3


def test_evaluation_after_training_on_given_rows_uses_their_held_out_rows(colours: Any, tmp_path: Path) -> None:
    model = Model(
        colours.config(trainer={"max_steps": 2, "evaluate_generated": False}, data={"source": None}), quiet=True
    )
    result = model.train(colours.rows(80), run=tmp_path / "run")
    assert model.evaluate()["colour"]["n"] == 8
    assert result.batch_sizes["training"]["rows"] == 16
    again = Model(
        colours.config(trainer={"max_steps": 2, "evaluate_generated": False}, data={"source": None}), quiet=True
    )
    assert again.train(colours.rows(80), run=tmp_path / "run").batch_sizes == result.batch_sizes
    with pytest.raises(
        ResumeError,
        match=r"is finished, and it had other rows \(training, .*\); start it with the same rows, or give this run",
    ):
        again.train(colours.rows(81), run=tmp_path / "run")


def test_a_finished_run_is_not_used_for_rows_that_have_changed(
    colours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, held_out = tmp_path / "rows.jsonl", tmp_path / "test.jsonl"
    write_json_lines(source, colours.rows(40))
    write_json_lines(held_out, colours.rows(10, seed=3))
    config = colours.config(
        trainer={"max_steps": 2, "evaluate_generated": False}, data={"source": str(source), "test": str(held_out)}
    )
    result = Model(config, quiet=True).train(run=tmp_path / "run")
    assert Model(config, quiet=True).train(run=tmp_path / "run").metrics == result.metrics

    write_json_lines(held_out, colours.rows(10, seed=4))
    with pytest.raises(ResumeError, match=r"is finished, and it had other rows \(test\); start it with the same"):
        Model(config, quiet=True).train(run=tmp_path / "run")

    source.unlink()
    assert Model(config, quiet=True).train(run=tmp_path / "run").metrics == result.metrics
    assert "the rows are not compared with those of the finished run: data.source: " in caplog.text


def test_a_copy_of_a_model_loads_the_trained_weights_itself(trained: Any, colours: Any) -> None:
    model, _ = trained
    rows = colours.rows(20)
    answers = list(model.predict(rows))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(copied.predict(rows, fresh=True)) == answers


def test_a_finished_run_is_used_without_the_class_of_its_source(
    colours: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "colour_rows.py"
    write_json_lines(tmp_path / "rows.jsonl", colours.rows(40))
    module.write_text(f"""
import json, pathlib
LINES = pathlib.Path({str(tmp_path / "rows.jsonl")!r}).read_text().splitlines()
class Rows:
    def __len__(self):
        return len(LINES)
    def __getitem__(self, index):
        return json.loads(LINES[index])
""")
    monkeypatch.syspath_prepend(tmp_path)
    source = {"type": "custom", "target": "colour_rows:Rows"}
    config = colours.config(trainer={"max_steps": 2, "evaluate_generated": False}, data={"source": source})
    steps = Model(config, quiet=True).train(run=tmp_path / "run").steps
    module.unlink()
    monkeypatch.delitem(sys.modules, "colour_rows")
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    assert Model(config, quiet=True).train(run=tmp_path / "run").steps == steps
    assert "the rows are not compared with those of the finished run: " in caplog.text
    assert "there is no module colour_rows" in caplog.text


def test_a_run_that_goes_on_without_validation_rows_has_no_metrics_of_them(colours: Any, tmp_path: Path) -> None:
    class StopAtThree:
        def on_step(self, state: TrainingState) -> None:
            if state.step == 3:
                raise RuntimeError("stopped here")

    held_out = tmp_path / "more.jsonl"
    write_json_lines(held_out, colours.rows(8, seed=3))
    trainer = {"max_steps": 4, "evaluate_generated": False, "steps_per_evaluation": 2, "steps_per_checkpoint": 2}
    config = colours.config(trainer=trainer, data={"validation": str(held_out), "test": str(held_out)})
    with pytest.raises(TrainingError, match="stopped here"):
        Model(config, quiet=True).train(run=tmp_path / "run", callbacks=[StopAtThree()])
    assert "validation" in json.loads((tmp_path / "run" / "manifest.json").read_text())["metrics"]

    write_json_lines(held_out, [row | {"colour": "mauve"} for row in colours.rows(8, seed=3)])
    result = Model(config, quiet=True).train(run=tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (result.resumed_from, result.metrics, manifest["metrics"], manifest["best_step"]) == (2, {}, {}, None)
    splits = json.loads((tmp_path / "run" / "ledger.json").read_text())["splits"]
    assert {split: counts["left_out"] for split, counts in splits.items()} == {
        "training": 0,
        "validation": 8,
        "test": 8,
    }


def test_threads_take_turns_with_a_model(trained: Any, colours: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = trained
    jobs = [colours.rows(60, seed=seed) for seed in range(4)]

    def answers(rows: Any) -> list[Any]:
        return [answer["colour"] for answer in model.predict(rows, fresh=True)]

    alone = [answers(rows) for rows in jobs]
    pieces = model.generate("I see", max_new_tokens=8, stream=True)
    piece = next(pieces)
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(4) as threads:
        assert list(threads.map(answers, jobs)) == alone
    assert "waiting for another thread that uses this model" in caplog.messages
    assert [piece + "".join(pieces)] == model.generate("I see", max_new_tokens=8)


def test_a_folder_with_other_files_is_not_changed(colours: Any, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    with pytest.raises(ResumeError, match=r"is not a run and holds config\.yaml; name another folder with --run"):
        Model(colours.config(), quiet=True).train(run=tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "mine"


@pytest.mark.long
def test_a_model_trained_in_bf16_predicts_the_same_in_memory_and_loaded(colours: Any, tmp_path: Path) -> None:
    trainer = {"max_steps": 8, "mixed_precision": "bf16", "optimizer": {"type": "schedule_free_adamw"}}
    model = Model(colours.config(trainer=trainer), quiet=True)
    model.train(run=tmp_path / "run")
    rows = colours.rows(12)
    assert model.evaluate(rows) == Model.load(tmp_path / "run", quiet=True).evaluate(rows)


def test_trackers_get_the_metrics(colours: Any, tmp_path: Path) -> None:
    settings = colours.config(trainer={"epochs": 1, "evaluate_generated": False}, tracking=["tensorboard"])
    Model(settings, quiet=True).train(run=tmp_path / "run")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = next((tmp_path / "run").rglob("events.out.*"))
    accumulator = EventAccumulator(str(events.parent))
    accumulator.Reload()
    assert {"train/loss", "validation/loss"} <= set(accumulator.Tags()["scalars"])
    assert len(accumulator.Scalars("train/loss")) == 32


def test_a_tracker_that_is_not_installed_is_reported(colours: Any, tmp_path: Path) -> None:
    settings = colours.config(trainer={"epochs": 1}, tracking=["tensorboard", "wandb"])
    with pytest.raises(ConfigError, match=r"tracking\[1\]: wandb is not installed; pip install wandb, or remove it"):
        Model(settings, quiet=True).train(run=tmp_path / "run")


def test_a_model_has_only_the_documented_public_names(colours: Any) -> None:
    verbs = ["evaluate", "export", "generate", "load", "predict", "push_to_hub", "save", "serve", "simulate", "train"]
    shown = [name for name in dir(Model(colours.config(), quiet=True)) if not name.startswith("_")]
    assert shown == sorted([*verbs, "tune", "config", "name", "run"])
