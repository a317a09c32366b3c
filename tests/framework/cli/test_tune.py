"""Tests of the calls and output of `partita tune`; the report is tested in tests/framework/report."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from partita_trainers.batch_size.probe import BatchSize, ProbeResult

from ..conftest import Command

SIZE = BatchSize(
    rows=8,
    origin="tuned",
    device="cpu",
    max_fitting=8,
    best=8,
    probes=(
        ProbeResult(1, "fits", 10**7, 10**7, 0.1, 0.01, 2.0),
        ProbeResult(8, "fits", 5 * 10**7, 5 * 10**7, 0.4, 0.02, 7.5),
    ),
    prompt_tokens=20,
    new_tokens=5,
    budget_bytes=6 * 10**7,
    seconds=1.5,
)


@dataclass
class Tuned:
    """A model with known sizes that records its calls."""

    sizes: dict[str, BatchSize]
    opened: list[Any] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)

    def open(
        self, paths: list[Path], *, overrides: list[str], quiet: bool, one_process: bool, trust_remote_code: bool
    ) -> "Tuned":
        self.opened.append(([str(path) for path in paths], overrides, quiet))
        return self

    def tune(self, dataset: str | None, *, fresh: bool) -> "Tuned":
        self.asked.append((dataset, fresh))
        return self

    def by_purpose(self) -> dict[str, BatchSize]:
        return self.sizes


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tuned:
    result = Tuned({"generation": SIZE, "evaluation": BatchSize(4, "file", "cpu")})
    # The module has the name of a function of its package, so import it by name.
    monkeypatch.setattr(importlib.import_module("partita.cli.tune"), "start_model", result.open)
    monkeypatch.chdir(tmp_path)
    return result


@pytest.fixture
def call(command: Command, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command in this process; return exit code, standard output and standard error."""

    def tune(*words: str) -> tuple[int, str, str]:
        code = command("tune", *words)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return tune


Call = Callable[..., tuple[int, str, str]]


def test_sizes_are_printed_and_flags_reach_the_model(model: Tuned, call: Call) -> None:
    code, shown, stderr = call("run.yaml", "--dataset", "rows.csv", "--fresh", "--set", "seed=5", "-q")
    assert (code, stderr) == (0, "")
    assert shown.startswith("generation: 8 rows (fits 8, best 8), tuned in 1.50 s on cpu; prompts of at most\n")
    assert shown.endswith("\n\nevaluation: 4 rows, as the file says\n")
    assert model.opened == [(["run.yaml"], ["seed=5"], True)]
    assert model.asked == [("rows.csv", True)]


def test_without_flags_the_configured_data_and_cached_results_are_used(model: Tuned, call: Call) -> None:
    assert call("run.yaml")[0] == 0
    assert model.opened == [(["run.yaml"], [], False)]
    assert model.asked == [(None, False)]


def test_json_contains_only_the_records(model: Tuned, call: Call, tmp_path: Path) -> None:
    code, shown, stderr = call("run.yaml", "--json", "--plot", "plot.svg")
    assert (code, stderr) == (0, "")
    assert (tmp_path / "plot.svg").exists()
    records = json.loads(shown)
    assert records.keys() == {"generation", "evaluation"}
    assert records["generation"]["probes"][1]["used_bytes"] == 50_000_000
    assert records["generation"]["max_fitting"] == 8
    assert records["evaluation"]["origin"] == "file"


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG\r\n"), ("a.svg", b"<?xml"), ("a.html", b"<!DOCTYPE")])
def test_the_extension_of_a_plot_selects_its_format_and_its_path_is_printed(
    name: str, start: bytes, model: Tuned, call: Call, tmp_path: Path
) -> None:
    code, shown, _ = call("run.yaml", "--plot", name)
    assert code == 0
    assert shown.endswith(f"\n\ndrawn in {name}\n")
    assert (tmp_path / name).read_bytes().startswith(start)


def test_the_title_of_a_page_has_the_name_of_the_configuration(model: Tuned, call: Call, tmp_path: Path) -> None:
    call("runs/first", "--plot", "a.html")
    assert "<title>Batch sizes of runs/first</title>" in (tmp_path / "a.html").read_text(encoding="utf8")


def test_an_unknown_extension_is_refused_before_the_measurement(model: Tuned, call: Call) -> None:
    message = "error: a.pdf has the ending '.pdf'; plots are written as .png, .svg or .html\n"
    assert call("run.yaml", "--plot", "a.pdf") == (2, "", message)
    assert model.opened == []


def test_without_matplotlib_a_plot_is_refused_before_the_measurement(
    model: Tuned, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = "error: plots are drawn with matplotlib, which is missing here; pip install 'partita[plot]'\n"
    assert call("run.yaml", "--plot", "a.png") == (2, "", message)
    assert model.opened == []


def test_a_plot_of_configured_sizes_is_refused_after_they_are_printed(model: Tuned, call: Call, tmp_path: Path) -> None:
    del model.sizes["generation"]
    code, shown, stderr = call("run.yaml", "--plot", "a.png")
    assert (code, shown) == (2, "evaluation: 4 rows, as the file says\n")
    assert stderr == (
        "error: a.png: no size was measured, so there is nothing to draw (evaluation is 4 rows); "
        "write batch_size: auto\n"
    )
    assert not (tmp_path / "a.png").exists()


def test_help_loads_no_heavy_library() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "partita", "tune", "--help"],
        env=os.environ | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "Trains and predicts nothing" in re.sub(r"\s+", " ", done.stdout)
    loaded = {line.split("|")[-1].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "partita" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "matplotlib", "numpy", "datasets"})
