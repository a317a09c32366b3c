"""Tests of cross-validation: the means of the folds, their intervals, and what is trained again."""

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from partita import Model
from partita.backends.folds import mean_interval, summary_of, t_quantile
from partita_schema.errors import ConfigError, PartitaError, ResumeError
from partita_trainers.base import Metrics, TrainResult

FOLDS = """
base_model: {type: scratch, size: nano, tokenizer: char}
input_features: [{name: text}]
output_features: [{name: label, type: category, head: linear}]
data: {source: rows.jsonl, split: {type: kfold, folds: 2}}
trainer: {type: finetune, batch_size: 8, epochs: 1}
"""


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 99])
def test_quantiles_are_those_of_scipy(freedom: int) -> None:
    for share in (0.6, 0.95, 0.975, 0.995):
        assert t_quantile(share, freedom) == pytest.approx(stats.t.ppf(share, freedom), rel=1e-9)


def test_the_interval_is_that_of_a_t_test() -> None:
    values = np.array([0.81, 0.84, 0.79, 0.88, 0.8])
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert mean_interval(values) == pytest.approx((expected.low, expected.high))


def test_the_interval_of_an_infinite_mean_has_no_limits() -> None:
    assert mean_interval(np.array([1.0, math.inf])) == (-math.inf, math.inf)


def test_metrics_are_means_over_the_folds_that_all_have(tmp_path: Path) -> None:
    folds = [{"validation": {"loss": 1.0, "n": 4.0}}, {"validation": {"loss": 2.0, "n": 4.0, "other": 1.0}}]
    result = summary_of([TrainResult(tmp_path, metrics, steps=3) for metrics in folds], tmp_path)
    assert result.metrics == {"validation": {"loss": 1.5, "n": 4.0}}
    assert result.intervals["validation"]["n"] == (4.0, 4.0)
    low, high = result.intervals["validation"]["loss"]
    assert low < 1.5 < high
    assert result.steps == 6
    assert result.folds == folds


@pytest.mark.long
def test_folds_are_runs_and_finished_ones_are_not_trained_again(colours: Any, tmp_path: Path) -> None:
    config = colours.config(
        data={"split": {"type": "kfold", "folds": 3, "column": "colour"}},
        preprocessing={"sample_size": 90},
        trainer={"epochs": 1, "evaluate_generated": False},
    )
    first = Model(config, quiet=True).train(run=tmp_path / "run")
    assert len(first.folds) == 3
    assert first.metrics["validation"]["loss"] == pytest.approx(
        sum(fold["validation"]["loss"] for fold in first.folds) / 3
    )
    assert "of 3 folds is" in (tmp_path / "run" / "report.html").read_text(encoding="utf8")
    written = json.loads((tmp_path / "run" / "folds.json").read_text())
    assert written["metrics"] == first.metrics
    alone = Model(config, overrides=["data.split.fold=2"], quiet=True).train(run=tmp_path / "second")
    assert alone.metrics == first.folds[1]
    started = [json.loads((tmp_path / "run" / f"fold-{n}" / "manifest.json").read_text())["starts"] for n in (1, 2, 3)]
    again = Model(config, quiet=True).train(run=tmp_path / "run")
    assert started == [1, 1, 1]
    assert again.metrics == first.metrics
    assert math.isfinite(again.intervals["validation"]["loss"][1])
    assert Model.load(tmp_path / "run" / "fold-3", quiet=True).config.split.fold == 3


