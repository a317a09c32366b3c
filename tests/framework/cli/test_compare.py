"""`partita compare`: the tables at 80 columns, JSON, the page, and wrong input."""

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from partita.report.compare_page import interval_chart, passage_of
from partita.report.comparison_table import disagreement_lines, one_line, p_text, print_numbers
from partita.report.disagreements import Disagreement
from partita.report.measures import MetricEstimate
from partita.report.statistics import Difference, Interval
from partita.runs.row_results import EvaluationHeader, OutputResult, RecordedRow, evaluation_path

from ..conftest import Command
from ..recorded_results import write_row_results
from ..run_directories import MakeRun

Call = Callable[..., tuple[int, str, str]]
HOSTILE = "<script>alert(1)</script> & \"quotes\" '{{ 7 * 7 }}' </td><img src=x onerror=y>"


@pytest.fixture
def call(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Call:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: object) -> tuple[int, str, str]:
        code = command("compare", *words)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def evaluated(make_run: MakeRun, name: str, *, right: int, text: str = "ticket", **run: Any) -> str:
    """Write a run with 40 rows, of which the first `right` are right."""
    folder = make_run(name, **run)
    rows = [
        RecordedRow(f"r:{i}", f"{text} {i}", outputs={"team": OutputResult("a", "a" if i < right else text, i < right)})
        for i in range(40)
    ]
    header = EvaluationHeader("test", "result", "f", outputs={"team": "category"})
    write_row_results(evaluation_path(folder, "test"), header, rows)
    return f"runs/{name}"


def test_the_comparison_fits_80_columns(call: Call, make_run: MakeRun) -> None:
    first = evaluated(make_run, "first", right=20, text="a long ticket with many words that go on and on " * 3)
    second = evaluated(make_run, "a-second-run-whose-name-is-not-so-short", right=32, seed=7)
    code, out, _ = call(first, second, "--examples", 2)
    assert code == 0
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80, out
    for line in (
        r"A  first  \(reference\)",
        r"B  a-second-run-whose-name-is-not-so-short",
        r"what differs  A   B",
        r"seed          42  7",
        r"B against A, 40 rows of test",
        r"metric +A +B +difference +95 % interval +p",
        r"team.accuracy +0.500  0.800      \+0.300  \+0.\d{3} to \+0.\d{3}  <0.001  better",
        r"team: both right 20, only A 0, only B 12, neither 8",
        r"2 of 20 rows with other values",
        r"r:20  \(B is better\)",
        r"  a long ticket .*\.\.\.",
        r"  team, reference: a",
        r"  team, B: a",
    ):
        assert re.search(rf"^{line} *$", out, re.MULTILINE), line
    assert "note: 3 p-values: without any difference" in out


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ("team", ["team.accuracy", "team.macro_f1", "team.weighted_f1", "loss"]),
        ("of_guest", ["of_guest.accuracy", "of_guest.macro_f1", "of_guest.weighted_", "f1", "loss"]),
    ],
    ids=["space between columns", "names"],
)
def test_verdicts_and_numbers_are_whole_next_to_wide_intervals(
    output: str, names: list[str], call: Call, make_run: MakeRun
) -> None:
    header = EvaluationHeader("test", "result", "f", outputs={output: "category"})
    results = {output: OutputResult("a", "a", True)}
    for name, loss in (("a", 6e-4), ("b", 4e-7)):
        folder = make_run(name, output_features=[{"name": output, "type": "category"}])
        rows = [RecordedRow(f"r:{i}", loss=loss * i / 20, tokens=1, outputs=results) for i in range(40)]
        write_row_results(evaluation_path(folder, "test"), header, rows)
    _, out, _ = call("runs/a", "runs/b")
    table = out.partition("40 rows of test\n")[2].partition(f"\n{output}: ")[0]
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80, out
    assert [line.split()[0] for line in table.splitlines() if "invalid" not in line][1:] == names
    number = r"[+-]?\d\.\de-\d\d"
    assert re.search(rf"^loss +{number} {number} +{number} {number} to {number} <0.001 better *$", table, re.MULTILINE)


