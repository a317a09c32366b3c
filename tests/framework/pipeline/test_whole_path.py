"""Tests of batch sizes from configuration to answers, on a device with a memory limit: found, used, cached, lowered.

The models are real; memory and time are computed by the rules in conftest.py.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita import Model
from partita.lm.slots import slots
from partita_schema.errors import OutOfMemory, PartitaError

from ...json_lines import write_json_lines
from ..conftest import Command

ZERO_SHOT = {"type": "none", "batch_size": "auto"}


def statuses(found: Any) -> set[str]:
    return {row["status"] for row in found}


@pytest.mark.parametrize("slots", [True, False], ids=["slots", "batches"])
def test_tuned_sizes_are_used_for_prediction_and_evaluation(
    device: Any, zero_shot: Any, asked: Any, slots: bool
) -> None:
    answer = device.answer if slots else device.batch_answer
    room = 7 * answer + answer // 2
    device.leave(room)
    model = zero_shot(generation={"slots": slots})
    sizes = model.tune(asked).by_purpose()
    assert sizes.keys() == {"generation", "evaluation"}
    result = sizes["generation"]
    assert (result.rows, result.max_fitting, result.best, result.origin) == (7, 7, 7, "tuned")
    assert (result.prompt_tokens, result.new_tokens, result.device) == (8, device.new_tokens, "cpu")
    assert result.budget_bytes == room
    assert [(probe.rows, probe.used_bytes, probe.verdict) for probe in result.probes] == [
        (rows, rows * answer, "fits") for rows in (1, 4, 7)
    ]
    assert sizes["evaluation"].max_fitting == room // device.loss
    device.passes.clear()
    predictions = model.predict(asked)
    assert statuses(predictions) == {"ok"}
    assert (predictions.stats.batch_size, predictions.stats.out_of_memory) == (7, 0)
    passes = device.work()
    assert {one.rows for one in passes} == {7}, "nothing is probed again, and no slot or row is ever empty"
    assert {one.slots for one in passes} == {7 if slots else 0}
    assert len(passes) == 4 * device.new_tokens
    assert max(one.used for one in passes) == result.probes[-1].used_bytes, "the job uses as much memory as its probe"
    model.evaluate(asked)
    passes = device.work()
    assert {one.rows for one in passes if one.held} == {7}
    assert max(one.rows for one in passes if not one.held) == sizes["evaluation"].rows


@pytest.mark.parametrize("most", [24, 21])
def test_the_probe_prefills_as_many_tokens_at_once_as_the_job(
    device: Any, zero_shot: Any, asked: Any, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    # Prompts of 8 tokens fill a pass of 24, and leave room in one of 21, which shorter prompts fill.
    monkeypatch.setitem(slots.PREFILL_TOKENS, "cpu", most)
    places, reading = (8 + device.new_tokens) * 1_000, most * 3_000
    device.leave(7 * places + reading + places // 2)
    model = zero_shot()
    result = model.tune(asked).by_purpose()["generation"]
    assert (result.rows, result.max_fitting) == (7, 7)
    assert {probe.rows: probe.used_bytes for probe in result.probes}[7] == 7 * places + reading
    device.passes.clear()
    assert model.predict(asked).stats.out_of_memory == 0
    passes = [one for one in device.passes if one.tokens > 1]
    assert max(one.rows for one in passes if one.tokens == 8) == most // 8
    assert 16 < max(one.rows * one.tokens for one in passes) <= most
    assert max(one.used for one in passes) <= 7 * places + reading


@pytest.mark.long
def test_a_batch_size_argument_overrides_the_tuned_size_for_one_call(device: Any, zero_shot: Any, asked: Any) -> None:
    device.leave(7 * device.answer + device.answer // 2)
    model = zero_shot()
    for wanted, expected in ((2, 2), (None, 7), (4, 4), (6, 6), (1, 1), (None, 7)):
        result = model.predict(asked, batch_size=wanted, fresh=True)
        passes = [one for one in device.work() if one.held == 8]
        assert max(one.rows for one in passes) == expected
        assert result.stats.batch_size == expected
        assert statuses(result) == {"ok"}
    model.evaluate(asked, batch_size=3)
    assert max(one.rows for one in device.work()) == 3


@pytest.mark.long
def test_a_batch_size_argument_that_is_too_large_is_lowered(device: Any, zero_shot: Any, asked: Any) -> None:
    device.leave(7 * device.answer + device.answer // 2)
    result = zero_shot().predict(asked, batch_size=28)
    assert statuses(result) == {"ok"}
    assert (result.stats.batch_size, result.stats.out_of_memory) == (7, 2)


def test_one_row_is_not_probed_and_no_rows_give_no_predictions(device: Any, zero_shot: Any, asked: Any) -> None:
    model = zero_shot()
    assert statuses(model.predict(asked[:1])) == {"ok"}
    assert not any(one.measured for one in device.passes)
    assert model.tune(asked[:1]).by_purpose()["generation"].origin == "default"
    assert not any(one.measured for one in device.passes)
    assert statuses(model.predict(asked)) == {"ok"}
    assert any(one.measured for one in device.passes)
    assert statuses(model.predict(asked[:1], fresh=True)) == {"ok"}
    assert statuses(model.predict([{"text": ""}, {"text": ""}])) == {"skipped"}
    device.passes.clear()
    assert model.generate("3 red balls")
    assert not any(one.measured for one in device.passes)


def test_rows_that_are_not_requested_do_not_affect_the_size(device: Any, zero_shot: Any, asked: Any) -> None:
    device.leave(7 * device.answer + device.answer // 2)
    rows = [*asked, {"text": ""}, {"text": "ball " * 100}]
    model = zero_shot()
    result = model.predict(rows)
    assert [row["status"] for row in result][-2:] == ["skipped", "error"]
    assert statuses(list(result)[:-2]) == {"ok"}
    assert result.stats.batch_size == 7
    assert model.tune(rows).by_purpose()["generation"].prompt_tokens == 8


def test_categories_are_probed_with_the_tokens_of_their_labels(device: Any, make: Any, asked: Any) -> None:
    output = [{"name": "colour", "type": "category", "decoder": {"labels": ["red", "blue", "green"]}}]
    settings = make(trainer=ZERO_SHOT, output_features=output)
    del settings["generation"]
    model = Model(settings, quiet=True)
    result = model.tune(asked).by_purpose()["generation"]
    assert result.new_tokens == model._backend.pipeline().max_new_tokens < 15
    device.passes.clear()
    assert statuses(model.predict(asked)) == {"ok"}
    assert max(one.rows for one in device.work()) == result.rows


@pytest.mark.parametrize("slots", [True, False], ids=["slots", "batches"])
@pytest.mark.long
def test_sizes_are_lowered_if_memory_shrinks_during_prediction(
    device: Any, zero_shot: Any, asked: Any, slots: bool
) -> None:
    straight = zero_shot(generation={"slots": slots})
    expected = [row["colour_raw"] for row in straight.predict(asked)]
    answer = device.answer if slots else device.batch_answer
    device.fall(3 * answer + answer // 2, when=lambda one: one.held > 30 and one.rows > 4)
    model = zero_shot(generation={"slots": slots})
    result = model.predict(asked, fresh=True)
    assert [row["colour_raw"] for row in result] == expected
    assert statuses(result) == {"ok"}
    assert result.stats.out_of_memory > 0
    assert result.stats.batch_size <= 3
    device.passes.clear()
    again = model.predict(asked, fresh=True)
    assert again.stats.out_of_memory == 0, "a size that was lowered once stays lowered"
    assert {bool(one.slots) for one in device.passes} == {slots}


SAMPLED = {"do_sample": True, "temperature": 1.5}


def texts(found: Any) -> list[str]:
    return [row["colour_raw"] for row in found]


@pytest.mark.long
def test_sampled_answers_in_slots_resume_with_any_number_of_slots(
    device: Any, zero_shot: Any, asked: Any, tmp_path: Path
) -> None:
    def model(most: int) -> Any:
        return zero_shot(generation=SAMPLED, max_batch_size=most)

    straight = texts(model(7).predict(asked, tmp_path / "straight.jsonl"))
    assert len(set(straight)) > 20
    count = 0

    def stop(coming: Any) -> None:
        nonlocal count
        count += not coming.measured and coming.slots == 7 and coming.tokens == 1
        if count == 60:
            raise KeyboardInterrupt

    device.before_pass = stop
    with pytest.raises(KeyboardInterrupt):
        model(7).predict(asked, tmp_path / "stopped.jsonl")
    device.before_pass = lambda coming: None
    device.work()
    result = model(4).predict(asked, tmp_path / "stopped.jsonl")
    assert 7 <= result.stats.resumed < len(asked)
    assert max(one.slots for one in device.work()) == result.stats.batch_size == 4
    assert texts(result) == straight
    assert texts(model(3).predict(asked, tmp_path / "other.jsonl")) == straight
    device.fall(2 * device.answer, when=lambda one: one.held > 30)
    cut = model(7).predict(asked, tmp_path / "cut.jsonl")
    assert cut.stats.out_of_memory > 0
    assert texts(cut) == straight


@pytest.mark.long
def test_sampled_answers_in_batches_resume_with_any_batch_size(
    device: Any, zero_shot: Any, asked: Any, tmp_path: Path
) -> None:
    def model(most: int) -> Any:
        return zero_shot(generation={**SAMPLED, "slots": False}, max_batch_size=most)

    straight = texts(model(7).predict(asked, tmp_path / "straight.jsonl"))
    count = 0

    def stop(coming: Any) -> None:
        nonlocal count
        count += not coming.measured and coming.rows == 7 and coming.held == coming.tokens
        if count == 3:
            raise KeyboardInterrupt

    device.before_pass = stop
    with pytest.raises(KeyboardInterrupt):
        model(7).predict(asked, tmp_path / "stopped.jsonl")
    device.before_pass = lambda coming: None
    shutil.rmtree(tmp_path / "cache")
    result = model(4).predict(asked, tmp_path / "stopped.jsonl")
    assert result.stats.resumed == 14
    assert texts(result) == straight
    assert texts(model(4).predict(asked, tmp_path / "other.jsonl")) == straight


@pytest.mark.parametrize(
    ("change", "origin"),
    [
        ({}, "cached"),
        ({"generation": {"temperature": 0.5, "do_sample": True}}, "tuned"),
        ({"generation": {"num_beams": 2}}, "tuned"),
        ({"generation": {"slots": False}}, "tuned"),
        ({"generation": {"logprobs": True}}, "tuned"),
        ({"generation": {"max_new_tokens": 39}}, "tuned"),
        ({"prompt": {"template": "Well, once more: what do you see here? {text}"}}, "tuned"),
        ({"base_model": {"hidden_size": 64}}, "tuned"),
        ({"trainer": {"memory_budget": 10**10}}, "tuned"),
    ],
)
def test_a_change_of_an_input_of_the_search_triggers_a_new_search(
    device: Any, make: Any, asked: Any, change: dict[str, Any], origin: str
) -> None:
    settings = make(trainer=ZERO_SHOT)
    Model(settings, quiet=True).predict(asked)
    for section, values in change.items():
        settings[section] = {**settings.get(section, {}), **values}
    assert Model(settings, quiet=True).tune(asked).by_purpose()["generation"].origin == origin


def test_less_memory_than_a_cached_size_needs_triggers_a_new_search(device: Any, zero_shot: Any, asked: Any) -> None:
    for fits, origin in ((7, "tuned"), (7, "cached"), (4, "tuned"), (4, "cached"), (7, "tuned")):
        device.leave(fits * device.answer + device.answer // 2)
        result = zero_shot().tune(asked).by_purpose()["generation"]
        assert (result.rows, result.origin) == (fits, origin)


# Not enough memory for one row


def test_a_row_that_does_not_fit_ends_the_command_with_its_memory_use(
    device: Any,
    make: Any,
    asked: Any,
    tmp_path: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    allowed = device.weights + device.answer // 2
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(make(trainer={**ZERO_SHOT, "memory_budget": allowed})))
    write_json_lines(tmp_path / "asked.jsonl", asked)
    before = sorted(tmp_path.rglob("*"))
    for words in (("predict", "zero.yaml", "--dataset", "asked.jsonl", "--output", "out.csv"), ("tune", "zero.yaml")):
        assert command(*words) == 1
        stderr = capsys.readouterr().err
        row = f"one of 8 tokens and {device.new_tokens} new tokens"
        assert f"error: not even one row fits for generation: {row} takes 0.1 MB" in stderr
        assert "0.0 MB too much; 0.0 MB may be taken (" in stderr
        assert (
            "Write a smaller preprocessing.global_max_sequence_length or generation.max_new_tokens, "
            "quantization: {bits: 4}, or a smaller base_model"
        ) in stderr
        assert "Traceback" not in stderr
    assert sorted(tmp_path.rglob("*")) == before, "no answers, no journal, no cached size"


@pytest.mark.parametrize("left", [71_000, 1_000, 0], ids=["one row", "warm-up", "model"])
def test_a_full_device_is_reported_like_one_that_is_too_small(
    device: Any, zero_shot: Any, asked: Any, tmp_path: Path, left: int
) -> None:
    device.leave(left)
    with pytest.raises(OutOfMemory, match=r"not even one row fits for generation: .* takes more than the device has;"):
        zero_shot().predict(asked, tmp_path / "out.csv")
    assert list(tmp_path.iterdir()) == []


# With the real memory of this machine


@pytest.mark.long
def test_sizes_are_measured_printed_and_plotted_with_and_without_training(
    make: Any,
    rows: Any,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_json_lines(tmp_path / "rows.jsonl", rows)
    data = {"source": "rows.jsonl"}
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(make(trainer=ZERO_SHOT, data=data)))
    (tmp_path / "train.yaml").write_text(
        yaml.safe_dump(make(trainer={"batch_size": "auto", "effective_batch_size": 24}, data=data))
    )
    before = sorted(tmp_path.iterdir())
    assert command("tune", "zero.yaml", "--plot", "zero.html", "-q") == 0
    shown = capsys.readouterr().out
    assert "generation: " in shown
    assert "evaluation: " in shown
    assert "tuned in " in shown
    assert shown.endswith("\ndrawn in zero.html\n")
    assert (tmp_path / "zero.html").read_text(encoding="utf8").startswith("<!DOCTYPE")
    assert command("tune", "train.yaml", "--json", "-q") == 0
    records = json.loads(capsys.readouterr().out)
    assert records.keys() == {"training", "evaluation", "generation"}
    for record in records.values():
        assert record["probes"][0]["rows"] == 1
        assert 24 % records["training"]["rows"] == 0
        assert 1 <= record["rows"] <= record["max_fitting"]
        assert record["budget_bytes"] > 0
        assert all(probe["verdict"] == "fits" and probe["prefill_seconds"] > 0 for probe in record["probes"])
        if sys.platform == "linux":
            assert all("taken_bytes" in probe for probe in record["probes"])
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "cache", tmp_path / "zero.html"])
    with pytest.raises(PartitaError, match="nothing has been trained with this file yet"):
        Model("train.yaml", quiet=True).predict(rows[:2])
