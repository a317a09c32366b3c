"""Recorded row results and transcripts, read and written as a whole."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from partita.runs import row_results
from partita.runs.row_results import EvaluationHeader, OutputResult, RecordedRow
from partita.simulation import transcripts
from partita_schema.common.json_text import parse_json


def read_rows(path: Path) -> list[RecordedRow]:
    """Return the rows of a file of results."""
    lines = [parse_json(line) for line in path.read_bytes().splitlines()[1:]]
    rows = [{**line, "outputs": {name: OutputResult(**one) for name, one in line["outputs"].items()}} for line in lines]
    return [RecordedRow(**row) for row in rows]


def write_row_results(path: Path, header: EvaluationHeader, rows: Iterable[RecordedRow]) -> None:
    """Write the results of an evaluation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(row_results.line_of, [header, *rows])))


def write_transcript(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a transcript file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(transcripts.line_of, lines)))
