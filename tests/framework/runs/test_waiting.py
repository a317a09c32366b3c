"""Tests of the line that says what a command waits for."""

import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from partita.runs.log import show_log
from partita.runs.progress import show_progress
from partita.runs.waiting import ERASE, WAITS, show_waits, waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def hidden_again() -> Iterator[None]:
    WAITS.shown = False
    yield
    WAITS.shown = False


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal; in the test, since pytest replaces it after the fixtures."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_wait_is_shown_at_once_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    show_waits()
    with waiting("loading libraries"):
        assert terminal.getvalue() == "loading libraries ..."
    assert terminal.getvalue() == f"loading libraries ...{ERASE}"


def test_log_lines_replace_the_wait_and_it_is_written_again_below(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    show_log(quiet=False)
    with waiting("loading the model"):
        logging.getLogger("partita.x").info("16 rows")
    assert terminal.getvalue() == f"loading the model ...{ERASE}16 rows\nloading the model ...{ERASE}"


def test_after_an_inner_wait_the_outer_one_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    show_waits()
    with waiting("one"), waiting("two"):
        pass
    assert terminal.getvalue() == f"one ...{ERASE}two ...{ERASE}one ...{ERASE}"


def test_a_progress_bar_has_the_line_of_the_terminal_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    show_log(quiet=False)
    with waiting("reading the rows"):
        with show_progress(1, "tokenizing") as bar:
            bar.advance(1)
            assert terminal.getvalue().startswith(f"reading the rows ...{ERASE}")
            logging.getLogger("partita.x").info("16 rows")
        assert terminal.getvalue().endswith("reading the rows ...")
    assert terminal.getvalue().count("reading the rows") == 2


def test_without_a_terminal_a_wait_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_waits()
    with waiting("loading libraries"), waiting("the file", line=False):
        pass
    assert capsys.readouterr().err == "loading libraries\n"


@pytest.mark.parametrize("options", [{"quiet": True}, {"quiet": False, "rank": 1}], ids=["quiet", "rank 1"])
def test_nothing_is_shown_with_quiet_and_on_other_ranks(
    capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    show_log(**options)
    with waiting("loading libraries"):
        pass
    assert capsys.readouterr() == ("", "")


def test_programs_that_use_the_python_interface_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("loading the model"):
        pass
    assert capsys.readouterr() == ("", "")
