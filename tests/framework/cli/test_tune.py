"""Tests of the output of `partita tune` with a tiny model; the report is tested in tests/framework/report."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ...json_lines import write_json_lines
from ..conftest import Command

CONFIG = {
    "base_model": {
        "type": "scratch",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "context_length": 64,
        "tokenizer": "word",
        "vocab_size": 64,
    },
    "input_features": [{"name": "text", "type": "text"}],
    "output_features": [{"name": "colour", "type": "category"}],
    "generation": {"max_new_tokens": 4},
    "data": {"source": "rows.jsonl"},
    "trainer": {"type": "none"},
}

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with run.yaml, its rows of three words, and other rows of six words."""
    folder = tmp_path_factory.mktemp("tune")
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf8")
    for name, words in (("rows.jsonl", "{} red balls"), ("other.jsonl", "{} red balls and a box")):
        write_json_lines(folder / name, [{"text": words.format(n), "colour": "red"} for n in range(80)])
    return folder


@pytest.fixture
def call(work: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run the command on run.yaml in its folder; return exit code, standard output and standard error."""
    monkeypatch.setenv("PARTITA_CACHE", str(work / "cache"))
    monkeypatch.chdir(work)
    capsys.readouterr()

    def tune(*words: str) -> tuple[int, str, str]:
        code = command("tune", "run.yaml", *words)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return tune


def plain(text: str) -> str:
    """Return a text in one line."""
    return re.sub(r"\s+", " ", text)


def test_sizes_are_printed_by_purpose(call: Call) -> None:
    code, shown, stderr = call("-q", "--fresh")
    assert (code, stderr) == (0, "")
    # Which size is the fastest depends on other work on this machine.
    sizes = r"(\d+) rows? \(fits (\d+), best (\d+)\), tuned in"
    first = re.match(rf"generation: {sizes} [\d.]+ m?s on cpu; prompts of at most 3 tokens and", plain(shown))
    second = re.search(rf"\n\nevaluation: {sizes}", shown)
    assert first is not None, shown
    assert second is not None, shown
    for chosen, fits, best in (map(int, found.groups()) for found in (first, second)):
        assert chosen == best <= fits


def test_flags_change_the_rows_the_configuration_and_whether_cached_results_are_used(call: Call) -> None:
    assert call("-q")[0] == 0
    assert "cached and checked again" in plain(call("-q")[1])
    _, shown, _ = call("-q", "--dataset", "other.jsonl", "--set", "generation.max_new_tokens=7", "--fresh")
    assert "cached" not in shown
    assert "prompts of at most 6 tokens and 7 new tokens" in plain(shown)


def test_json_contains_only_the_records(call: Call, work: Path) -> None:
    code, shown, stderr = call("-q", "--json", "--plot", "plot.svg")
    assert (code, stderr) == (0, "")
    assert (work / "plot.svg").exists()
    records = json.loads(shown)
    assert records.keys() == {"generation", "evaluation"}
    assert max(probe["used_bytes"] for probe in records["generation"]["probes"]) > 0
    assert records["generation"]["rows"] <= records["generation"]["max_fitting"]
    assert records["evaluation"]["device"] == "cpu"


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG\r\n"), ("a.svg", b"<?xml"), ("a.html", b"<!DOCTYPE")])
def test_the_extension_of_a_plot_selects_its_format_and_its_path_is_printed(
    name: str, start: bytes, call: Call, work: Path
) -> None:
    code, shown, _ = call("--plot", name)
    assert code == 0
    assert shown.endswith(f"\n\ndrawn in {name}\n")
    assert (work / name).read_bytes().startswith(start)


def test_the_title_of_a_page_has_the_name_of_the_configuration(call: Call, work: Path) -> None:
    call("--plot", "title.html")
    assert "<title>Batch sizes of run.yaml</title>" in (work / "title.html").read_text(encoding="utf8")


def test_an_unknown_extension_is_refused_before_the_model_is_loaded(call: Call) -> None:
    message = "error: a.pdf has the ending '.pdf'; plots are written as .png, .svg or .html\n"
    assert call("--plot", "a.pdf") == (2, "", message)


def test_without_matplotlib_a_plot_is_refused_before_the_model_is_loaded(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = "error: plots are drawn with matplotlib, which is missing here; pip install 'partita[plot]'\n"
    assert call("--plot", "b.png") == (2, "", message)


def test_a_plot_of_configured_sizes_is_refused_after_they_are_printed(call: Call, work: Path) -> None:
    code, shown, stderr = call("-q", "--plot", "c.png", "--set", "trainer.batch_size=8")
    assert (code, shown) == (2, "generation: 8 rows, as the file says\n\nevaluation: 8 rows, as the file says\n")
    assert stderr == (
        "error: c.png: no size was measured, so there is nothing to draw (generation is 8 rows, evaluation is 8 rows); "
        "write batch_size: auto\n"
    )
    assert not (work / "c.png").exists()


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
