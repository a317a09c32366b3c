"""The results of an evaluation by column, as reports need them."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic_core import from_json

from partita.runs.row_results import BASE, FOLDER, EvaluationHeader, read_header
from partita_schema.common.text import counted
from partita_schema.errors import DataError

BLOCK = 1 << 19
"""Bytes that are read at a time. Reading all at once keeps the garbage collector busy."""
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
    nulls: list[bool] = field(default_factory=list)
    """Whether the value of each row was read, and is null in JSON."""

    @property
    def rights_N(self) -> np.ndarray:
        """1 where the value is right, 0 where it is wrong, NaN where that is not judged."""
        return np.array(self.rights, dtype=np.float64)  # None becomes NaN


@dataclass
class Evaluation:
    """The results of all rows of an evaluation. N rows."""

    header: EvaluationHeader
    keys: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    contexts: list[str] = field(default_factory=list)
    """What was said before the prompt; "" outside of dialogues."""
    contents: list[str] = field(default_factory=list)
    """Hash of each row in the data; "" of a simulated dialogue."""
    answers: list[str | None] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)
    outputs: dict[str, OutputColumn] = field(default_factory=dict)
    numbers: dict[tuple[str, ...], np.ndarray | None] = field(default_factory=dict, compare=False)
    """Numbers of the objective that were read from the rows, by their names."""

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def losses_N(self) -> np.ndarray:
        """Mean loss of each row; NaN where it was not computed."""
        return np.array(self.losses, dtype=np.float64)  # None becomes NaN

    @property
    def tokens_N(self) -> np.ndarray:
        """Number of loss tokens of each row; 1 where it is not known."""
        return np.nan_to_num(np.array(self.tokens, dtype=np.float64), nan=1.0)

    @property
    def all_right_N(self) -> np.ndarray:
        """Whether all outputs are right, as 1 or 0; NaN where that is not judged."""
        columns = [column.rights_N for column in self.outputs.values()]
        return np.prod(columns, axis=0) if columns else np.full(len(self), math.nan)

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add lines of the file, column by column, which is twice as fast as row by row."""
        self.keys += map(itemgetter("key"), rows)
        self.prompts += map(itemgetter("prompt"), rows)
        self.contexts += [row.get("context", "") for row in rows]
        self.contents += [row.get("content", "") for row in rows]
        self.answers += map(itemgetter("answer"), rows)
        self.losses += map(itemgetter("loss"), rows)
        self.tokens += map(itemgetter("tokens"), rows)
        results = list(map(itemgetter("outputs"), rows))
        for name, column in self.outputs.items():
            outputs = [result.get(name) or NOTHING for result in results]
            column.references += map(itemgetter("reference"), outputs)
            column.values += map(itemgetter("value"), outputs)
            column.rights += map(itemgetter("right"), outputs)
            column.scores += map(itemgetter("scores"), outputs)
            column.of_rows += [output.get("of_row") for output in outputs]
            column.nulls += [output.get("is_null", False) for output in outputs]

    def expected(self) -> "Evaluation":
        """Return the rows whose answer the model should give: not those whose answer is labelled bad."""
        is_good = self.numbers_of(("is_good",))
        return self if is_good is None or is_good.all() else self.select(np.flatnonzero(is_good[:, 0]).tolist())

    def numbers_of(self, names: tuple[str, ...]) -> np.ndarray | None:
        """Return numbers of the objective by row, [N, names]; None unless all rows have them."""
        if names not in self.numbers:
            self.numbers[names] = self._read_numbers(names)
        return self.numbers[names]

    def _read_numbers(self, names: tuple[str, ...]) -> np.ndarray | None:
        columns = list(self.outputs.values())
        rows: list[Any] = columns[0].of_rows if len(columns) == 1 else []
        if len(rows) != len(self) or not rows:
            return None
        try:
            return np.array(list(map(itemgetter(*names), rows)), dtype=np.float64).reshape(len(rows), len(names))
        except (KeyError, TypeError):
            return None

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
                chosen(column.nulls),
            )
            for name, column in self.outputs.items()
        }
        return Evaluation(
            self.header,
            chosen(self.keys),
            chosen(self.prompts),
            chosen(self.contexts),
            chosen(self.contents),
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
    """Read the results of an evaluation. Raise DataError if the file is damaged, cut or of a newer version."""
    header = read_header(path)
    evaluation = Evaluation(header, outputs={name: OutputColumn(kind) for name, kind in header.outputs.items()})
    with path.open("rb") as file:
        file.readline()
        for block in blocks_of_lines(file, size=BLOCK):
            before = 1 + len(evaluation)
            try:
                evaluation.add(parse_results(block))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                number = before + 1 + damaged_line(block.splitlines())
                raise DataError(f"{path}, line {number}, is damaged; evaluate the run again") from None
    if len(evaluation) < header.rows:
        rows = counted(header.rows, "row")
        raise DataError(
            f"{path} is damaged: its first line says {rows}, but only {len(evaluation):,} of them follow; evaluate the "
            "run again"
        )
    return evaluation


def parse_results(block: bytes) -> list[Any]:
    """Return the rows in whole lines of the file. Raise ValueError if a line is damaged."""
    # A line break is only at the end of a line, because JSON escapes it in texts.
    text = b"[" + block.removesuffix(b"\n").replace(b"\n", b",") + b"]"
    try:
        rows: list[Any] = from_json(text, cache_strings="keys")  # twice as fast as the module json
    except ValueError:  # it refuses halves of surrogate pairs
        rows = json.loads(text)
    return rows


def blocks_of_lines(file: IO[bytes], *, size: int) -> Iterator[bytes]:
    """Yield whole lines of a file, about `size` bytes at a time; the last one may have no line break."""
    rest = b""
    while block := file.read(size):
        lines, newline, rest = (rest + block).rpartition(b"\n")
        if newline:
            yield lines + newline
    if rest:
        yield rest


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
    if base is None or (base.keys == result.keys and base.contents == result.contents):
        return result, base
    places = {row: index for index, row in enumerate(zip(base.keys, base.contents, strict=True))}
    rows = list(zip(result.keys, result.contents, strict=True))
    if any(row not in places for row in rows):
        return result, None
    return result, base.select([places[row] for row in rows])
