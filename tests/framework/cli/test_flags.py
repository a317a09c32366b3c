"""Tests of the values that command-line flags pass to the model; their effects are tested with the methods."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from partita_schema.errors import DataError

from ..conftest import Command


@dataclass
class StubModel:
    """A model without rows that records its calls."""

    opened: dict[str, Any] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)

    def open(self, path: Path, **options: Any) -> "StubModel":
        self.opened = {"path": str(path), **options}
        return self

    def ask(self, *values: Any, **options: Any) -> None:
        self.asked = [*values, options]
        raise DataError("there are no rows")

    predict = evaluate = train = ask


Call = Callable[..., StubModel]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path) -> Call:
    """Run a command in this process up to its call of the model."""

    def asked_by(*words: str) -> StubModel:
        model = StubModel()
        monkeypatch.setattr(sys.modules[f"partita.cli.{words[0]}"], "start_model", model.open)
        monkeypatch.chdir(tmp_path)
        assert command(*words) == 2
        return model

    return asked_by


def test_every_flag_of_predict_reaches_the_model(call: Call) -> None:
    words = ("predict", "run.yaml", "--dataset", "rows.csv", "--output", "out.csv")
    plain = {"output": Path("out.csv"), "batch_size": None, "retry_errors": False, "fresh": False, "safe_csv": False}
    assert call(*words).asked == ["rows.csv", plain]
    for flag in ("retry_errors", "fresh", "safe_csv"):
        assert call(*words, f"--{flag.replace('_', '-')}").asked == ["rows.csv", {**plain, flag: True}]
    assert call(*words, "--batch-size", "3").asked == ["rows.csv", {**plain, "batch_size": 3}]


def test_every_flag_of_evaluate_reaches_the_model(call: Call) -> None:
    assert call("evaluate", "run.yaml").asked == [None, {"batch_size": None}]
    assert call("evaluate", "run.yaml", "--dataset", "a.csv", "--batch-size", "5").asked == ["a.csv", {"batch_size": 5}]


def test_every_flag_of_train_reaches_the_model(call: Call) -> None:
    assert call("train", "run.yaml").asked == [None, {"run": None}]
    assert call("train", "run.yaml", "--dataset", "a.csv", "--run", "b").asked == ["a.csv", {"run": Path("b")}]


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_shared_flags_reach_the_model(call: Call, verb: str) -> None:
    words = (verb, "run.yaml", "--dataset", "a.csv", *(("--output", "b.csv") if verb == "predict" else ()))
    opened = {"path": "run.yaml", "overrides": [], "quiet": False, "trust_remote_code": False, "one_process": False}
    assert call(*words).opened == opened
    assert call(*words, "--set", "seed=5", "--set", "a=1").opened == {**opened, "overrides": ["seed=5", "a=1"]}
    assert call(*words, "--quiet").opened == {**opened, "quiet": True}
    assert call(*words, "--trust-remote-code").opened == {**opened, "trust_remote_code": True}
