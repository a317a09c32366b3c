"""Tests of the values that command-line flags pass to the model; their effects are tested with the methods."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from partita.cli.main import app
from partita.cli.printing import format_cell, print_metrics
from partita_schema.errors import DataError

from ..conftest import Command


@dataclass
class StubModel:
    """A model without rows that records its calls."""

    opened: dict[str, Any] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)

    def open(self, paths: list[Path], **options: Any) -> "StubModel":
        self.opened = {"paths": [str(path) for path in paths], **options}
        return self

    def ask(self, *values: Any, **options: Any) -> None:
        self.asked = [*values, options]
        raise DataError("there are no rows")

    predict = evaluate = train = export = push_to_hub = ask


Call = Callable[..., StubModel]
MODULES = {"merge": "export"}
"""Module of each command, unless it has the name of the command."""


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path) -> Call:
    """Run a command in this process up to its call of the model."""

    def asked_by(*words: str) -> StubModel:
        model = StubModel()
        module = sys.modules[f"partita.cli.{MODULES.get(words[0], words[0])}"]
        for opens in ("open_model", "start_model"):
            if hasattr(module, opens):
                monkeypatch.setattr(module, opens, model.open)
        monkeypatch.chdir(tmp_path)
        monkeypatch.delenv("PARTITA_LLAMA_CPP", raising=False)
        assert command(*words) == 2
        return model

    return asked_by


def test_the_example_of_an_override_has_an_effect_on_the_command() -> None:
    for command, example in (
        ("train", "trainer.epochs=1"),
        ("predict", "generation.max_new_tokens=16"),
        ("chat", "generation.max_new_tokens=16"),
        ("evaluate", "generation.max_new_tokens=16"),
        ("simulate", "simulation.max_turns=4"),
    ):
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        assert f"such as {example}." in " ".join(shown.split())


def test_small_numbers_of_a_table_keep_their_digits() -> None:
    assert format_cell("loss", 4.352275e-05) == "4.352e-05"
    assert format_cell("loss", -0.00012345) == "-0.0001234"
    assert [format_cell("loss", value) for value in (0.0, 0.00123, 2.5)] == ["0.0000", "0.0012", "2.5000"]
    assert format_cell("team.n", 1000.0) == "1,000"


def test_long_names_of_metrics_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_metrics({"value": {f"{'x' * 100}.mae": 1.0}}, as_json=False, title="metrics")
    shown = capsys.readouterr().out
    assert shown.count("x") == 100
    assert "…" not in shown


def test_every_flag_of_predict_reaches_the_model(call: Call) -> None:
    words = ("predict", "run.yaml", "--dataset", "rows.csv", "--output", "out.csv")
    flags = {"retry_errors": False, "fresh": False, "safe_csv": False}
    plain = {"output": Path("out.csv"), "batch_size": None, "server": None, **flags}
    assert call(*words).asked == ["rows.csv", plain]
    for flag in ("retry_errors", "fresh", "safe_csv"):
        assert call(*words, f"--{flag.replace('_', '-')}").asked == ["rows.csv", {**plain, flag: True}]
    assert call(*words, "--batch-size", "3").asked == ["rows.csv", {**plain, "batch_size": 3}]
    assert call(*words, "--server", "http://a").asked == ["rows.csv", {**plain, "server": "http://a"}]


def test_every_flag_of_evaluate_reaches_the_model(call: Call) -> None:
    assert call("evaluate", "run.yaml").asked == [None, {"batch_size": None}]
    assert call("evaluate", "run.yaml", "--dataset", "a.csv", "--batch-size", "5").asked == ["a.csv", {"batch_size": 5}]


def test_every_flag_of_train_reaches_the_model(call: Call) -> None:
    assert call("train", "run.yaml").asked == [None, {"run": None}]
    assert call("train", "run.yaml", "--dataset", "a.csv", "--run", "b").asked == ["a.csv", {"run": Path("b")}]


def test_every_flag_of_export_merge_and_push_reaches_the_model(call: Call) -> None:
    words = ("export", "run", "--to", "gguf", "--output", "out")
    plain = {"dtype": "auto", "gguf_type": None, "dataset": None, "min_agreement": 0.9, "llama_cpp": None}
    assert call(*words).asked == ["gguf", Path("out"), plain]
    for words_of_flag, changed in (
        (("--dtype", "bfloat16"), {"dtype": "bfloat16"}),
        (("--quantize", "q8_0"), {"gguf_type": "q8_0"}),
        (("--dataset", "a.csv"), {"dataset": "a.csv"}),
        (("--min-agreement", "0.5"), {"min_agreement": 0.5}),
        (("--llama-cpp", "there"), {"llama_cpp": Path("there")}),
    ):
        assert call(*words, *words_of_flag).asked == ["gguf", Path("out"), {**plain, **changed}]
    merged = {**plain, "dtype": "float16", "dataset": "a.csv", "min_agreement": 1.0}
    flags = ("--dtype", "float16", "--dataset", "a.csv", "--min-agreement", "1")
    assert call("merge", "run", "-o", "out", *flags).asked == ["merged", Path("out"), merged]
    assert call("push", "run", "me/it").asked == ["me/it", {"private": True, "dry_run": None}]
    pushed = call("push", "run", "me/it", "--public", "--dry-run", "out")
    assert pushed.asked == ["me/it", {"private": False, "dry_run": Path("out")}]
    assert call("push", "run", "me/it", "--set", "seed=5").opened["overrides"] == ["seed=5"]


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_shared_flags_reach_the_model(call: Call, verb: str) -> None:
    words = (verb, "run.yaml", "--dataset", "a.csv", *(("--output", "b.csv") if verb == "predict" else ()))
    opened = {"paths": ["run.yaml"], "overrides": [], "quiet": False, "trust_remote_code": False, "one_process": False}
    assert call(*words).opened == opened
    assert call(*words, "--set", "seed=5", "--set", "a=1").opened == {**opened, "overrides": ["seed=5", "a=1"]}
    assert call(*words, "--quiet").opened == {**opened, "quiet": True}
    assert call(*words, "--trust-remote-code").opened == {**opened, "trust_remote_code": True}
