"""Readers of whole text files by format."""

from partita.data.formats.base import Reader
from partita.data.formats.csv import read_csv, read_tsv
from partita.data.formats.json import read_json, read_jsonl
from partita.data.formats.parlai import read_parlai
from partita.data.formats.txt import read_txt

READERS: dict[str, Reader] = {
    "csv": read_csv,
    "tsv": read_tsv,
    "json": read_json,
    "jsonl": read_jsonl,
    "txt": read_txt,
    "parlai": read_parlai,
}
