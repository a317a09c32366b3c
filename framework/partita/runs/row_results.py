"""Results of each row of an evaluation: `RUN/evaluations/NAME.jsonl`, for reports and for comparisons of runs.

The first line describes the evaluation, each other line is a row. Rows have the same key in every run on the same data,
so that two runs can be compared row by row.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from partita.runs.files import new_file, strict_json
from partita_schema.common.checksums import parse_json
from partita_schema.errors import DataError

FOLDER = "evaluations"
BASE = "-base"
"""End of the name of an evaluation of the base model."""
FORMAT = 1
FINITE = json.JSONEncoder(allow_nan=False)
DIGEST_BYTES = 16
"""Bytes of the digest of a row."""


@dataclass(frozen=True)
class OutputResult:
    """The value of one output of a row, beside its reference."""

    reference: Any
    value: Any
    """None if the answer is unreadable or missing."""
    right: bool | None = None
    """Whether the metrics of the type count the value as right; None if they do not count right values."""
    scores: Mapping[str, float] | None = None
    """Log probabilities of the most probable labels and of those of the reference, if labels were scored."""


@dataclass(frozen=True)
class RowResult:
    """The result of one row."""

    key: str
    prompt: str = ""
    """The inputs as text, shortened."""
    answer: str | None = None
    """The generated text; None if no answer was generated."""
    loss: float | None = None
    """Mean loss of the row's loss tokens: the cross-entropy in nats, or the loss of the head. None if it was not
    computed, as by objectives that have no loss of a single row."""
    tokens: int | None = None
    """Number of the row's loss tokens."""
    outputs: Mapping[str, OutputResult] = field(default_factory=dict)
    """By output name; empty if no answer was generated."""


@dataclass(frozen=True)
class EvaluationHeader:
    """What was evaluated."""

    split: str
    model: Literal["result", "base"]
    """The model of the run, or the model before training."""
    fingerprint: str
    """Fingerprint of the rows; the same for the same rows in the same order, whatever the model."""
    step: int | None = None
    """Training step of the weights."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Type of each output, by name."""
    rows: int = 0
    """Number of rows in the file."""
    split_rows: int = 0
    """Number of rows of the split; more than `rows` if answers were generated for some of them only."""
    answered: bool = False
    """Whether answers were generated."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Metrics of the evaluation, as in the manifest: `loss` of all rows of the split, and `OUTPUT.METRIC`."""

    @property
    def completeness(self) -> tuple[bool, bool]:
        """Orders evaluations of a split: those with answers come after those without, and whole ones after parts."""
        return self.answered, self.rows >= self.split_rows

    format: int = FORMAT


def evaluation_path(run: Path, split: str, *, base: bool = False) -> Path:
    """Return where the row results of a split are in a run directory."""
    return run / FOLDER / f"{split}{BASE if base else ''}.jsonl"


def write_row_results(path: Path, header: EvaluationHeader, rows: Iterable[RowResult]) -> None:
    """Write the results of an evaluation; the file appears once it is complete.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        file.write(line_of(header))
        file.writelines(map(line_of, rows))


class RowSpool:
    """Rows that are collected in any order in a temporary file; at most N."""

    def __init__(self, file: IO[bytes], *, rows: int) -> None:
        """Start without rows.

        Args:
            file: An empty file, open for writing and reading.
            rows: N, the number of rows of the split.
        """
        self._file = file
        self._starts_N = np.full(rows, -1, dtype=np.int64)
        self._digests_N = np.zeros((rows, DIGEST_BYTES), dtype=np.uint8)

    def add(self, index: int, row: RowResult, *, content: bytes) -> None:
        """Add a row.

        Args:
            index: Index of the row in the split.
            row: Its result.
            content: The row as it is in the data, for the fingerprint.
        """
        self._starts_N[index] = self._file.tell()
        key = row.key.encode("utf-8", "surrogatepass")
        name = blake2b(len(key).to_bytes(8, "little") + key + content, digest_size=DIGEST_BYTES)
        self._digests_N[index] = np.frombuffer(name.digest(), dtype=np.uint8)
        self._file.write(line_of(row))

    def write(self, path: Path, header: EvaluationHeader) -> None:
        """Write the results in the order of the rows; the number of rows and the fingerprint are set here.

        Raises:
            OSError: A file cannot be written.
        """
        indices = np.flatnonzero(self._starts_N >= 0)
        fingerprint = blake2b(self._digests_N[indices].tobytes(), digest_size=16).hexdigest()
        header = replace(header, fingerprint=fingerprint, rows=len(indices), split_rows=len(self._starts_N))
        with new_file(path) as file:
            file.write(line_of(header))
            file.writelines(self._lines(indices))

    def _lines(self, indices: np.ndarray) -> Iterator[bytes]:
        """Yield the lines of rows. Those that follow each other in the file are read without seeking."""
        place = -1
        for start in self._starts_N[indices].tolist():
            if start != place:
                self._file.seek(start)
            line = self._file.readline()
            place = start + len(line)
            yield line


def recorded_header(path: Path) -> EvaluationHeader | None:
    """Return the description of recorded results; None if there are none that can be read."""
    try:
        return read_row_results(path)[0]
    except DataError:
        return None


def line_of(record: EvaluationHeader | RowResult) -> bytes:
    """Return a record as a line."""
    values = dict(vars(record))
    if isinstance(record, RowResult):
        values["outputs"] = {name: vars(output) for name, output in record.outputs.items()}
    try:
        text = FINITE.encode(values)  # several times as fast as what replaces NaN
    except ValueError:
        text = strict_json(values)
    return text.encode() + b"\n"


def read_row_results(path: Path) -> tuple[EvaluationHeader, Iterator[RowResult]]:
    """Read the results of an evaluation; the rows are read one by one.

    Raises:
        DataError: The file is missing, damaged, or from a newer version.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; evaluate the run again") from None
    with file:
        header = as_record(EvaluationHeader, file.readline(), path=path, line=1)
    if header.format > FORMAT:
        raise DataError(f"{path} was written by a newer partita (format {header.format}); update partita to read it")
    return header, read_rows(path)


def read_rows(path: Path) -> Iterator[RowResult]:
    """Yield the rows of a file of results. Raise DataError if a line is damaged."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number > 1:
                row = as_record(RowResult, line, path=path, line=number)
                outputs = {name: OutputResult(**output) for name, output in row.outputs.items()}
                yield RowResult(**{**vars(row), "outputs": outputs})


def as_record(kind: Any, text: bytes, *, path: Path, line: int) -> Any:
    """Return a line as a record.

    Args:
        kind: Class of the record.
        text: The line.
        path: The file, for the message.
        line: Number of the line, for the message.

    Raises:
        DataError: The line is damaged.
    """
    try:
        return kind(**parse_json(text))
    except (ValueError, TypeError):
        raise DataError(f"{path}, line {line}, is damaged; evaluate the run again") from None
