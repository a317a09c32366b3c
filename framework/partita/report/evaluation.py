"""The results of an evaluation by column, as reports need them."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from partita.runs.row_results import BASE, FOLDER, EvaluationHeader, read_header
from partita_schema.errors import DataError

CHUNK = 2000
"""Lines that are read at a time. Reading all at once keeps the garbage collector busy."""
NOTHING: Mapping[str, Any] = dict.fromkeys(("reference", "value", "right", "scores"))
"""The result of an output without an answer."""


@dataclass
class OutputColumn:
    """The values of one output. N rows."""

    type: str
    references: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    """None where the answer is unreadable or missing."""
    rights: list[bool | None] = field(default_factory=list)
    scores: list[Mapping[str, float] | None] = field(default_factory=list)
    """Log probability of the most probable labels, None where labels were not scored; may be empty if none were."""
    of_rows: list[Mapping[str, Any] | None] = field(default_factory=list)
    """What each row contributes to metrics, see `OutputResult.of_row`; may be empty if no row does."""

    @property
    def rights_N(self) -> np.ndarray:
        """1 where the value is right, 0 where it is wrong, NaN where that is not judged."""
        return np.array([math.nan if right is None else float(right) for right in self.rights])


@dataclass
class Evaluation:
    """The results of all rows of an evaluation. N rows."""

    header: EvaluationHeader
    keys: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    contexts: list[str] = field(default_factory=list)
    """What was said before the prompt; "" outside of dialogues."""
    answers: list[str | None] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)
    outputs: dict[str, OutputColumn] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def losses_N(self) -> np.ndarray:
        """Mean loss of each row; NaN where it was not computed."""
        return np.array([math.nan if loss is None else loss for loss in self.losses], dtype=np.float64)

    @property
    def tokens_N(self) -> np.ndarray:
        """Number of loss tokens of each row; 1 where it is not known."""
        return np.array([1 if tokens is None else tokens for tokens in self.tokens], dtype=np.float64)

    @property
    def all_right_N(self) -> np.ndarray:
        """Whether all outputs are right, as 1 or 0; NaN where that is not judged."""
        columns = [column.rights_N for column in self.outputs.values()]
        return np.prod(columns, axis=0) if columns else np.full(len(self), math.nan)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add lines of the file, column by column, which is twice as fast as row by row."""
        self.keys += [row["key"] for row in rows]
        self.prompts += [row["prompt"] for row in rows]
        self.contexts += [row.get("context", "") for row in rows]
        self.answers += [row["answer"] for row in rows]
        self.losses += [row["loss"] for row in rows]
        self.tokens += [row["tokens"] for row in rows]
        for name, column in self.outputs.items():
            outputs = [row["outputs"].get(name) or NOTHING for row in rows]
            column.references += [output["reference"] for output in outputs]
            column.values += [output["value"] for output in outputs]
            column.rights += [output["right"] for output in outputs]
            column.scores += [output["scores"] for output in outputs]
            column.of_rows += [output.get("of_row") for output in outputs]

    def select(self, indices: Sequence[int]) -> "Evaluation":
        """Return the rows of these indices, in their order."""

        def chosen(values: list[Any]) -> list[Any]:
            return [values[index] for index in indices]

        outputs = {
            name: OutputColumn(
                column.type,
                chosen(column.references),
                chosen(column.values),
                chosen(column.rights),
                chosen(column.scores) if column.scores else [],
                chosen(column.of_rows) if column.of_rows else [],
            )
            for name, column in self.outputs.items()
        }
        return Evaluation(
            self.header,
            chosen(self.keys),
            chosen(self.prompts),
            chosen(self.contexts),
            chosen(self.answers),
            chosen(self.losses),
            chosen(self.tokens),
            outputs,
        )


@dataclass(frozen=True)
class SplitResults:
    """The results of a split, and those of the base model on the same rows."""

    split: str
    result: Evaluation
    base: Evaluation | None = None
    """Rows in the order of those of `result`; None if the base model was not evaluated on the same rows."""


def read_evaluation(path: Path) -> Evaluation:
    """Read the results of an evaluation. Raise DataError if the file is damaged or of a newer version."""
    header = read_header(path)
    evaluation = Evaluation(header, outputs={name: OutputColumn(kind) for name, kind in header.outputs.items()})
    with path.open("rb") as file:
        file.readline()
        for start, lines in enumerated(file, size=CHUNK):
            try:
                evaluation.add(json.loads(b"[" + b",".join(lines) + b"]"))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                number = 2 + start + damaged_line(lines)
                raise DataError(f"{path}, line {number}, is damaged; evaluate the run again") from None
    return evaluation


def enumerated(file: IO[bytes], *, size: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the lines of a file in groups of `size`, each with the number of lines before it."""
    start = 0
    while lines := list(islice(file, size)):
        yield start, lines
        start += len(lines)


def damaged_line(lines: Sequence[bytes]) -> int:
    """Return the index of the first line that is no row."""
    for index, line in enumerate(lines):
        try:
            Evaluation(EvaluationHeader("", "result", "")).add([json.loads(line)])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return index
    return 0


def read_evaluations(folder: Path) -> list[SplitResults]:
    """Return the results of the splits that were evaluated: test rows first, then validation rows, then others."""
    paths = {path.stem: path for path in sorted((folder / FOLDER).glob("*.jsonl"))}
    order = {"test": 0, "validation": 1}
    splits = sorted((name for name in paths if not name.endswith(BASE)), key=lambda name: (order.get(name, 2), name))
    results = []
    for split in splits:
        evaluation = read_evaluation(paths[split])
        if len(evaluation):
            base = read_evaluation(paths[split + BASE]) if split + BASE in paths else None
            results.append(SplitResults(split, *paired(evaluation, base)))
    return results


def paired(result: Evaluation, base: Evaluation | None) -> tuple[Evaluation, Evaluation | None]:
    """Return the results of the base model in the order of the others; None if its rows are others."""
    if base is None or base.keys == result.keys:
        return result, base
    places = {key: index for index, key in enumerate(base.keys)}
    if any(key not in places for key in result.keys):
        return result, None
    return result, base.select([places[key] for key in result.keys])
