"""Readers of whole text files by format."""

from functools import partial

from partita.data.formats.base import DEFAULT_OPTIONS, Reader
from partita.data.formats.csv import read_cells
from partita.data.formats.json import read_json, read_jsonl
from partita.data.formats.parlai import read_parlai
from partita.data.formats.txt import read_txt

READERS: dict[str, Reader] = {
    "csv": partial(read_cells, default=",", options=DEFAULT_OPTIONS),
    "tsv": partial(read_cells, default="\t", options=DEFAULT_OPTIONS),
    "json": read_json,
    "jsonl": read_jsonl,
    "txt": read_txt,
    "parlai": read_parlai,
}
