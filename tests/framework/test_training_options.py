"""Tests of training options, each in a short run on a real model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from partita import Model

from ..json_lines import read_json_lines
from ..properties import first

ALL = {"type": "random", "probabilities": [1, 0, 0]}
"""All rows are training rows."""


@pytest.fixture(scope="module")
def base(colours: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a model trained for a few steps, for adapters and quantization."""
    result = Model(colours.config(trainer={"epochs": 1, "evaluate_generated": False}), quiet=True).train(
        run=tmp_path_factory.mktemp("base") / "run"
    )
    return str(result.run / "model")


@pytest.fixture(scope="module")
def untrained_base(colours: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a model after two steps: its loss falls with any adapter, on any processor."""
    result = Model(colours.config(trainer={"max_steps": 2, "evaluate_generated": False}), quiet=True).train(
        run=tmp_path_factory.mktemp("untrained_base") / "run"
    )
    return str(result.run / "model")


def train(colours: Any, run: Path, **changes: Any) -> tuple[Any, list[dict[str, Any]]]:
    trainer = {
        "max_steps": 12,
        "learning_rate": 0.002,
        "evaluate_generated": False,
        "evaluate_test": False,
        **changes.pop("trainer", {}),
    }
    model = Model(colours.config(trainer=trainer, **changes), quiet=True)
    model.train(run=run)
    return model, read_json_lines(run / "log.jsonl")


def losses(log: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in log]


def falls(log: list[dict[str, Any]]) -> bool:
    result = losses(log)
    return sum(result[-4:]) < sum(result[:4])


@pytest.mark.long
def test_gradient_checkpointing_does_not_change_losses(colours: Any, tmp_path: Path) -> None:
    _, plain = train(colours, tmp_path / "plain")
    _, saving = train(colours, tmp_path / "saving", trainer={"gradient_checkpointing": True})
    assert losses(saving) == pytest.approx(losses(plain), abs=1e-5)


@pytest.mark.long
def test_bf16_computes_nearly_the_same_and_keeps_float32_weights(colours: Any, tmp_path: Path) -> None:
    _, plain = train(colours, tmp_path / "plain")
    model, mixed = train(colours, tmp_path / "mixed", trainer={"mixed_precision": "bf16"})
    assert losses(mixed) != losses(plain)
    assert losses(mixed) == pytest.approx(losses(plain), rel=0.05)
    assert {parameter.dtype for parameter in model._backend.pipeline().lm.module.parameters()} == {torch.float32}


@pytest.mark.long
def test_accumulation_through_the_whole_stack_gives_the_same_losses(colours: Any, tmp_path: Path) -> None:
    options = {"effective_batch_size": 32}
    _, whole = train(colours, tmp_path / "whole", trainer={**options, "batch_size": 32}, data=fixed(colours))
    _, parts = train(colours, tmp_path / "parts", trainer={**options, "batch_size": 8}, data=fixed(colours))
    assert [line["rows"] for line in parts] == [line["rows"] for line in whole]
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-4)


def fixed(colours: Any) -> dict[str, Any]:
    return {**colours.config()["data"], "batching": {"type": "fixed"}}


def test_prompts_in_the_loss_count_as_loss_tokens(colours: Any, tmp_path: Path) -> None:
    _, answers = train(colours, tmp_path / "answers", trainer={"max_steps": 2})
    _, everything = train(colours, tmp_path / "all", trainer={"max_steps": 2, "completion_only_loss": False})
    for one, other in zip(answers, everything, strict=True):
        assert other["loss_tokens"] == other["tokens"] - other["rows"]
        assert one["loss_tokens"] < other["loss_tokens"]


def test_frozen_layers_do_not_change(colours: Any, base: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    train(colours, tmp_path / "run", base_model=base, trainer={"layers_to_freeze_regex": r"layers\.0\."})
    before, after = load_file(f"{base}/model.safetensors"), load_file(tmp_path / "run" / "model" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any("layers.0." in name for name in changed)


def test_a_metric_of_generated_answers_can_select_the_best_checkpoint(colours: Any, tmp_path: Path) -> None:
    train(
        colours,
        tmp_path / "run",
        trainer={
            "validation_metric": "accuracy",
            "evaluate_generated": "auto",
            "steps_per_evaluation": 4,
            "max_generated_rows": 8,
        },
    )
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    during = [result for result in manifest["evaluations"] if result["split"] == "validation"]
    assert [result["step"] for result in during] == [4, 8, 12, 12]
    assert {result["colour.n"] for result in during[:3]} == {8}
    assert manifest["best"] == max(result["colour.accuracy"] for result in during[:3])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.long
def test_a_quantized_model_with_an_adapter_trains_correctly_also_after_an_evaluation(
    colours: Any, base: str, tmp_path: Path, bits: int
) -> None:
    options = {"base_model": base, "quantization": {"bits": bits}, "adapter": {"type": "lora", "r": 8}}
    trainer = {"max_steps": 16, "learning_rate": 0.003}
    _, often = train(colours, tmp_path / "often", trainer={**trainer, "steps_per_evaluation": 2}, **options)
    model, never = train(colours, tmp_path / "never", trainer={**trainer, "skip_all_evaluation": True}, **options)
    assert losses(often) == losses(never)
    assert falls(never)
    loaded = Model.load(tmp_path / "never", quiet=True)
    rows = colours.rows(6)
    assert [row["colour"] for row in loaded.predict(rows)] == [row["colour"] for row in model.predict(rows, fresh=True)]


def test_a_merged_adapter_is_a_plain_model(colours: Any, base: str, tmp_path: Path) -> None:
    adapter = {"type": "lora", "r": 4, "postprocessor": {"merge_adapter_into_base_model": True}}
    model, _ = train(colours, tmp_path / "run", base_model=base, adapter=adapter, trainer={"learning_rate": 0.005})
    files = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert "model.safetensors" in files
    assert "adapter_config.json" not in files
    rows = colours.rows(8)
    wanted = [row["number_raw"] for row in model.predict(rows, fresh=True)]
    assert [row["number_raw"] for row in Model.load(tmp_path / "run", quiet=True).predict(rows)] == wanted


def test_a_new_model_is_saved_with_its_adapter(colours: Any, tmp_path: Path) -> None:
    model, _ = train(colours, tmp_path / "run", adapter={"type": "lora", "r": 4})
    rows = colours.rows(8)
    wanted = [row["number_raw"] for row in model.predict(rows, fresh=True)]
    assert [row["number_raw"] for row in Model.load(tmp_path / "run", quiet=True).predict(rows)] == wanted


@pytest.mark.parametrize("init", first(["pissa", "olora", "eva", "corda"]))
def test_adapter_inits_that_use_weights_or_data_train_and_load(
    colours: Any, untrained_base: str, tmp_path: Path, init: str
) -> None:
    adapter = {"type": "lora", "r": 4, "init": init}
    model, log = train(colours, tmp_path / "run", base_model=untrained_base, adapter=adapter)
    assert falls(log)
    rows = colours.rows(8)
    wanted = [row["number_raw"] for row in model.predict(rows, fresh=True)]
    assert [row["number_raw"] for row in Model.load(tmp_path / "run", quiet=True).predict(rows)] == wanted


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_model_takes_the_same_steps(colours: Any, tmp_path: Path, caplog: Any) -> None:
    _, plain = train(colours, tmp_path / "plain", trainer={"max_steps": 3, "skip_all_evaluation": True})
    _, compiled = train(
        colours, tmp_path / "compiled", trainer={"max_steps": 3, "skip_all_evaluation": True, "compile": True}
    )
    assert losses(compiled) == pytest.approx(losses(plain), abs=1e-3)
    warning = "trainer.compile: on a CPU, steps take longer with it, and compiling takes up to a minute"
    assert caplog.messages.count(warning) == 1


@pytest.mark.long
def test_a_model_that_cannot_be_compiled_is_a_clear_error(colours: Any, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(colours.config(trainer={"max_steps": 1, "compile": True})), encoding="utf8")
    done = subprocess.run(
        [sys.executable, "-m", "partita", "train", config, "--run", tmp_path / "run"],
        env=os.environ | {"CXX": str(tmp_path / "missing"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: torch.compile failed: InvalidCxxCompiler: No working C++ compiler found in ")
    assert last.endswith("; remove trainer.compile, or install what it needs: on a CPU a C++ compiler")


def test_a_step_with_more_batches_than_an_epoch_gives_a_warning(colours: Any, tmp_path: Path, caplog: Any) -> None:
    steps = {"max_steps": 1, "batch_size": 8, "skip_all_evaluation": True}
    rows = colours.rows(40)
    for accumulated, warns in ((5, False), (6, True)):
        caplog.clear()
        settings = colours.config(trainer=steps | {"gradient_accumulation_steps": accumulated}, data={"split": ALL})
        Model(settings, quiet=True).train(rows, run=tmp_path / str(accumulated))
        message = (
            "trainer.gradient_accumulation_steps is 6, so that a step takes 6 batches, and an epoch has only 5: each "
            "epoch is one step of 5 batches"
        )
        assert (message in caplog.messages) == warns


def test_keys_that_need_validation_rows_are_named_if_there_are_none(colours: Any, tmp_path: Path, caplog: Any) -> None:
    trainer = {"max_steps": 1, "validation_metric": "accuracy", "evaluate_generated": "auto", "early_stop": 2}
    data = {**colours.config()["data"], "split": {"type": "random", "probabilities": [1, 0, 0]}}
    train(colours, tmp_path / "run", trainer=trainer, data=data)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        (
            "there are no validation rows: trainer.validation_metric, trainer.early_stop and restore_best have no "
            "effect, and the last weights are the result; write data.validation, or a data.split with a share for "
            "validation"
        )
    ]
    caplog.clear()
    with caplog.at_level("INFO", logger="partita"):
        train(colours, tmp_path / "plain", trainer={"max_steps": 1}, data=data)
    assert "there are no validation rows: the last weights are the result" in caplog.messages


def test_a_batch_size_of_training_that_also_sets_prediction_is_logged(
    colours: Any, tmp_path: Path, caplog: Any
) -> None:
    message = (
        "answers are generated for 8 rows at a time, as trainer.batch_size says; trainer.eval_batch_size: auto "
        "measures how many fit"
    )
    for number, eval_batch_size in enumerate([None, 8]):
        caplog.clear()
        trainer = {"max_steps": 1, "batch_size": 8, "eval_batch_size": eval_batch_size}
        model, _ = train(colours, tmp_path / str(number), trainer=trainer)
        with caplog.at_level("INFO", logger="partita"):
            model.predict(colours.rows(8), fresh=True)
        assert caplog.messages.count(message) == (eval_batch_size is None)
