"""A finished run on preferences is evaluated with the loss, the rewards and the KL term of its training."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from partita import ConfigError, Model
from partita.pipeline.batch_sizes import BatchSizeTuner
from partita.runs.directory import RunDirectory

from ...json_lines import write_json_lines

SCRATCH = {
    "type": "scratch",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 64,
    "context_length": 64,
    "tokenizer": "word",
}
STEPS = {"batch_size": 4, "max_steps": 4, "restore_best": False, "evaluate_base": False}
TRAINERS = {
    "dpo": {"type": "preference", "learning_rate": 0.03},
    "kto": {"type": "kto", "desirable_weight": 3.0, "undesirable_weight": "auto", "beta": 0.3, "learning_rate": 0.05},
}
LORA = {"type": "lora", "r": 4, "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
COLOURS = ["red", "blue", "green", "one"]


def write_rows(path: Path, *, start: int, rows: int = 12) -> Path:
    """Write rows that have pairs of answers and labelled answers."""
    lines = []
    for number in range(start, start + rows):
        chosen, rejected = f"a {COLOURS[number % 4]} ball {number % 3}", " ".join(["red"] * (1 + number % 5))
        answer, good = (chosen, True) if number % 4 else (rejected, False)
        pair = {"chosen": chosen, "rejected": rejected}
        lines.append({"text": f"I see {COLOURS[number * 5 % 4]} {number}", **pair, "answer": answer, "good": good})
    write_json_lines(path, lines)
    return path


def settings(place: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """Return a configuration whose rows are in files of `place`."""
    feature = {"type": "text", "label": "good"} if kind == "kto" else {"type": "preference"}
    return {
        "base_model": SCRATCH,
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "answer", **feature}],
        "generation": {"max_new_tokens": 3},
        "data": {
            "source": str(write_rows(place / "rows.jsonl", start=0)),
            "test": str(write_rows(place / "held-out.jsonl", start=100)),
            "split": {"type": "random", "probabilities": [1.0, 0.0, 0.0]},
        },
        "trainer": TRAINERS[kind] | STEPS,
    } | changes


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small pretrained model."""
    place = tmp_path_factory.mktemp("base")
    config = settings(place, "kto")
    config["output_features"] = [{"name": "answer", "type": "text"}]
    config["trainer"] = {"type": "finetune", "learning_rate": 0.001} | STEPS
    Model(config, quiet=True).train(run=place / "run")
    return place / "run" / "model"


def of_objective(metrics: Any) -> dict[str, float]:
    """Return the metrics of the loss on preferences."""
    names = ("loss", "kl", "rewards", "logps", "chosen_falls")
    return {name: value for name, value in metrics.items() if name.partition("/")[0] in names}


def recorded(run: Path) -> list[dict[str, float]]:
    """Return the recorded numbers of the objective for each test row."""
    lines = (run / "evaluations" / "test.jsonl").read_text("utf8").splitlines()
    rows = [json.loads(line) for line in lines[1:]]
    values = [row["outputs"]["answer"]["of_row"] | {"loss": row["loss"]} for row in rows]
    return [{name: value for name, value in one.items() if name in ROW_VALUES} for one in values]


