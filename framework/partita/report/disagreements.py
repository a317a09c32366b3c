"""Rows in which two models have different values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from partita.report.compared_rows import ComparedRows
from partita.report.evaluation import Evaluation, OutputColumn


@dataclass(frozen=True)
class Disagreement:
    """A row in which two runs differ."""

    key: str
    """Key of the row, such as `rows.csv:23`."""
    prompt: str
    """The inputs as text, shortened."""
    output: str
    """Name of the output."""
    reference: Any
    """The correct value."""
    first: Any
    """Value of the reference run; None if its answer is unreadable. Of dialogues, the last answer."""
    second: Any
    """Value of the other run."""
    better: str
    """The run that is right, or closer to the reference; empty if that is unknown."""


def disagreements(compared: ComparedRows, number: int) -> Iterator[Disagreement]:
    """Yield the rows and outputs with different values, in the order of the rows."""
    first, second = compared.evaluations[0], compared.evaluations[number]
    for index, (key, prompt) in enumerate(zip(first.keys, first.prompts, strict=True)):
        for output, column in first.outputs.items():
            other = second.outputs[output]
            if not (is_answered(first, column, index) and is_answered(second, other, index)):
                continue
            found, rights = (column.values[index], other.values[index]), (column.rights[index], other.rights[index])
            neither_readable = found == (None, None) and not compared.are_episodes and True not in rights
            if neither_readable or (found[0] == found[1] and rights[0] == rights[1]):
                continue
            side = closer(column, other, index)
            better = "" if side is None else compared.names[number if side else 0]
            shown = (column.values, other.values)
            if compared.are_episodes:
                shown = (first.answers, second.answers)
            values = [values[index] for values in shown]
            yield Disagreement(key, prompt, output, column.references[index], values[0], values[1], better)


def is_answered(evaluation: Evaluation, column: OutputColumn, index: int) -> bool:
    """Return whether a row has an answer, or was judged without one, as after an error.

    Args:
        evaluation: The results.
        column: One of its outputs.
        index: Index of the row.
    """
    return (evaluation.answers[index], column.values[index], column.rights[index]) != (None, None, None)


def closer(first: OutputColumn, second: OutputColumn, index: int) -> int | None:
    """Return 0 or 1 for the output that is right, or whose number is closer to the reference; None if unknown.

    Args:
        first: The output of the reference run.
        second: The output of the other run.
        index: Index of the row.
    """
    rights = first.rights[index], second.rights[index]
    if rights[0] != rights[1] and None not in rights:
        return int(bool(rights[1]))
    truth, mine, other = first.references[index], first.values[index], second.values[index]
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in (truth, mine, other)):
        return None
    errors = abs(mine - truth), abs(other - truth)
    return None if errors[0] == errors[1] else int(errors[1] < errors[0])


def balanced(rows: Sequence[Disagreement], most: int) -> list[Disagreement]:
    """Return some rows, in turns of which run is better; rows in which none is come last."""
    groups: dict[str, list[Disagreement]] = {}
    for row in rows:
        groups.setdefault(row.better, []).append(row)
    undecided = groups.pop("", [])
    turns = [row for rows in zip_longest(*groups.values()) for row in rows if row is not None]
    return [*turns, *undecided][:most]