def test_numbers_that_are_wider_than_the_terminal_are_not_cut() -> None:
    console = Console(width=80, file=StringIO())
    number = "1,234,567,890,123"
    cells = ["dialogue.reward", number, number, f"+{number}", f"+{number} to +{number}", "<0.001", "better"]
    print_numbers(["metric", "A", "B", "difference", "95 % interval", "p", ""], [cells], console, width=80)
    assert (
        console.file.getvalue().splitlines()[1:]
        == [  # type: ignore[attr-defined]
            " ".join(["dialogue.rew", *cells[1:]]),
            "ard".ljust(len(" ".join(cells)) - 3),
        ]
    )


def test_the_same_configuration_is_said(call: Call, make_run: MakeRun) -> None:
    code, out, _ = call(*(evaluated(make_run, name, right=20) for name in "ab"))
    assert code == 0
    assert "\nthe configurations are the same\n" in out
    assert "other values" not in out


def test_recorded_metrics_are_printed_if_there_are_no_rows(call: Call, make_run: MakeRun) -> None:
    for name, loss in (("a", 0.5), ("b", 0.25)):
        make_run(name, note={"metrics": {"test": {"loss": loss}}})
    code, out, _ = call("runs/a", "runs/b")
    assert code == 0
    assert re.search(r"^recorded metrics +A +B *\ntest.loss +0.500 +0.250 *$", out, re.MULTILINE)
    assert "note: the runs have no results of the same rows" in out


def test_recorded_metrics_without_a_test_are_printed_below_the_others(call: Call, make_run: MakeRun) -> None:
    metrics = {
        "test": {"team.accuracy": 0.5, "team.auroc": 0.75, "team.n": 40, "exact_match": 0.5},
        "validation": {"loss": 1},
    }
    runs = [evaluated(make_run, name, right=20, note={"metrics": metrics}) for name in "ab"]
    _, out, _ = call(*runs)
    assert re.search(r"^recorded, untested +A +B *\ntest.team.auroc +0.750 +0.750 *\n\nnote", out, re.MULTILINE)


def test_of_many_settings_some_are_printed(call: Call, make_run: MakeRun) -> None:
    runs = [
        evaluated(make_run, name, right=20, note={"versions": versions})
        for name, versions in (("a", {}), ("b", {f"package {number}": "1" for number in range(50)}))
    ]
    _, out, _ = call(*runs)
    assert out.count("version of package") == 40
    assert "\nand 10 more; --json has all of them\n" in out


def test_long_keys_are_not_broken_and_a_missing_value_is_a_dash(call: Call, make_run: MakeRun) -> None:
    adapter = {"type": "lora", "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["x" * 70]}
    runs = [evaluated(make_run, "a", right=20), evaluated(make_run, "b", right=20, adapter=adapter)]
    _, out, _ = call(*runs)
    assert re.search(r"^adapter.target_modules.0 +- +q_proj", out, re.MULTILINE)
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80, out


def test_json_has_every_number(call: Call, make_run: MakeRun) -> None:
    runs = [evaluated(make_run, name, right=right) for name, right in (("a", 20), ("b", 30))]
    code, out, _ = call(*runs, "--json")
    record = json.loads(out)
    assert (code, record["runs"], record["rows"], record["split"]) == (0, ["a", "b"], 40, "test")
    accuracy = record["pairs"][0]["metrics"][0]
    assert accuracy.keys() == {"metric", "first", "second", "difference", "low", "high", "p", "test", "verdict"}
    assert (accuracy["first"], accuracy["second"], accuracy["verdict"]) == (0.5, 0.75, "better")
    assert record["pairs"][0]["main"] == "team.accuracy"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/a"], "error: there is nothing to compare; name two runs or more, the reference first\n"),
        (["runs/a", "runs/b", "--html", "page.pdf"], "error: page.pdf is no name of a page; end it with .html\n"),
        (["runs/a", "runs/b", "--html", "no/where/p.html"], "error: no/where/p.html cannot be written: No such file"),
        (["runs/a", "runs/b", "--split", "x"], "error: runs/a has no results of rows of x, it has test; evaluate"),
        (["runs/a", "nowhere"], "error: nowhere is not a run directory"),
    ],
    ids=["one", "page", "folder", "split", "run"],
)
def test_wrong_input_is_an_error_with_advice(words: list[str], message: str, call: Call, make_run: MakeRun) -> None:
    for name in "ab":
        evaluated(make_run, name, right=20)
    code, out, err = call(*words)
    assert (code, out) == (1 if "no/where/p.html" in words else 2, "")
    assert err.startswith(message)