ROW_VALUES = ("loss", "reward", "logp", "is_good", "rewards/chosen", "rewards/rejected", "logps/chosen")
ADAPTERS = {"all weights": {}, "lora": {"adapter": LORA}, "pissa": {"adapter": LORA | {"init": "pissa"}}}


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_finished_run_is_evaluated_with_its_loss(
    base: Path, kind: str, adapter: str, tmp_path: Path, caplog: Any
) -> None:
    model = Model(settings(tmp_path, kind, base_model=str(base), **ADAPTERS[adapter]), quiet=True)
    trained = of_objective(model.train(run=tmp_path / "run").metrics["test"])
    rows = recorded(tmp_path / "run")
    (tmp_path / "run" / "references.jsonl").unlink()

    with caplog.at_level(logging.INFO):
        again = Model.load(tmp_path / "run", quiet=True).evaluate()

    assert trained["kl"] > 0.01 if kind == "kto" else len(trained) == 8
    assert of_objective(again["model"]) == pytest.approx(trained, rel=1e-4, abs=1e-6)
    for one, other in zip(rows, recorded(tmp_path / "run"), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    # A new adapter of LoRA is switched off; one that has moved weights is made again.
    assert any("trained parameters" in message for message in caplog.messages) == (adapter == "pissa")


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("recorded_references", [True, False])
def test_a_model_that_has_not_changed_has_no_rewards_after_training_with_mixed_precision(
    base: Path, kind: str, recorded_references: bool, tmp_path: Path
) -> None:
    config = settings(tmp_path, kind, base_model=str(base))
    config["trainer"] |= {"mixed_precision": "bf16", "learning_rate": 1e-12}
    trained = Model(config, quiet=True).train(run=tmp_path / "run").metrics["test"]
    if not recorded_references:
        (tmp_path / "run" / "references.jsonl").unlink()
    model = Model.load(tmp_path / "run", quiet=True)
    for metrics in (trained, model.evaluate()["model"], model.evaluate(tmp_path / "rows.jsonl")["model"]):
        for name in ("rewards/chosen", "rewards/rejected"):
            assert metrics[name] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", TRAINERS)
def test_rows_that_were_not_in_the_data_have_the_loss_that_they_would_have_had(
    base: Path, kind: str, tmp_path: Path
) -> None:
    others = write_rows(tmp_path / "others.jsonl", start=200)
    config = settings(tmp_path, kind, base_model=str(base))
    Model(config, quiet=True).train(run=tmp_path / "run")
    config["data"]["test"] = str(others)
    trained = Model(config, quiet=True).train(run=tmp_path / "other").metrics["test"]

    again = Model.load(tmp_path / "run", quiet=True).evaluate(others)

    assert of_objective(again["model"]) == pytest.approx(of_objective(trained), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", TRAINERS)
def test_a_new_model_is_compared_with_its_random_weights(kind: str, tmp_path: Path) -> None:
    model = Model(settings(tmp_path, kind), quiet=True)
    trained = of_objective(model.train(run=tmp_path / "run").metrics["test"])
    (tmp_path / "run" / "references.jsonl").unlink()

    in_this_process = of_objective(model.evaluate()["model"])
    again = of_objective(Model.load(tmp_path / "run", quiet=True).evaluate()["model"])

    assert in_this_process == pytest.approx(trained, rel=1e-4, abs=1e-6)
    assert again == pytest.approx(trained, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", TRAINERS)
def test_the_batch_size_of_an_evaluation_is_that_of_its_loss(
    base: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, kind, base_model=str(base))
    config["trainer"]["eval_batch_size"] = "auto"
    Model(config, quiet=True).train(run=tmp_path / "run")
    model = Model.load(tmp_path / "run", quiet=True)
    found, evaluation = list[str](), BatchSizeTuner.evaluation

    def noted(tuner: BatchSizeTuner, *args: Any, **options: Any) -> Any:
        found.append(type(options["objective"]).__name__)
        return evaluation(tuner, *args, **options)

    monkeypatch.setattr(BatchSizeTuner, "evaluation", noted)
    tuned = model.tune(fresh=True).evaluation
    model.evaluate()

    assert tuned is not None
    assert tuned.origin == "tuned"
    assert found == [{"dpo": "PairObjective", "kto": "KtoObjective"}[kind]] * 2


def test_a_saved_model_is_evaluated_with_the_loss_of_its_run(base: Path, tmp_path: Path) -> None:
    model = Model(settings(tmp_path, "kto", base_model=str(base), adapter=LORA), quiet=True)
    trained = of_objective(model.train(run=tmp_path / "run").metrics["test"])
    Model.load(tmp_path / "run", quiet=True).save(tmp_path / "saved")

    again = Model.load(tmp_path / "saved", quiet=True).evaluate(tmp_path / "held-out.jsonl")

    assert of_objective(again["model"]) == pytest.approx(trained, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_merged_run_is_evaluated_with_the_loss_of_its_run(
    base: Path, kind: str, adapter: str, tmp_path: Path, caplog: Any
) -> None:
    model = Model(settings(tmp_path, kind, base_model=str(base), **ADAPTERS[adapter]), quiet=True)
    trained = of_objective(model.train(run=tmp_path / "run").metrics["test"])
    Model.load(tmp_path / "run", quiet=True).export("merged", tmp_path / "merged")

    again = Model.load(tmp_path / "merged", quiet=True).evaluate(tmp_path / "held-out.jsonl")

    assert of_objective(again["model"]) == pytest.approx(trained, rel=1e-4, abs=1e-6)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("how", ["gone", "changed", "changed, with an adapter"])
def test_without_the_model_before_training_a_loss_is_missing_and_recorded_rewards_stay(
    base: Path, kind: str, how: str, tmp_path: Path, caplog: Any
) -> None:
    start = shutil.copytree(base, tmp_path / "start")
    changes = {"adapter": LORA} if "adapter" in how else {}
    Model(settings(tmp_path, kind, base_model=str(start), **changes), quiet=True).train(run=tmp_path / "run")
    rows = (tmp_path / "run" / "evaluations" / "test.jsonl").read_bytes()
    (tmp_path / "run" / "references.jsonl").unlink()
    if how == "gone":
        shutil.rmtree(start)
    else:
        weights = load_file(start / "model.safetensors")
        save_file({name: tensor + 0.1 for name, tensor in weights.items()}, start / "model.safetensors")
        (start / "partita-checksums.json").unlink()

    again = Model.load(tmp_path / "run", quiet=True).evaluate()

    assert list(again) == ["answer"]
    assert again["answer"]["n"] == (12 if kind == "dpo" else 9)
    reason = f"base_model: there is no folder {start}; {tmp_path} holds run"
    *more, message = caplog.messages
    assert len(more) == (how != "gone" and "adapter" in how)
    assert all("has other weights than the base model that the adapter" in one for one in more)
    assert message == (
        "the metrics have no loss, no rewards, no logps/chosen and no logps/rejected: they are computed together with "
        "the model before training, which cannot be loaded: "
        + (reason if how == "gone" else f"{start} has changed since training began")
    )
    assert (tmp_path / "run" / "evaluations" / "test.jsonl").read_bytes() == rows


def test_a_balanced_weight_that_is_not_recorded_is_asked_for(base: Path, tmp_path: Path) -> None:
    model = Model(settings(tmp_path, "kto", base_model=str(base), adapter=LORA), quiet=True)
    model.train(run=tmp_path / "run")
    RunDirectory(tmp_path / "run", config=model.config).note(undesirable_weight=None)

    with pytest.raises(ConfigError) as caught:
        Model.load(tmp_path / "run", quiet=True).evaluate()

    assert str(caught.value) == (
        "trainer.undesirable_weight: auto balances the training rows, and the result is not recorded here; write a "
        "number"
    )
