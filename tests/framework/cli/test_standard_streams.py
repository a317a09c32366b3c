"""Tests of `-` for standard input and output: same rows and answers as with files, and only data on stdout."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from partita.cli.main import run


class Stdin:
    """Standard input with given bytes."""

    def __init__(self, path: Path) -> None:
        self.buffer = path.open("rb")


class Stdout:
    """Standard output that keeps text and bytes; capsys keeps stderr."""

    def __init__(self, path: Path) -> None:
        self.buffer = path.open("wb")

    def write(self, text: str) -> int:
        return self.buffer.write(text.encode())

    def flush(self) -> None:
        self.buffer.flush()

    def isatty(self) -> bool:
        return False


Piped = Callable[..., tuple[int, str, str]]


@pytest.fixture
def piped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Piped:
    """Return a function that runs a command on the input `text`: exit status, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def call(words: str, text: str, *, encoding: str = "utf8") -> tuple[int, str, str]:
        (tmp_path / "input").write_text(text, encoding=encoding)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["partita", *words.split()])
            patch.setattr(sys, "stdin", Stdin(tmp_path / "input"))
            patch.setattr(sys, "stdout", Stdout(tmp_path / "output"))
            with pytest.raises(SystemExit) as caught:
                run()
            sys.stdin.buffer.close()
            sys.stdout.buffer.close()
        return int(caught.value.code or 0), (tmp_path / "output").read_text(encoding="utf8"), capsys.readouterr().err

    return call


@pytest.fixture(autouse=True)
def zero(colours: Any, tmp_path: Path) -> None:
    settings = colours.config(trainer={"type": "none", "batch_size": 4})
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(settings), encoding="utf8")


def test_rows_are_read_from_standard_input_and_answers_written_to_standard_output(
    colours: Any, piped: Piped, tmp_path: Path
) -> None:
    rows = colours.rows(6)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    code, out, err = piped("predict zero.yaml --dataset - --output -", lines)
    assert code == 0, err
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["text"] for answer in answers] == [row["text"] for row in rows]
    assert [answer["key"] for answer in answers] == [f"stdin.jsonl:{number}" for number in range(1, 7)]
    assert err.splitlines()[-1].startswith("6 rows, "), "the summary is not data"
    assert piped("predict zero.yaml --dataset - --output out.jsonl -q", lines)[0] == 0
    assert (tmp_path / "out.jsonl").read_text(encoding="utf8") == out


def test_the_same_input_again_is_resumed(colours: Any, piped: Piped) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in colours.rows(3))
    first = piped("predict zero.yaml --dataset - --output - -q", lines)
    code, out, err = piped("predict zero.yaml --dataset - --output -", lines)
    assert (code, out) == (0, first[1])
    assert "resumed 3 of 3 from runs/zero/journal/" in err


def test_another_format_of_standard_input_can_be_given(colours: Any, piped: Piped) -> None:
    text = pd.DataFrame(colours.rows(3)).to_csv(index=False)
    code, out, _ = piped("predict zero.yaml --dataset - --stdin-format csv --output - -q", text)
    assert (code, len(out.splitlines())) == (0, 3)


@pytest.mark.parametrize(
    ("text", "line", "wanted"),
    [
        ("text,colour\na,red\n", "text,colour", "csv"),
        ("\ufefftext\tcolour\na, b\tred\n", "text\\tcolour", "tsv"),
        ('[\n  {"text": "a"}\n]\n', "[", "json"),
        ('[{"text": "a"}]', '[{"text": "a"}]', "json"),
        ("x" * 100, f"{'x' * 57}...", "FORMAT (csv, tsv, json or txt)"),
    ],
)
def test_input_that_is_not_json_lines_is_refused_with_the_option_to_write(
    text: str, line: str, wanted: str, piped: Piped
) -> None:
    code, out, err = piped("predict zero.yaml --dataset - --output - -q", text)
    assert (code, out) == (2, "")
    assert err == (
        f"error: standard input is not JSON lines, its first line is '{line}'; write --stdin-format {wanted}\n"
    )


