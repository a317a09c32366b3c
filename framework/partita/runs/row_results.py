"""Results of each row of an evaluation: `RUN/evaluations/NAME.jsonl`, for reports and for comparisons of runs.

The first line describes the evaluation, each other line is a row. Rows have the same key in every run on the same data,
so that two runs can be compared row by row.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from partita.runs.files import new_file, strict_json
from partita_schema.common.json_text import parse_json
from partita_schema.errors import DataError

FOLDER = "evaluations"
EARLIER = ".evaluations.earlier"
"""Folder with the results that a start of a run replaces, until it ends."""
BASE = "-base"
"""End of the name of an evaluation of the base model."""
FORMAT = 1
FINITE = json.JSONEncoder(allow_nan=False)
DIGEST_BYTES = 16
"""Bytes of the digest of a row."""
CONTENT_BYTES = 8
"""Bytes of `RecordedRow.content`."""


@dataclass(frozen=True)
class OutputResult:
    """The value of one output of a row, beside its reference."""

    reference: Any
    value: Any
    """None if the answer is unreadable or missing, or null in JSON."""
    right: bool | None = None
    """Whether the metrics of the type count the value as right; None if they do not count right values."""
    scores: Mapping[str, float] | None = None
    """Log probabilities of the most probable labels and of those of the reference, if labels were scored."""
    of_row: Mapping[str, Any] | None = None
    """What the row contributes to metrics that follow from reference and value only after a long computation, or not
    at all, by name: ROUGE and the counts of BLEU of a text, the query of a score, the rank of an embedding, the rewards
    and log-probabilities of a pair with its rejected answer, those of a labelled answer."""
    is_null: bool = False
    """Whether the value was read, and is null in JSON."""


@dataclass(frozen=True)
class RecordedRow:
    """The result of one row."""

    key: str
    prompt: str = ""
    """The inputs as text, shortened; of a dialogue the last user message."""
    answer: str | None = None
    """The generated text; None if no answer was generated."""
    loss: float | None = None
    """Mean loss of the row's loss tokens: the cross-entropy in nats, or the loss of the head. None if it was not
    computed, as by objectives that have no loss of a single row."""
    tokens: int | None = None
    """Number of the row's loss tokens."""
    outputs: Mapping[str, OutputResult] = field(default_factory=dict)
    """By output name; empty if no answer was generated."""
    context: str = ""
    """The turns of a dialogue before the prompt, of which the end is kept."""
    content: str = ""
    """Hash of all columns of the row. Rows with equal keys and different hashes come from different data."""


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
    num_labels: Mapping[str, int] = field(default_factory=dict)
    """Number of labels that were scored, by name of the output; a row may hold the scores of fewer."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Metrics of the evaluation, as in the manifest: `loss` of all rows of the split, and `OUTPUT.METRIC`."""

    @property
    def completeness(self) -> tuple[bool, bool, bool]:
        """Orders evaluations of a split: with a loss after without, with answers after without, whole after parts."""
        return completeness(self.metrics, answered=self.answered, is_whole=self.rows >= self.split_rows)

    format: int = FORMAT


def completeness(metrics: Collection[str], *, answered: bool, is_whole: bool) -> tuple[bool, bool, bool]:
    """Return what orders evaluations of a split, see `EvaluationHeader.completeness`.

    Args:
        metrics: Names of the metrics.
        answered: Whether answers were generated.
        is_whole: Whether all rows are recorded.
    """
    return "loss" in metrics, answered, is_whole


def evaluation_path(run: Path, split: str, *, base: bool = False) -> Path:
    """Return where the row results of a split are in a run directory."""
    return run / FOLDER / f"{split}{BASE if base else ''}.jsonl"


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

    def add(self, index: int, row: RecordedRow, *, content: bytes) -> None:
        """Add a row.

        Args:
            index: Index of the row in the split.
            row: Its result; the hash of its content is set here.
            content: The row as it is in the data.
        """
        self._starts_N[index] = self._file.tell()
        key = row.key.encode("utf-8", "surrogatepass")
        name = blake2b(len(key).to_bytes(8, "little") + key + content, digest_size=DIGEST_BYTES)
        self._digests_N[index] = np.frombuffer(name.digest(), dtype=np.uint8)
        hashed = blake2b(content, digest_size=CONTENT_BYTES).hexdigest()
        self._file.write(line_of(replace(row, content=hashed)))

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
        return read_header(path)
    except DataError:
        return None


def line_of(record: EvaluationHeader | RecordedRow) -> bytes:
    """Return a record as a line."""
    values = dict(vars(record))
    if isinstance(record, RecordedRow):
        values["outputs"] = {name: values_of(output) for name, output in record.outputs.items()}
        for name in ("context", "content"):
            if not values[name]:
                del values[name]
    try:
        text = FINITE.encode(values)  # several times as fast as what replaces NaN
    except ValueError:
        text = strict_json(values)
    return text.encode() + b"\n"


def values_of(output: OutputResult) -> dict[str, Any]:
    """Return the result of an output as JSON; `of_row` and `is_null` only if there is any."""
    values = dict(vars(output))
    if output.of_row is None:
        del values["of_row"]
    if not output.is_null:
        del values["is_null"]
    return values


def read_header(path: Path) -> EvaluationHeader:
    """Read the description of an evaluation, the first line of its file.

    Raises:
        DataError: The file is missing, damaged, or from a newer version.
    """
    try:
        with path.open("rb") as file:
            header = EvaluationHeader(**parse_json(file.readline()))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; evaluate the run again") from None
    except (ValueError, TypeError):
        raise DataError(f"{path}, line 1, is damaged; evaluate the run again") from None
    if header.format > FORMAT:
        raise DataError(f"{path} was written by a newer partita (format {header.format}); update partita to read it")
    return header
