from pathlib import Path

import pytest

from partita.runs.tracking import Trackers, flat
from partita_schema.errors import ConfigError


def test_settings_are_flattened_to_numbers_and_texts_by_path() -> None:
    settings = {"a": {"b": 1, "c": {"d": 0.5, "e": None}}, "f": [1, 2], "g": True, "h": "text"}
    assert flat(settings) == {"a.b": 1, "a.c.d": 0.5, "f": "[1, 2]", "g": True, "h": "text"}


def test_without_trackers_nothing_is_started_or_written(tmp_path: Path) -> None:
    trackers = Trackers((), folder=tmp_path, settings={})
    trackers.log({"loss": 1.0}, step=1)
    trackers.finish()
    assert trackers.started is None
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_gets_only_numbers_with_their_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    run.mkdir()
    trackers = Trackers(("tensorboard",), folder=run, settings={"trainer": {"epochs": 2}, "seed": None})
    trackers.log({"train/loss": 2.0, "train/batch_hash": "abc"}, step=1)
    trackers.log({"train/loss": 1.5}, step=2)
    trackers.finish()
    events = next(run.rglob("events.out.*"))
    accumulator = EventAccumulator(str(events.parent))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("train/loss")] == [(1, 2.0), (2, 1.5)]
    assert accumulator.Tags()["scalars"] == ["train/loss"]


def test_a_tracker_that_is_not_installed_is_reported_with_its_key_and_package(tmp_path: Path) -> None:
    trackers = Trackers(("tensorboard", "mlflow"), folder=tmp_path, settings={})
    with pytest.raises(ConfigError) as caught:
        trackers.log({"loss": 1.0}, step=1)
    assert str(caught.value) == "tracking[1]: mlflow is not installed; pip install mlflow, or remove it from tracking"