def test_a_broken_line_before_json_lines_is_one_bad_row(colours: Any, piped: Piped) -> None:
    text = "".join(json.dumps(row) + "\n" for row in colours.rows(2))
    code, out, _ = piped("predict zero.yaml --dataset - --output - -q", f"half a line\n\n {text}")
    assert (code, [json.loads(line)["status"] for line in out.splitlines()]) == (0, ["error", "ok", "ok"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "standard input is empty; pipe the rows into the command, or name a file after --dataset"),
        ("\n", "stdin.jsonl has no rows"),
        ('\ufeff{"text": "a"}\n', "stdin.jsonl is UTF-16; write encoding: utf-16 at its source, or save it as UTF-8"),
    ],
)
def test_standard_input_without_rows_is_refused(text: str, message: str, piped: Piped) -> None:
    encoding = "utf-16-le" if text.startswith("\ufeff") else "utf8"
    words = "predict zero.yaml --dataset - --output - -q"
    assert piped(words, text, encoding=encoding) == (2, "", f"error: {message}\n")


def test_evaluate_reads_standard_input(colours: Any, piped: Piped) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in colours.rows(3))
    code, out, _ = piped("evaluate zero.yaml --dataset - --json -q", lines)
    assert (code, json.loads(out)["colour"]["n"]) == (0, 3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--json", "standard output has the predictions with --output -; leave --json out"),
        ("--set backend={type: torchrun, processes: 2}", None),
    ],
)
def test_options_that_conflict_with_standard_streams_are_refused(words: str, message: str | None, piped: Piped) -> None:
    words = words.replace(": ", ":").replace(", ", ",")
    words = words.replace("{type:torchrun,processes:2}", '{"type":"torchrun","processes":2}')
    code, out, err = piped(f"predict zero.yaml --dataset - --output - -q {words}", "")
    assert (code, out) == (2, "")
    expected = message or "backend: several processes cannot share standard input or output; name a file"
    assert expected in " ".join(err.replace("│", " ").split())


def test_a_file_that_asks_for_several_processes_is_not_served(piped: Piped) -> None:
    code, out, err = piped('serve zero.yaml --set backend={"type":"torchrun","processes":2}', "")
    assert (code, out) == (2, "")
    assert err.endswith(
        "backend: this command runs in one process; remove backend, or add --set 'backend={type: local}'\n"
    )


def test_rows_for_a_sweep_cannot_be_piped(piped: Piped) -> None:
    Path("run.yaml").write_text("unused")
    assert piped("sweep run.yaml --dataset -", "{}") == (
        2,
        "",
        "error: --dataset: trials in other processes cannot read standard input; write the rows to a file\n",
    )


def test_rows_for_an_export_are_read_from_standard_input(colours: Any, piped: Piped) -> None:
    Path("zero.yaml").write_text(yaml.safe_dump(colours.config(trainer={"type": "none"})))
    status, _, said = piped("export zero.yaml --to merged --output merged --dataset -", "")
    assert (status, said) == (
        2,
        "error: standard input is empty; pipe the rows into the command, or name a file after --dataset\n",
    )


def test_convert_reads_standard_input(piped: Piped) -> None:
    text = "base_model: m\nmodel_type: llm\ninput_features: [{name: a, type: text}]\n"
    text += "output_features: [{name: b, type: text}]\n"

    status, out, _ = piped("convert -", text)

    assert status == 0
    assert yaml.safe_load(out)["base_model"] == "m"
    assert piped("convert -", "") == (2, "", "error: standard input is empty; pipe a configuration into the command\n")


def test_convert_prints_to_standard_output(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("partita")), "convert", "zero.yaml"]
    printed = [
        subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, check=True)
        for more in ([], ["--output", "-"])
    ]
    assert printed[0].stdout == printed[1].stdout
    assert not (tmp_path / "-").exists()
