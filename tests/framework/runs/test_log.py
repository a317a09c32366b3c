"""Tests of the log: lines wrap at spaces on a terminal, and only warnings of libraries are hidden."""

import io
import logging
import sys
import warnings
from collections.abc import Iterator

import pytest

from partita.cli.main import fail
from partita.runs.log import show_log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def same_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        yield


def test_lines_on_a_terminal_wrap_at_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show_log(quiet=False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    long = "bucket: 16 rows a batch, windows of 2,048 rows, 1 batch a step, 0.5 % padding expected"
    logging.getLogger("partita.x").info("%s", long)
    logging.getLogger("partita.x").info("see %s", "/a" * 60)
    assert sys.stderr.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "bucket: 16 rows a batch, windows of 2,048 rows, 1 batch a step, 0.5 % padding",
        "  expected",
        "see",
        "  " + "/a" * 60,
    ]


def test_lines_in_a_file_are_not_wrapped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    show_log(quiet=False)
    logging.getLogger("partita.x").info("more than twenty columns of text")
    assert capsys.readouterr().err == "more than twenty columns of text\n"


def test_warnings_of_libraries_are_hidden_and_those_of_user_code_are_shown() -> None:
    warnings.resetwarnings()
    show_log(quiet=True)
    with warnings.catch_warnings(record=True) as seen:
        for module in (
            "transformers.modeling",
            "torch",
            "partita.lm.loading.base_models",
            "my_trainer",
            "torchmetrics",
        ):
            warnings.warn_explicit(f"of {module}", UserWarning, "file.py", 1, module=module)
    assert [str(one.message) for one in seen] == ["of my_trainer", "of torchmetrics"]


def test_errors_on_a_terminal_wrap_at_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys, "stderr", Terminal())

    fail("error: the rows cannot be read; repair the file /a/b/c.jsonl", code=2)

    assert sys.stderr.getvalue() == "error: the rows cannot be\n  read; repair the file\n  /a/b/c.jsonl\n"
