"""Tests of what `partita sweep` prints about the trials."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from partita.cli.sweep import print_result, table_of
from partita.runs.sweep_record import Trial, TrialResult
from partita.runs.sweep_result import SweepResult

VALUES = {
    "trainer.learning_rate": 0.00012345,
    "trainer.learning_rate_scheduler.decay": "cosine",
    "trainer.effective_batch_size": 32,
    "base_model.tokenizer": "bpe",
    "adapter.r": 8,
}


def result_of(values: dict[str, object]) -> SweepResult:
    trial = Trial(0, values, result=TrialResult("done", 0.51234))
    return SweepResult(Path("sweeps/reviews"), "team.macro_f1", "maximize", (trial,), 1)


def headings_of(result: SweepResult, *, width: int) -> list[str]:
    """Return the lines of each heading of the printed table, joined by bars."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, markup=False)
    console.print(table_of(result, width=width))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    start, end = (next(index for index, line in enumerate(lines) if line[:1] == mark) for mark in "┏┡")
    cells = [[cell.strip() for cell in line.strip("┃").split("┃")] for line in lines[start + 1 : end]]
    return ["|".join(filter(None, column)) for column in zip(*cells, strict=True)]


def test_headings_are_in_one_line_where_there_is_room() -> None:
    names = ["learning_rate", "decay", "effective_batch_size", "tokenizer", "r"]
    assert headings_of(result_of(VALUES), width=120) == ["trial", "team.macro_f1", *names]


def test_headings_are_broken_after_separators_and_never_inside_words() -> None:
    names = ["learning_rate", "decay", "effective_|batch_size", "tokenizer", "r"]
    assert headings_of(result_of(VALUES), width=80) == ["trial", "team.macro_f1", *names]
    names = ["learning_|rate", "decay", "effective_|batch_size", "tokenizer", "r"]
    assert headings_of(result_of(VALUES), width=72) == ["trial", "team.|macro_f1", *names]


def test_a_value_of_several_lines_is_printed_on_one(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of({"prompt.template": "Text:\n{text}\n[red]"})
    print_result(result)
    printed = capsys.readouterr().out
    assert "best: trial 0, team.macro_f1 0.5123 (prompt.template: Text:\\n{text}\\n[red])\n" in printed
    assert str(result).splitlines()[1:] == ["  trial 0: team.macro_f1 0.5123 (prompt.template Text:\\n{text}\\n[red])"]