def test_the_page_has_the_verdict_and_no_markup_of_the_rows(call: Call, make_run: MakeRun, tmp_path: Path) -> None:
    runs = [
        evaluated(make_run, name, right=right, text=HOSTILE, base_model=f"m/{name}{HOSTILE}")
        for name, right in (("a", 20), ("b", 32))
    ]
    code, out, _ = call(*runs, "--html", "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf8")
    assert (code, out.splitlines()[-1]) == (0, "written to page.html")
    assert "b is better than a: team.accuracy 0.800 against 0.500 (difference +0.300, 95 % interval" in text
    assert "Compared on the 40 rows of test that all runs have." in text
    for hostile in ("<script", "<img", "src=x onerror=y>"):
        assert hostile not in text
    assert "{{ 7 * 7 }}" in text
    assert "http" not in text.replace("http-equiv", "")
    assert text.count("<svg") == 1
    assert len(text) < 30_000


def test_a_page_without_a_difference_says_so(call: Call, make_run: MakeRun, tmp_path: Path) -> None:
    runs = [evaluated(make_run, name, right=20) for name in "abc"]
    assert call(*runs, "--html", "page.html")[0] == 0
    text = (tmp_path / "page.html").read_text(encoding="utf8")
    assert "<h1>3 runs</h1>" in text
    assert "No measurable difference between c and a: team.accuracy 0.500 against 0.500" in text


def test_the_chart_holds_all_intervals_and_a_line_at_zero() -> None:
    shares = Interval(0.6, 0.5, 0.7), Interval(0.5, 0.4, 0.6)
    metrics = [
        MetricEstimate(name, *shares, Difference(0.1, low, 0.3, 0.1, "bootstrap"))
        for name, low in (("x", 0.05), ("y" * 40, -0.1))
    ]
    chart = interval_chart("differences <of> runs", metrics)
    xs = [float(x) for x in re.findall(r'x[12]="([\d.]+)"', chart.svg)]
    assert min(xs) >= 130
    assert max(xs) <= 350
    assert "y…y" in chart.svg
    assert 'aria-label="differences &lt;of&gt; runs"' in chart.svg
    assert chart.table.rows[0] == ["x", "+0.100", "+0.050", "+0.300"]


@pytest.mark.parametrize(
    ("reference", "first", "second", "line"),
    [
        (0, 1, None, "price: reference: 0   A: 1   B: unreadable"),
        ("", "x", "", 'price: reference: ""   A: x   B: ""'),
        (None, "a", "b", "price: A: a   B: b"),
    ],
)
def test_zero_and_an_empty_text_are_values(reference: Any, first: Any, second: Any, line: str) -> None:
    row = Disagreement("r:1", "How much?", "price", reference, first, second, "")
    assert list(disagreement_lines(row, "tickets", "B")) == ["r:1", "  How much?", f"  {line}"]
    page = dict(passage_of(row, runs=("tickets", "other")).facts)
    shown = [page[name] for name in ("reference", "tickets", "other") if name in page]
    assert shown == [part.rpartition(": ")[2] for part in line.removeprefix("price: ").split("   ")]


def test_small_p_values_are_not_zero() -> None:
    assert (p_text(0.0), p_text(0.0011), p_text(1.0)) == ("<0.001", "0.001", "1.000")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (["a", "b"], '["a", "b"]'), ("a\n b", "a b"), ("x" * 80, "x" * 57 + "..."), (0, "0")],
)
def test_values_are_shown_on_one_line(value: Any, text: str) -> None:
    assert one_line(value) == text
