import io
import re
from typing import Any

import pytest

from partita.runs import progress
from partita.runs.progress import NoProgress, PlainProgress, clock, fitting, show_progress


def test_without_a_terminal_the_end_is_reported_in_one_line() -> None:
    stream = io.StringIO()
    with show_progress(1200, "training", stream=stream) as shown:
        for _ in range(1200):
            shown.advance(1, loss=0.123456, tokens_per_second=41_496.3, epoch=1.5)
    assert stream.getvalue() == "training 1,200/1,200  loss 0.1235  tokens/s 41,496  epoch 1.5\n"


def test_a_line_is_printed_every_ten_seconds_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with show_progress(100, "predicting", completed=40, stream=stream) as shown:
        for _ in range(25):
            now[0] += 1
            shown.advance(1)
    # 10 rows in 10 seconds; 50 rows, then 40, then 35 are left. Rows done before do not count towards the speed.
    assert stream.getvalue().splitlines() == [
        "predicting 50/100  0:50 left",
        "predicting 60/100  0:40 left",
        "predicting 65/100  0:35 left",
    ]


def test_a_display_that_stopped_halfway_is_reported_too() -> None:
    stream = io.StringIO()
    display = show_progress(10, "training", stream=stream)
    display.__enter__().advance(3)
    assert not display.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert re.fullmatch(r"training 3/10  0:00 left\n", stream.getvalue())


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(10, "training", quiet=True) as shown:
        assert isinstance(shown, NoProgress)
        shown.advance(10, loss=1.0)
    assert capsys.readouterr() == ("", "")


def test_progress_is_written_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(2, "training") as shown:
        assert isinstance(shown, PlainProgress)
        shown.advance(2)
    assert capsys.readouterr() == ("", "training 2/2\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream: Any = Terminal()
    with show_progress(8, "training", completed=2, stream=stream) as shown:
        shown.advance(3, loss=0.5, tokens_per_second=1234.5)
    text = stream.getvalue()
    assert "training" in text
    assert "━" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert re.search(r"5/8  0:00 elapsed(, 0:00 left)?  loss 0\.5  tokens/s 1,23", plain)


FIELDS = ("loss 0.08763", "epoch 22", "tokens/s 41,496")


@pytest.mark.parametrize(
    ("width", "bar", "rest"),
    [
        (120, 16, "704/1,408  1:16 elapsed, 6:59 left  loss 0.08763  epoch 22  tokens/s 41,496"),
        (80, 16, "704/1,408  1:16 elapsed, 6:59 left  loss 0.08763"),
        (70, 8, "704/1,408  1:16 elapsed, 6:59 left  loss 0.08763"),
        (60, 8, "704/1,408  6:59 left  loss 0.08763"),
        (45, 8, "704/1,408  6:59 left"),
        (30, 0, "704/1,408  6:59 left"),
        (20, 0, "704/1,408"),
    ],
)
def test_a_narrow_terminal_gets_fewer_fields_and_no_truncated_ones(width: int, bar: int, rest: str) -> None:
    line = fitting(width, head="training", count="704/1,408", elapsed=76.0, left=419.0, fields=FIELDS)
    assert (line.bar, line.rest) == (bar, rest)
    assert line.width <= width


@pytest.mark.parametrize("width", [60, 80])
def test_a_bar_is_never_wider_than_its_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    stream: Any = Terminal()
    with show_progress(2_048_000, "generating rows", completed=1024, stream=stream) as shown:
        shown.advance(
            300_000, tokens_per_second=1234.5, slots="100% of 1,024", padding="3%", prompt_tokens_per_second=9e4
        )
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()))
    assert any("301,024/2,048,000" in line for line in lines)
    assert max(len(line.rstrip()) for line in lines) <= width
    assert "…" not in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599, "59:59"), (3661, "1:01:01")]
)
def test_times_are_formatted_as_hours_minutes_and_seconds(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_short_display_inside_another_leaves_no_line() -> None:
    stream = io.StringIO()
    with show_progress(2, "training", stream=stream) as outer:
        for _ in range(2):
            outer.advance(1)
            with show_progress(40, "evaluating", stream=stream) as inner:
                inner.advance(40)
    with show_progress(40, "evaluating", stream=stream) as inner:
        inner.advance(40)
    assert stream.getvalue() == "training 2/2\nevaluating 40/40\n"


def test_a_long_display_inside_another_prints_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with show_progress(2, "training", stream=stream), show_progress(40, "evaluating", stream=stream) as inner:
        now[0] += 11
        inner.advance(20)
        inner.advance(20)
    assert stream.getvalue() == "evaluating 20/40  0:11 left\nevaluating 40/40\ntraining 0/2\n"
