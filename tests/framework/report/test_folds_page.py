"""The page of a cross-validation: means with intervals beside the values of each fold."""

from pathlib import Path
from typing import Any

import pytest

from partita.backends.folds import summary_of, write_folds
from partita.report.run_page import write_report
from partita_schema.errors import DataError
from partita_trainers.base import TrainResult

from .made_runs import write_run
from .pages import page_of


def write(folder: Path, *folds: dict[str, dict[str, float]], **options: Any) -> Path:
    """Write the runs and the means of a cross-validation, and return its folder."""
    for number in range(1, len(folds) + 1):
        write_report(write_run(folder / f"fold-{number}", outputs={"team": "category"}, **options))
    write_folds(summary_of([TrainResult(folder, metrics, steps=3) for metrics in folds], folder))
    return folder


def test_the_page_has_the_mean_of_each_metric_with_its_interval_and_each_fold(tmp_path: Path) -> None:
    accuracies = (0.5, 0.7, 0.9)
    metrics = [{"validation": {"loss": 1.0, "team.accuracy": one, "team.n": 40.0}} for one in accuracies]

    page = page_of(write(tmp_path / "run", *metrics))

    assert (
        "The mean team.accuracy of 3 folds is 0.700 (0.203 to 1.197) on the validation rows, from 0.500 to 0.900."
    ) in page.texts
    assert page.after("Validation", count=5) == ["metric", "mean", "fold-1", "fold-2", "fold-3"]
    assert page.after("team.accuracy", count=4) == ["0.700 (0.203 to 1.197)", "0.500", "0.700", "0.900"]
    assert page.after("team.n", count=2) == ["40", "40"]
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert links == [f"fold-{number}/report.html" for number in (1, 2, 3)]


def test_the_metric_is_the_one_that_selects_checkpoints(tmp_path: Path) -> None:
    trainer = {"trainer": {"type": "finetune", "validation_metric": "team.macro_f1"}}
    metrics = {"test": {"team.accuracy": 0.5, "team.macro_f1": 0.25}}

    page = page_of(write(tmp_path / "run", metrics, metrics, config=trainer))

    assert "The mean team.macro_f1 of 2 folds is 0.250 on the test rows." in page.texts


def test_damaged_results_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", {"validation": {"loss": 1.0}}, {"validation": {"loss": 1.0}})
    (folder / "folds.json").write_text("{}", encoding="utf8")

    with pytest.raises(DataError, match=r"folds\.json is damaged; rerun the training, which writes it again"):
        write_report(folder)
