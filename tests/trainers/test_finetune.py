"""Tests of the training loop: the loss falls, accumulation does not change steps, and killed runs resume exactly."""

import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from partita_schema.errors import ConfigError, DataError, DivergenceError, ResumeError, TrainingError
from partita_trainers.base import GlobalBatch, TrainResult
from partita_trainers.checkpoints.checkpoint import list_checkpoints
from partita_trainers.schedule import plan_schedule
from partita_trainers.steps.loss_history import LossHistory

from ..properties import ends
from .conftest import assert_resumes, comparable, run


def test_training_lowers_the_loss(make_work: Any) -> None:
    result = run(make_work(epochs=8))
    assert result.steps == 48
    work = make_work()
    before = work.evaluate("validation", generated=False)["loss"]
    assert result.metrics["validation"]["loss"] < before - 0.5


@pytest.mark.parametrize(
    "optimizer",
    ends(
        [
            "adamw",
            "adam",
            "adafactor",
            "sgd",
            "muon",
            "lion",
            "adamw_8bit",
            "paged_adamw",
            "paged_adamw_8bit",
            "lion_8bit",
            "schedule_free_adamw",
        ]
    ),
)
def test_every_optimizer_trains_and_resumes_bit_for_bit(make_work: Any, tmp_path: Path, optimizer: str) -> None:
    rate = {"sgd": 0.3, "lion": 0.003, "lion_8bit": 0.003}.get(optimizer, 0.02)
    options = {"optimizer": {"type": optimizer}, "learning_rate": rate, "epochs": 3, "steps_per_checkpoint": 4}
    straight = make_work(run=make_work.recorder(tmp_path / "straight"), **options)
    before = straight.evaluate("validation", generated=False)["loss"]
    result = run(straight)
    assert result.metrics["validation"]["loss"] < before

    assert_resumes(make_work, tmp_path / "killed", straight, killed=11, at=8, **options)


def test_any_accumulation_gives_the_same_step(make_work: Any, tmp_path: Path) -> None:
    losses = {}
    for micro in (1, 2, 4, 8):
        work = make_work(
            run=make_work.recorder(tmp_path / str(micro)),
            lm=make_work.model(dropout=0.0),
            batches=make_work.batches(micro=micro),
            epochs=1,
        )
        run(work)
        losses[micro] = [record["loss"] for record in work.run.log]
    for micro in (2, 4, 8):
        assert losses[micro] == pytest.approx(losses[1], abs=2e-6)


def test_a_step_divides_by_its_loss_tokens_not_by_its_batches(make_work: Any) -> None:
    lm = make_work.model(dropout=0.0)
    work = make_work(lm=lm, epochs=1, max_steps=1)
    step = next(make_work.batches().steps())
    total, count = 0.0, 0
    for batch in step.micro_batches:
        logits = lm.module(batch.input_ids_BT).detach()
        for row in range(batch.rows):
            for place in range(1, batch.input_ids_BT.shape[1]):
                label = int(batch.labels_BT[row, place])
                if label != -100:
                    total -= float(torch.log_softmax(logits[row, place - 1], 0)[label])
                    count += 1
    run(work)
    assert work.run.log[0]["loss_tokens"] == count
    assert work.run.log[0]["loss"] == pytest.approx(total / count, rel=1e-5)


