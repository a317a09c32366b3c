"""Reading of recorded row results in tests."""

from pathlib import Path

from partita.runs.row_results import OutputResult, RecordedRow
from partita_schema.common.checksums import parse_json


def read_rows(path: Path) -> list[RecordedRow]:
    """Return the rows of a file of results."""
    lines = [parse_json(line) for line in path.read_bytes().splitlines()[1:]]
    rows = [{**line, "outputs": {name: OutputResult(**one) for name, one in line["outputs"].items()}} for line in lines]
    return [RecordedRow(**row) for row in rows]
