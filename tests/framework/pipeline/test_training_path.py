"""Tests of batch sizes of training runs on a device with a memory limit: found before the first step, cached, lowered.

The models are real; memory and time are computed by the rules in conftest.py.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from partita import Model
from partita_schema.errors import OutOfMemory
from partita_trainers.base import ProbeContext
from partita_trainers.finetune import Finetune

from ...properties import ends, first


@pytest.mark.long
def test_a_run_finds_its_sizes_with_the_optimizer_in_memory_and_reports_them(
    device: Any, train: Any, caplog: pytest.LogCaptureFixture
) -> None:
    room = 9 * device.step + device.step // 2
    device.leave(room, training=True)
    with caplog.at_level(logging.INFO):
        run = train("run")
    assert not device.optimizers, "the optimizers of probe and run are freed"
    noted = run.manifest
    sizes = noted["batch_sizes"]
    assert sizes.keys() == {"training", "evaluation", "generation"}
    for size in sizes.values():
        assert {
            "rows",
            "max_fitting",
            "best",
            "probes",
            "throughputs",
            "origin",
            "prompt_tokens",
            "device",
            "seconds",
        } <= size.keys()
        assert (size["origin"], size["device"], size["budget_bytes"]) == ("tuned", "cpu", room)
        assert all(probe["verdict"] == "fits" and probe["rows_per_second"] > 0 for probe in size["probes"])
        assert len(size["probes"]) <= 4
    training, evaluation, generation = (sizes[name] for name in ("training", "evaluation", "generation"))
    assert (training["rows"], training["max_fitting"], training["prompt_tokens"]) == (8, 9, 24)
    assert (evaluation["max_fitting"], evaluation["prompt_tokens"]) == (24, 24)
    assert (generation["max_fitting"], generation["prompt_tokens"], generation["new_tokens"]) == (
        24,
        8,
        device.new_tokens,
    )
    assert [line["rows"] for line in run.log] == [24] * 8
    passes = device.work()
    assert max(one.rows for one in passes if one.learning) == 8
    assert noted["starts"] == 1
    assert "out_of_memory" not in noted
    assert "batch size for training: 8 rows of at most 24 tokens on " in caplog.text
    assert "batch size for evaluation: " in caplog.text
    assert f"of at most 8 tokens and {device.new_tokens} new tokens" in caplog.text


def test_a_finished_run_searches_the_size_for_predictions(device: Any, train: Any, asked: Any, tmp_path: Path) -> None:
    run = train("run", max_steps=2, evaluate_generated=False)
    shutil.rmtree(tmp_path / "cache")
    device.leave(7 * device.answer + device.answer // 2)
    device.passes.clear()
    model = Model.load(run.folder, quiet=True)
    assert model.predict(asked).stats.batch_size == 7
    assert any(one.measured for one in device.passes)
    assert not any(one.learning for one in device.passes)


@pytest.mark.long
def test_a_second_run_with_another_rate_probes_the_sizes_of_the_first_once(
    device: Any, make: Any, train: Any, rows: Any
) -> None:
    device.leave(9 * device.step + device.step // 2, training=True)
    first = train("first", max_steps=1).sizes
    second = train("second", max_steps=2, learning_rate=0.1, early_stop=1).sizes
    for name, size in second.items():
        assert (size["origin"], len(size["probes"])) == ("cached", 1)
        assert size["rows"] == first[name]["rows"] == size["probes"][0]["rows"]
        assert size["max_fitting"] == first[name]["max_fitting"]
    trainer = {"batch_size": "auto", "effective_batch_size": 24, "epochs": 2, "steps_per_checkpoint": 2, "max_steps": 1}
    model = Model(make(trainer=trainer), quiet=True)
    assert {size.origin for size in model.tune(rows).by_purpose().values()} == {"cached"}
    again = model.tune(rows, fresh=True).by_purpose()
    assert {size.origin for size in again.values()} == {"tuned"}
    assert {name: size.rows for name, size in again.items()} == {name: size["rows"] for name, size in first.items()}


@pytest.mark.parametrize("fits", [3, 30])
@pytest.mark.long
def test_a_resumed_run_keeps_its_sizes(device: Any, train: Any, run_in: Any, tmp_path: Path, fits: int) -> None:
    device.leave(9 * device.step + device.step // 2, training=True)
    straight, stopped = train("straight"), run_in("stopped")

    def stop(coming: Any) -> None:
        if coming.learning and len(stopped.log) == 5:
            raise KeyboardInterrupt

    device.before_pass = stop
    with pytest.raises(KeyboardInterrupt):
        train("stopped")
    device.before_pass = lambda coming: None
    begun = stopped.manifest
    assert begun["status"] == "interrupted"
    shutil.rmtree(tmp_path / "cache")
    device.leave(fits * device.step + device.step // 2, training=True)
    device.passes.clear()
    train("stopped")
    assert not any(one.measured for one in device.passes)
    ended = stopped.manifest
    kept = {name: size["rows"] for name, size in begun["batch_sizes"].items()}
    assert {name: size["rows"] for name, size in ended["batch_sizes"].items()} == kept
    assert ended["batch_sizes"]["training"].get("out_of_memory", False) is (fits == 3)
    assert (ended["starts"], ended["status"]) == (2, "done")
    assert [line["batch_hash"] for line in stopped.log] == [line["batch_hash"] for line in straight.log]
    assert ("out_of_memory" in ended) == (fits == 3)
    if fits == 30:
        assert stopped.log == straight.log


@pytest.mark.long
def test_sizes_are_lowered_if_memory_shrinks_during_training(device: Any, train: Any, run_in: Any) -> None:
    device.leave(9 * device.step + device.step // 2, training=True)
    straight, cut = train("straight"), run_in("cut")
    device.fall(3 * device.step, training=True, when=lambda one: one.learning and len(cut.log) == 3)
    train("cut")
    noted = cut.manifest
    assert (noted["starts"], noted["status"], noted["batch_sizes"]["training"]["rows"]) == (1, "done", 8)
    assert [(event["step"], event["rows"], event["now"]) for event in noted["out_of_memory"]] == [(4, 8, 4), (4, 4, 2)]
    assert noted["batch_sizes"]["training"]["out_of_memory"] is True, "the plan keeps its size"
    train("next")
    later = run_in("next").manifest["batch_sizes"]["training"]
    assert (later["rows"], later["origin"]) == (2, "cached"), "a later run starts with the size that fit"
    one, other = cut.log, straight.log
    assert [line["batch_hash"] for line in one] == [line["batch_hash"] for line in other]
    assert [line["rows"] for line in one] == [24] * 8
    assert one[-1]["loss"] == pytest.approx(other[-1]["loss"], rel=1e-3)


@pytest.mark.long
def test_sizes_are_lowered_if_memory_shrinks_during_an_evaluation_of_a_run(
    device: Any, train: Any, run_in: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # One row is trained at a time, and none after the first evaluation.
    sizes = {"batch_size": 1, "eval_batch_size": "auto", "effective_batch_size": 24}
    trainer = {**sizes, "epochs": 1, "evaluate_generated": True}
    straight, cut = train("straight", **trainer), run_in("cut")
    device.fall(
        4 * device.loss,
        training=True,
        when=lambda one: not one.learning and cut.log,
    )
    train("cut", **trainer)
    noted, before = cut.manifest, straight.manifest
    assert before["batch_sizes"]["evaluation"]["rows"] > 4
    assert (noted["starts"], noted["status"]) == (1, "done")
    assert noted["batch_sizes"]["training"] == {"rows": 1, "origin": "file", "device": "cpu"}
    for name in ("evaluation", "generation"):
        assert noted["batch_sizes"][name]["out_of_memory"] is True
        assert noted["batch_sizes"][name]["rows"] < before["batch_sizes"][name]["rows"]
    for split, metrics in before["metrics"].items():
        result = noted["metrics"][split]
        assert result.pop("loss") == pytest.approx(metrics.pop("loss"), rel=1e-5)
        assert result == metrics
    assert cut.log == straight.log
    assert "out of memory with " in caplog.text


@pytest.mark.long
def test_sizes_are_lowered_if_memory_shrinks_while_a_finished_run_is_evaluated(device: Any, train: Any) -> None:
    run = train("run", max_steps=1, evaluate_generated=False)
    before = run.sizes
    model = Model.load(run.folder, quiet=True)
    model.tune()
    device.fall(4 * device.loss, when=lambda one: one.rows > 4)
    scores = model.evaluate()
    assert scores["colour"]["n"] == 64
    noted = run.manifest
    assert noted["status"] == "done"
    assert noted["batch_sizes"]["training"] == before["training"]
    for name in ("evaluation", "generation"):
        assert noted["batch_sizes"][name]["out_of_memory"] is True
        assert noted["batch_sizes"][name]["rows"] == 4


@pytest.mark.long
def test_training_with_auto_equals_training_with_the_same_number(device: Any, train: Any) -> None:
    device.leave(9 * device.step + device.step // 2, training=True)
    auto, number = train("auto"), train("number", batch_size=8)
    one, other = (load_file(run.folder / "model" / "model.safetensors") for run in (auto, number))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert auto.log == number.log


@pytest.mark.parametrize(("steps", "accumulates"), [({}, True), ({"effective_batch_size": 1}, False)])
def test_training_is_probed_with_gradients_if_its_steps_have_several_batches(
    make: Any, rows: Any, monkeypatch: pytest.MonkeyPatch, device: Any, steps: dict[str, Any], accumulates: bool
) -> None:
    contexts: list[Any] = []
    probe = Finetune.probe

    def remember(self: Finetune, context: ProbeContext) -> Any:
        contexts.append(context)
        return probe(self, context)

    monkeypatch.setattr(Finetune, "probe", remember)
    model = Model(make(trainer={"batch_size": "auto", **steps}), quiet=True)
    size = model.tune(rows).training
    assert size is not None
    (context,) = contexts
    assert context.accumulates is accumulates
    gradients = sum(parameter.nbytes for parameter in context.lm.module.parameters()) if accumulates else 0
    activations = context.lm.estimated_bytes(
        "training", 2, tokens=context.max_row_tokens, new_tokens=0, loss_tokens=context.max_loss_tokens
    )
    assert context.estimated_bytes(2) == activations + gradients


# Limits in the configuration


@pytest.mark.parametrize("most", first([5, 1, 3]))
def test_no_size_exceeds_the_limits_of_the_configuration(device: Any, train: Any, most: int) -> None:
    sizes = train("run", max_batch_size=most, max_steps=1).sizes
    assert {name: size["rows"] for name, size in sizes.items()} == {
        "training": {1: 1, 3: 3, 5: 4}[most],
        "evaluation": most,
        "generation": most,
    }
    assert max(one.rows for one in device.passes) <= most


def test_a_memory_budget_covers_model_optimizer_and_batch(device: Any, train: Any) -> None:
    allowed = device.weights + device.state + 5 * device.step
    sizes = train("run", memory_budget=allowed, max_steps=1).sizes
    assert {size["budget_bytes"] for size in sizes.values()} == {5 * device.step}
    assert (sizes["training"]["max_fitting"], sizes["training"]["rows"]) == (5, 4)
    assert max(one.used for one in device.work()) <= 5 * device.step


@pytest.mark.long
def test_an_effective_batch_size_with_few_divisors_is_reported(
    device: Any, train: Any, caplog: pytest.LogCaptureFixture
) -> None:
    device.leave(9 * device.step + device.step // 2, training=True)
    assert train("run", effective_batch_size=17, max_steps=1).sizes["training"]["rows"] == 1
    assert (
        "effective_batch_size 17 can be cut into batches of 1 at most, and 9 would fit; "
        "a number with more divisors would be faster"
    ) in caplog.text
    device.leave(17 * device.step + device.step // 2, training=True)
    caplog.clear()
    more = train("more", effective_batch_size=17, max_steps=1)
    assert more.sizes["training"]["rows"] == 17
    assert "divisors" not in caplog.text
    assert [line["rows"] for line in more.log] == [17]


@pytest.mark.parametrize(
    "left", ends([4_479_000, 4_001_000, 3_999_000, 1_000]), ids=["one row", "warm-up", "optimizer", "model"]
)
@pytest.mark.long
def test_a_run_without_memory_for_one_step_fails_before_it_starts(
    device: Any, train: Any, tmp_path: Path, left: int
) -> None:
    device.leave(left)
    with pytest.raises(
        OutOfMemory,
        match=r"not even one row fits for training: one of 24 tokens takes .*Write a smaller "
        r"preprocessing\.global_max_sequence_length, trainer\.gradient_checkpointing: true, ",
    ):
        train("run")
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "run").exists()
    assert not device.optimizers
    # With more memory the same command continues.
    device.ceiling = 10**12
    assert train("run").manifest["status"] == "done"


def test_a_run_without_memory_for_its_optimizer_fails_also_with_a_fixed_batch_size(device: Any, train: Any) -> None:
    device.leave(device.state - 1_000)
    with pytest.raises(OutOfMemory, match="not even one row fits for training"):
        train("run", batch_size=1, eval_batch_size="auto")
