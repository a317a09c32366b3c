"""Tests of the work after the last step of a fine-tuning."""

from pathlib import Path
from typing import Any

import pytest

from .conftest import Killed, run


def test_a_run_that_was_killed_after_its_last_step_is_only_finished(make_work: Any, tmp_path: Path) -> None:
    straight = run(make_work(run=make_work.recorder(tmp_path / "straight"), epochs=1))
    killed = make_work(run=make_work.recorder(tmp_path / "killed"), epochs=1)

    def die(folder: Path) -> None:
        raise Killed

    killed.lm.save = die
    with pytest.raises(Killed):
        run(killed)
    assert len(killed.run.log) == 6
    again = make_work(run=make_work.recorder(tmp_path / "killed"), epochs=1)
    result = run(again)
    assert (result.steps, result.resumed_from, again.run.log) == (6, 6, [])
    assert result.metrics == straight.metrics
    assert (tmp_path / "killed" / "model" / "model.safetensors").is_file()


def test_the_evaluated_weights_are_saved(make_work: Any, tmp_path: Path) -> None:
    """A schedule-free optimizer evaluates other weights than it trains."""
    options = {"epochs": 2, "optimizer": {"type": "schedule_free_adamw"}}
    work = make_work(run=make_work.recorder(tmp_path), **options)
    losses, evaluate = list[float](), work.evaluate

    def noted(split: str, **options: Any) -> dict[str, float]:
        metrics = evaluate(split, **options)
        losses.append(metrics["loss"])
        return metrics

    object.__setattr__(work, "evaluate", noted)
    run(work)
    *during, last = losses
    assert len(during) == 2
    assert last == min(during)
    saved = make_work.model()
    saved.load_checkpoint(tmp_path / "model")
    assert make_work(lm=saved, **options).evaluate("validation", generated=False)["loss"] == last