def test_predictions_need_the_run_of_a_fold(colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = colours.config(data={"split": {"type": "kfold"}})
    with pytest.raises(PartitaError) as caught:
        Model(config, quiet=True).predict(colours.rows(1))
    assert str(caught.value) == (
        "cross-validation trains a model per fold; name the run of one, such as runs/run/fold-1"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"data": {"split": {"type": "kfold"}, "validation": "rows.jsonl"}},
            "data.validation: with data.split: {type: kfold} each fold is validated on its own rows; remove it",
        ),
        (
            {"data": {"split": {"type": "kfold", "folds": 3, "fold": 4}}},
            "data.split.fold: there are 3 folds, from 1; got 4",
        ),
        (
            {"data": {"split": {"type": "kfold"}}, "trainer": {"type": "none"}, "base_model": "some/model"},
            "data.split: cross-validation trains a model per fold; write a trainer, or another split",
        ),
        (
            {"data": {"split": {"type": "kfold"}, "source": {"type": "simulation", "path": "transcripts.jsonl"}}},
            "data.split: transcripts of a simulation are training rows only; write another split",
        ),
        (
            {
                "data": {"split": {"type": "kfold"}},
                "sweep": {"parameters": {"seed": [1]}, "pruner": {"type": "median"}},
            },
            "sweep.pruner: a trial is the mean of its folds, which is known at its end; remove pruner",
        ),
    ],
)
def test_impossible_folds_are_refused(colours: Any, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Model(colours.config(**changes))
    assert str(caught.value) == expected


def test_a_metric_that_a_fold_lacks_has_no_mean_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics: list[dict[str, Metrics]] = [
        {},
        {"validation": {"loss": 1.0}},
        {"validation": {"loss": 3.0, "label.accuracy": 0.5}},
    ]
    results = [TrainResult(run=tmp_path, metrics=one, steps=1) for one in metrics]
    assert summary_of(results[1:], tmp_path).metrics == {"validation": {"loss": 2.0}}
    assert caplog.messages == ["validation: no mean of label.accuracy; missing in fold 1"]
    assert summary_of(results, tmp_path).metrics == {"validation": {}}
    assert caplog.messages[1] == "validation: no mean of loss, label.accuracy; missing in fold 1, 2"


def started(folder: Path) -> dict[str, int]:
    """Return how often the run of each fold was started."""
    return {
        path.parent.name: json.loads(path.read_bytes())["starts"]
        for path in sorted(folder.glob("fold-*/manifest.json"))
    }


def test_an_unfinished_cross_validation_is_continued_with_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": f"{letter} {number}", "label": letter}) for letter in "ab" for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "run.yaml").write_text(FOLDS)

    def train(**options: Any) -> TrainResult:
        return Model("run.yaml", quiet=True).train(**options)

    first, folder = train(), Path("runs/run")
    assert (first.run, started(folder)) == (folder, {"fold-1": 1, "fold-2": 1})
    shutil.rmtree(folder / "fold-2")
    (tmp_path / "rows.jsonl").write_text("\n".join(rows[1:]))
    with pytest.raises(ResumeError) as caught:
        train()
    assert str(caught.value) == (
        "the data has changed since runs/run/fold-1 was trained: its training rows are others now; restore the data, "
        "or start again in another folder with --run"
    )
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    again = train()
    assert (again.run, again.metrics) == (first.run, first.metrics)
    assert started(folder) == {"fold-1": 1, "fold-2": 1}
    caplog.set_level(logging.INFO)
    assert train().run == Path("runs/run-2")
    assert (
        "the run in runs/run is finished; to train it longer on the same rows, raise trainer.epochs and add "
        "--run runs/run"
    ) in caplog.messages
    with pytest.raises(ResumeError) as caught:
        train(run=folder / "fold-1")
    assert str(caught.value) == (
        "runs/run/fold-1 is a run, and cross-validation writes a run for each fold; name another folder with --run"
    )


MEASURES = """
from partita_trainers import TrainResult


class Measures:
    def __init__(self, section):
        pass

    def train(self, context):
        metrics = {"validation": context.evaluate("validation", generated=False)}
        return TrainResult(run=context.run.folder, metrics=metrics, steps=1)
"""


def test_a_cross_validation_is_continued_with_the_metrics_that_a_custom_trainer_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": f"{letter} {number}", "label": letter}) for letter in "ab" for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "measuring_folds.py").write_text(MEASURES)
    trainer = "trainer: {type: custom, target: 'measuring_folds:Measures', batch_size: 8}"
    (tmp_path / "run.yaml").write_text(FOLDS.replace("trainer: {type: finetune, batch_size: 8, epochs: 1}", trainer))
    first = Model("run.yaml", quiet=True).train()
    shutil.rmtree("runs/run/fold-2")
    again = Model("run.yaml", quiet=True).train()
    assert first.metrics["validation"].keys() == {"loss"}
    assert (again.run, again.metrics) == (first.run, first.metrics)
