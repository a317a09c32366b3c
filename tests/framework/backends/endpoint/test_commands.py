"""Tests of the commands with a configuration that uses a server."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ...conftest import Command
from .conftest import LocalServer, answer, error

MakeFile = Callable[..., dict[str, Any]]


@pytest.fixture
def file(server: LocalServer, make_file: MakeFile) -> str:
    Path("file.yaml").write_text(yaml.safe_dump(make_file()), encoding="utf-8")
    Path("rows.jsonl").write_text('{"question": "a", "answer": "A"}\n{"question": "b", "answer": "x"}\n')
    return "file.yaml"


def test_predict_and_evaluate_use_the_server(file: str, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("predict", file, "--dataset", "rows.jsonl", "--output", "out.jsonl", "--quiet") == 0
    assert capsys.readouterr().out.startswith("2 rows, 2 answered, 2 tokens in ")
    lines = Path("out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["answer"] for line in lines] == ["A", "B"]
    assert command("evaluate", file, "--dataset", "rows.jsonl", "--quiet", "--json") == 0
    assert json.loads(capsys.readouterr().out)["answer"]["exact_match"] == 0.5


def test_a_row_that_fails_is_reported_at_the_end(
    file: str, server: LocalServer, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    server.reply = lambda body: error(400, "no") if body["messages"][0]["content"] == "b" else answer(body, "fine")
    assert command("predict", file, "--dataset", "rows.jsonl", "--output", "out.jsonl", "--quiet") == 0
    assert "2 rows, 1 answered, 1 error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        (
            "train",
            (
                "there is nothing to train with backend: {type: endpoint}: the model is the server's; use evaluate or "
                "predict, or remove backend"
            ),
        ),
        (
            "tune",
            (
                "there is nothing to tune with backend: {type: endpoint}: the server chooses how many rows go through "
                "its model at once; backend.concurrency says how many it is asked at the same time"
            ),
        ),
        (
            "preview",
            (
                "there is nothing to preview with backend: {type: endpoint}: tokens are the server's; with a model or "
                "its folder as base_model and without backend they are shown"
            ),
        ),
    ],
)
def test_commands_that_do_not_support_a_server_are_refused(
    file: str, command: Command, capsys: pytest.CaptureFixture[str], verb: str, text: str
) -> None:
    assert command(verb, file) == 2
    assert capsys.readouterr().err == f"error: {text}\n"


def test_an_unknown_server_ends_a_command_with_one_line(
    file: str, server: LocalServer, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    server.reply = lambda body: error(401, "no key")
    assert command("predict", file, "--dataset", "rows.jsonl", "--output", "out.jsonl", "--quiet") == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: the server wants a key (401): no key; write backend.api_key_env")
    assert not Path("out.jsonl").exists()


def test_an_output_that_cannot_be_written_is_reported_before_any_request(
    file: str, server: LocalServer, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out.csv").mkdir()
    assert command("predict", file, "--dataset", "rows.jsonl", "--output", "out.csv", "--quiet") == 2
    message = "error: out.csv cannot be written: Is a directory; name a file in that directory\n"
    assert capsys.readouterr().err == message
    assert command("predict", file, "--dataset", "rows.jsonl", "--output", "out.xls", "--quiet") == 2
    assert "out.xls has the ending '.xls'; predictions are written as" in capsys.readouterr().err
    assert server.bodies == []


def test_formulas_in_answers_are_marked_on_request(file: str, server: LocalServer, command: Command) -> None:
    server.reply = lambda body: answer(body, '=HYPERLINK("http://evil")')
    words = ("predict", file, "--dataset", "rows.jsonl", "--output", "out.csv", "--quiet")
    assert command(*words, "--safe-csv") == 0
    with Path("out.csv").open(encoding="utf-8", newline="") as lines:
        assert [row["answer"] for row in csv.DictReader(lines)] == ['\'=HYPERLINK("http://evil")'] * 2
    assert command(*words) == 0
    assert '"=HYPERLINK(' in Path("out.csv").read_text(encoding="utf-8")
    assert len(server.bodies) == 2


def test_a_failing_server_is_not_a_user_error(
    file: str, server: LocalServer, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text("".join(f'{{"question": "{number}"}}\n' for number in range(60)), encoding="utf-8")
    server.reply = lambda body: error(500, "broken")
    words = ("--set", "backend.retries=0", "--set", "backend.concurrency=2")
    assert command("predict", file, "--dataset", "rows.jsonl", "--output", "out.jsonl", *words) == 1
    assert "10 rows have failed one after the other, the last one because: the server failed (500): broken." in (
        capsys.readouterr().err
    )