def test_a_nan_loss_stops_with_step_and_rows_and_unchanged_weights(make_work: Any) -> None:
    work = make_work(epochs=1)
    original = work.lm.loss
    calls = []

    def broken(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        calls.append(batch)
        total = original(module, batch)
        return total * float("nan") if len(calls) == 6 else total

    work.lm.loss = broken
    with pytest.raises(TrainingError, match=r"step 3: the loss is nan on rows row:\d+, row:\d+") as error:
        run(work)
    assert calls[5].keys[0] in str(error.value)
    assert re.search(
        r"\. The loss was [\d.]+ one step earlier and had not risen, so a single step was too large: lower "
        r"trainer\.learning_rate, now [\d.]+, or lower trainer\.gradient_clipping\.$",
        str(error.value),
    )
    assert len(work.run.log) == 2
    assert all(torch.isfinite(parameter).all() for parameter in work.lm.module.parameters())


def test_a_rising_loss_is_reported_as_the_cause(make_work: Any) -> None:
    work = make_work(epochs=1, steps_per_checkpoint=1, learning_rate=0.001)
    original, calls = work.lm.loss, []
    factors = (1.0, 0.5, 100.0, float("inf"))

    def rising(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        calls.append(batch)
        return original(module, batch) * factors[(len(calls) - 1) // 2]  # two batches per step

    work.lm.loss = rising
    with pytest.raises(DivergenceError) as caught:
        run(work)
    assert re.search(
        r"^step 4: the loss is inf on rows .*\. The loss rose [12]\d\d-fold since step 2 \([\d.]+ to [\d.]+\): "
        r"lower trainer\.learning_rate, now 0\.001\. The last checkpoint is not affected\.$",
        str(caught.value),
    )


@pytest.mark.parametrize("in_16_bits", [False, True])
def test_float32_is_advised_only_if_16_bits_may_be_the_cause(in_16_bits: bool) -> None:
    history = LossHistory()
    advice = [history.advice(learning_rate=10.0, in_16_bits=in_16_bits)]
    for step, loss in enumerate((2.0, 1.5, 90.0), start=1):
        history.add(step, loss)
        advice.append(history.advice(learning_rate=10.0, in_16_bits=in_16_bits))
    assert ["float32" in text for text in advice] == [in_16_bits, in_16_bits, in_16_bits, False]


def test_an_evaluation_is_one_line_with_both_losses(make_work: Any, caplog: pytest.LogCaptureFixture) -> None:
    values = iter([2.0, 1.0, 3.0, 3.0])
    work = make_work(
        epochs=2, steps_per_evaluation=2, max_steps=6, evaluate=lambda *_, **options: {"loss": next(values)}
    )
    with caplog.at_level("INFO", logger="partita_trainers"):
        run(work)
    losses = [record["loss"] for record in work.run.log]
    means = [f"{(one + other) / 2:.4g}" for one, other in zip(losses[::2], losses[1::2], strict=True)]
    assert [text for text in caplog.messages if "validation loss" in text] == [
        f"step 2/6: loss {means[0]}, validation loss 2 (new best)",
        f"step 4/6: loss {means[1]}, validation loss 1 (new best)",
        f"step 6/6: loss {means[2]}, validation loss 3 (best 1 at step 4)",
    ]


def test_a_result_is_printed_as_a_table_of_metrics() -> None:
    metrics = {"validation": {"loss": 0.12346, "a.accuracy": 1.0}, "test": {"loss": 2.0}}
    result = TrainResult(run=Path("runs/x"), metrics=metrics, steps=3, stopped_early=True)
    assert str(result).splitlines() == [
        "3 steps, stopped early; the run is in runs/x",
        "            validation        test",
        "loss            0.1235           2",
        "a.accuracy           1            ",
    ]
    assert str(TrainResult(run=Path("x"), metrics={}, steps=1)) == "1 step; the run is in x"


def test_training_stops_when_patience_ends_and_the_best_weights_are_restored(make_work: Any) -> None:
    values = iter([3.0, 1.0, 2.0, 2.5, 9.0, 9.0])
    weights = []

    def evaluate(
        split: str, *, generated: bool = True, max_rows: int | None = None, step: int | None = None
    ) -> dict[str, float]:
        weights.append([p.detach().clone() for p in work.lm.module.parameters()])
        return {"loss": next(values)}

    work = make_work(evaluate=evaluate, epochs=20, early_stop=2, keep_checkpoints=1)
    result = run(work)
    assert result.stopped_early
    assert result.steps == 24
    assert work.run.noted["best_step"] == 12
    assert list_checkpoints(work.run.checkpoints) == [12, 24]
    for mine, best in zip(work.lm.module.parameters(), weights[1], strict=True):
        assert torch.equal(mine, best)


def test_a_run_that_stopped_early_is_continued_only_for_more_steps(
    make_work: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def evaluate(
        split: str, *, generated: bool = True, max_rows: int | None = None, step: int | None = None
    ) -> dict[str, float]:
        calls.append(split)
        return {"loss": float(len(calls))}

    first = make_work(evaluate=evaluate, epochs=20, early_stop=2)
    run(first)
    again = make_work(evaluate=evaluate, epochs=20, early_stop=2)
    with caplog.at_level("INFO"):
        assert run(again).steps == first.run.log[-1]["step"]
    assert again.run.log == []
    assert f"stopping after step {first.run.log[-1]['step']} of 120: no better loss in 2 evaluations" in caplog.text
    onward = run(make_work(evaluate=evaluate, epochs=21, early_stop=2))
    assert onward.steps > first.run.log[-1]["step"], "more epochs are asked for"


def test_an_unknown_metric_is_reported_with_the_known_ones(make_work: Any) -> None:
    work = make_work(validation_metric="rouge_1", evaluate=lambda *_, **options: {"loss": 1.0, "a.rouge_2": 0.5})
    with pytest.raises(
        ConfigError, match=r"trainer.validation_metric: no metric is named a.rouge_1; did you mean a.rouge_2\?"
    ):
        run(work)


def test_raised_patience_lets_a_run_that_stopped_early_continue(make_work: Any) -> None:
    worse = iter(range(100))

    def evaluate(
        split: str, *, generated: bool = True, max_rows: int | None = None, step: int | None = None
    ) -> dict[str, float]:
        return {"loss": float(next(worse))}

    stopped = run(make_work(evaluate=evaluate, epochs=8, early_stop=2))
    assert (stopped.stopped_early, stopped.steps) == (True, 18)
    onward = run(make_work(evaluate=evaluate, epochs=8, early_stop=4))
    assert (onward.stopped_early, onward.steps) == (True, 30)


def test_an_error_other_than_out_of_memory_is_raised(make_work: Any) -> None:
    work = make_work(epochs=1)

    def loss(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    work.lm.loss = loss
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(work)


def test_gradients_that_are_not_finite_stop_training_before_the_update(make_work: Any) -> None:
    work = make_work(epochs=1, gradient_clipping={"clipglobalnorm": None})
    before = [parameter.detach().clone() for parameter in work.lm.module.parameters()]
    work.lm.module.head.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(DivergenceError) as caught:
        run(work)
    assert re.fullmatch(
        r"step 1: the norm of the gradients is (nan|inf)\. No weights were changed yet, so the learning rate is not "
        "the cause: check the weights of base_model and the rows of this step[.]",
        str(caught.value),
    )
    assert all(torch.equal(one, other) for one, other in zip(before, work.lm.module.parameters(), strict=True))


def test_schedule_free_training_ends_with_the_evaluated_weights(make_work: Any) -> None:
    work = make_work(epochs=2, optimizer={"type": "schedule_free_adamw"})
    result = run(work)
    assert work.evaluate("validation", generated=False) == result.metrics["validation"]


def test_half_precision_on_a_cpu_is_refused_with_alternatives(make_work: Any) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.mixed_precision: fp16 needs a GPU; on a CPU write bf16 or no"):
        run(make_work(mixed_precision="fp16"))


def test_no_training_rows_is_an_error(make_work: Any) -> None:
    work = make_work()
    object.__setattr__(work, "batches", None)
    with pytest.raises(DataError, match=r"there are no training rows; write data\.source"):
        run(work)


def test_a_run_with_more_steps_than_configured_is_refused(make_work: Any) -> None:
    run(make_work(epochs=2))
    with pytest.raises(ResumeError, match="the run is at step 12, but the configuration ends at step 6"):
        run(make_work(epochs=1))


def test_a_longer_run_continues(make_work: Any) -> None:
    run(make_work(epochs=1))
    longer = make_work(epochs=2)
    assert run(longer).resumed_from == 6
    assert [record["step"] for record in longer.run.log] == [7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("rate", [0.02, "auto"])
def test_steps_are_closed_after_the_last_one(make_work: Any, rate: Any) -> None:
    work, asked = make_work(epochs=1, learning_rate=rate), list[Any]()
    plain = work.batches.steps

    def kept() -> Iterator[GlobalBatch]:
        asked.append(plain())  # keep a reference, so that the generator is not closed by garbage collection
        return asked[-1]

    work.batches.steps = kept
    run(work)

    assert len(asked) == (2 if rate == "auto" else 1)
    assert [steps.gi_frame for steps in asked] == [None] * len(asked)


def test_ctrl_c_stops_after_the_current_step_and_saves_its_state(make_work: Any, tmp_path: Path) -> None:
    straight = make_work(run=make_work.recorder(tmp_path / "straight"), epochs=2)
    run(straight)
    stopped = make_work(run=make_work.recorder(tmp_path / "stopped"), epochs=2)
    loss = stopped.lm.loss
    calls = []

    def interrupted(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        calls.append(batch)
        if len(calls) == 9:
            signal.raise_signal(signal.SIGINT)
        return loss(module, batch)

    stopped.lm.loss = interrupted
    with pytest.raises(KeyboardInterrupt):
        run(stopped)
    assert list_checkpoints(stopped.run.checkpoints) == [5]
    again = make_work(run=make_work.recorder(tmp_path / "stopped"), epochs=2)
    assert run(again).resumed_from == 5
    assert comparable(stopped.run.log + again.run.log) == comparable(straight.run.log)


def test_a_second_ctrl_c_stops_at_once(make_work: Any) -> None:
    work = make_work()
    loss = work.lm.loss

    def interrupted(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        signal.raise_signal(signal.SIGTERM)
        return loss(module, batch)

    work.lm.loss = interrupted
    with pytest.raises(KeyboardInterrupt):
        run(work)
    assert work.run.log == []


@pytest.mark.long
def test_the_range_test_leaves_no_trace_and_finds_a_working_learning_rate(make_work: Any, tmp_path: Path) -> None:
    actual = make_work(run=make_work.recorder(tmp_path / "auto"), learning_rate="auto", epochs=4)
    result = run(actual)
    rate = actual.run.noted["learning_rate"]
    given = make_work(run=make_work.recorder(tmp_path / "given"), learning_rate=rate, epochs=4)
    run(given)
    assert 1e-3 < rate < 0.5
    assert comparable(actual.run.log) == comparable(given.run.log)
    assert result.metrics["validation"]["loss"] < actual.run.log[0]["loss"] - 0.5
    search = actual.run.noted["learning_rate_search"]
    assert search["learning_rate"] == rate
    assert len(search["rates"]) == len(search["losses"]) > 20
    assert "learning_rate_search" not in given.run.noted


@pytest.mark.parametrize(
    ("trainer", "total", "evaluate", "checkpoint"),
    [
        ({"epochs": 3}, 30, 10, 10),
        ({"epochs": 0.5}, 5, 10, 10),
        ({"max_steps": 7}, 7, 10, 10),
        ({"max_steps": 70}, 70, 10, 10),
        ({"epochs": 3, "max_steps": 7}, 7, 10, 10),
        ({"evaluations_per_epoch": 2, "checkpoints_per_epoch": 0}, 30, 5, None),
        ({"steps_per_evaluation": 4, "steps_per_checkpoint": 3}, 30, 4, 3),
        ({"skip_all_evaluation": True}, 30, None, 10),
    ],
)
def test_steps_evaluations_and_checkpoints_are_planned_from_the_configuration(
    make_work: Any, trainer: dict[str, Any], total: int, evaluate: int | None, checkpoint: int | None
) -> None:
    config = make_work(**trainer).config.trainer
    schedule = plan_schedule(config, batches=make_work.batches(rows=80), splits=("training", "validation"))
    assert (schedule.total, schedule.evaluate_every, schedule.checkpoint_every) == (total, evaluate, checkpoint)


def test_a_warm_up_that_is_longer_than_the_run_is_a_warning(make_work: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = make_work(max_steps=7, learning_rate_scheduler={"warmup_steps": 1000}).config.trainer
    plan_schedule(config, batches=make_work.batches(rows=80), splits=("training",))
    [message] = caplog.messages
    assert message == (
        "trainer.learning_rate_scheduler.warmup_steps is 1,000 and the run has 7 steps: the warmup is shortened to the "
        "run"
    )


def test_evaluations_that_are_never_due_are_planned(make_work: Any) -> None:
    config = make_work(evaluations_per_epoch=1e-308).config.trainer
    schedule = plan_schedule(config, batches=make_work.batches(rows=80), splits=("training", "validation"))
    assert not schedule.evaluation_is_due(schedule.total - 1)
    assert schedule.evaluation_is_due(schedule.total)


class Endless:
    """Batches of unknown number."""

    steps_per_epoch = num_rows = None

    def total_steps(self, epochs: float) -> int:
        raise AssertionError("nobody knows")

    def load_data_position(self, data_position: Mapping[str, Any]) -> None:
        raise AssertionError("nothing is resumed here")

    def steps(self) -> Iterator[GlobalBatch]:
        raise AssertionError("nothing is trained here")


@pytest.mark.parametrize(
    ("trainer", "evaluate", "checkpoint"),
    [
        ({}, 12, 12),
        ({"checkpoints_per_epoch": 0}, 12, None),
        ({"steps_per_evaluation": 4, "steps_per_checkpoint": 3}, 4, 3),
        ({"skip_all_evaluation": True}, None, 12),
    ],
)
def test_data_of_unknown_length_gives_ten_checkpoints_per_run(
    make_work: Any, trainer: dict[str, Any], evaluate: int | None, checkpoint: int | None
) -> None:
    config = make_work(max_steps=120, **trainer).config.trainer
    schedule = plan_schedule(config, batches=Endless(), splits=("training", "validation"))
    assert (schedule.total, schedule.evaluate_every, schedule.checkpoint_every) == (120, evaluate, checkpoint)


def test_a_run_over_data_of_unknown_length_needs_a_number_of_steps(make_work: Any) -> None:
    message = "^the data's length is not known; write trainer.max_steps, the number of optimizer steps$"
    with pytest.raises(DataError, match=message):
        plan_schedule(make_work().config.trainer, batches=Endless(), splits=("training",))
