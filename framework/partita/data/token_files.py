"""Tokenized rows on disk: one file per array, written in chunks, read back memory-mapped.

The arrays are raw numbers in native byte order. contents.json holds their sizes and checksums, what they were made
from, and the ledger's counts. Neither writing nor reading holds more than a chunk in memory.
"""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import numpy as np

from partita.data.chunks import EncodedChunk
from partita.data.ledger import LEDGER, QUARANTINE
from partita.data.rows import RowKeys
from partita.data.tokenized import TokenizedDataset
from partita_schema.common.checksums import DamagedError, sealed, unsealed
from partita_schema.common.files import write_atomically

FORMAT = 7
"""Increased whenever the meaning of the files changes."""
CONTENTS = "contents.json"
ARRAYS: dict[str, np.dtype[Any]] = {
    "ids": np.dtype(np.int32),
    "starts": np.dtype(np.int64),
    "spans": np.dtype(np.int32),
    "span_starts": np.dtype(np.int64),
    "key_files": np.dtype(np.int32),
    "key_numbers": np.dtype(np.int64),
    "key_examples": np.dtype(np.int32),
    "indices": np.dtype(np.int64),
    "targets": np.dtype(np.float32),
    "row_values": np.dtype(np.float32),
}
"""Name and type of each array, as in TokenizedDataset and RowKeys. key_examples is empty if examples are not numbered,
targets if the model has no head, and row_values if rows have none."""
COUNTS = (LEDGER, QUARANTINE)
"""Files of the ledger in the same folder."""
BLOCK = 1 << 20
"""Bytes that are checksummed at a time."""


class DamagedTokens(ValueError):  # noqa: N818 -- it says what is damaged
    """The content of a folder is damaged, or was made from something else."""


class TokenWriter:
    """Write tokenized chunks to a folder. The folder is invalid before `finish`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = ExitStack()
        self._files = {name: self._open.enter_context((folder / name).open("wb")) for name in ARRAYS}
        self._sums = dict.fromkeys(ARRAYS, 0)
        self._ends = {"starts": 0, "span_starts": 0}
        self._branched = False
        self.rows = 0
        """Number of rows written."""
        for name in self._ends:
            self._write(name, np.zeros(1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def add(self, chunk: EncodedChunk, start: int, keys: RowKeys) -> None:
        """Write the examples of a chunk.

        Args:
            chunk: The tokenized chunk.
            start: Index of the chunk's first row among all rows.
            keys: Keys of all rows.
        """
        indices = chunk.indices + start
        chunk_keys = keys.take(indices)
        self._write("ids", chunk.ids)
        self._count("starts", chunk.lengths)
        self._write("spans", chunk.spans)
        self._count("span_starts", chunk.span_counts)
        self._write("key_files", chunk_keys.files)
        self._write("key_numbers", chunk_keys.numbers)
        if chunk_keys.examples is not None:
            self._write("key_examples", chunk_keys.examples)
        self._write("indices", indices)
        if chunk.targets is not None:
            self._write("targets", chunk.targets)
        if chunk.values is not None:
            self._write("row_values", chunk.values)
        self._branched |= chunk.branched
        self.rows += len(indices)

    def finish(
        self, *, names: tuple[str, ...], made_from: Mapping[str, str], fingerprint_inputs: Mapping[str, str]
    ) -> None:
        """Sync all arrays to disk and write contents.json; the ledger must be saved in the folder already.

        Args:
            names: Names of the files that the keys refer to.
            made_from: Everything that decides the tokens, by name.
            fingerprint_inputs: Inputs that decided the ids, by readable names.
        """
        sizes = {name: file.tell() for name, file in self._files.items()}
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._open.close()
        counts = {name: self._folder / name for name in COUNTS}
        sizes |= {name: path.stat().st_size for name, path in counts.items()}
        sums = self._sums | {name: file_crc(path) for name, path in counts.items()}
        contents = {
            "format": FORMAT,
            "rows": self.rows,
            "branched": self._branched,
            "made_from": dict(made_from),
            "fingerprint_inputs": dict(fingerprint_inputs),
            "names": list(names),
            "sizes": sizes,
            "sums": sums,
        }
        write_atomically(self._folder / CONTENTS, json.dumps(sealed(contents), indent=1))

    def _count(self, name: str, counts: np.ndarray) -> None:
        ends = self._ends[name] + np.cumsum(counts)
        if len(ends):
            self._ends[name] = int(ends[-1])
        self._write(name, ends)

    def _write(self, name: str, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array, dtype=ARRAYS[name]).tobytes()
        self._files[name].write(data)
        self._sums[name] = crc32(data, self._sums[name])


def read_tokens(folder: Path, *, made_from: Mapping[str, str]) -> TokenizedDataset:
    """Return the rows of a folder, memory-mapped, after checking every file against its checksum.

    Raises:
        FileNotFoundError: If there is no such folder.
        DamagedTokens: If it is incomplete or damaged, or was made from something else.
    """
    contents = read_contents(folder)
    if contents["made_from"] != dict(made_from):
        changed = [name for name, value in made_from.items() if contents["made_from"].get(name) != value]
        raise DamagedTokens(f"made from other {', '.join(changed) or 'things'}")
    for name in (*ARRAYS, *COUNTS):
        check_file(folder / name, contents)
    arrays = {name: mapped(folder / name) for name in ARRAYS}
    examples = arrays["key_examples"] if len(arrays["key_examples"]) else None
    targets, values = arrays["targets"], arrays["row_values"]
    rows = TokenizedDataset(
        ids_L=arrays["ids"],
        starts_Nplus1=arrays["starts"],
        loss_spans_S2=arrays["spans"].reshape(-1, 2),
        span_starts_Nplus1=arrays["span_starts"],
        keys=RowKeys(contents["names"], arrays["key_files"], arrays["key_numbers"], examples=examples),
        indices_N=arrays["indices"],
        fingerprint_inputs=contents["fingerprint_inputs"],
        branched=contents["branched"],
        row_values_NK=values.reshape(contents["rows"], -1) if len(values) else None,
    )
    return replace(rows, targets_NK=targets.reshape(int(rows.loss_tokens.sum()), -1)) if len(targets) else rows


def read_contents(folder: Path) -> dict[str, Any]:
    """Return contents.json of a folder. Raise FileNotFoundError without a folder, DamagedTokens if it is unreadable."""
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    try:
        contents = unsealed((folder / CONTENTS).read_bytes(), required=True)
    except OSError as error:
        raise DamagedTokens(f"{CONTENTS} cannot be read: {error}") from None
    except DamagedError as error:
        raise DamagedTokens(f"{CONTENTS} {error}") from None
    if contents.get("format") != FORMAT:
        raise DamagedTokens(f"format {contents.get('format')}, this partita reads {FORMAT}")
    return contents


def check_file(path: Path, contents: Mapping[str, Any]) -> None:
    """Raise DamagedTokens if a file differs from what was written."""
    expected = contents["sizes"][path.name]
    try:
        size = path.stat().st_size
        if size != expected:
            raise DamagedTokens(f"{path.name} has {size:,} bytes instead of {expected:,}")
        if file_crc(path) != contents["sums"][path.name]:
            raise DamagedTokens(f"{path.name} is not as it was written")
    except OSError as error:
        raise DamagedTokens(f"{path.name} cannot be read: {error.strerror}") from None


def mapped(path: Path) -> np.ndarray:
    """Memory-map an array; an empty file cannot be mapped."""
    kind = ARRAYS[path.name]
    return np.memmap(path, kind, mode="r") if path.stat().st_size else np.empty(0, kind)


def file_crc(path: Path) -> int:
    """Return the CRC-32 of a file. It is read, not mapped, since mapped pages count as this process's memory."""
    total = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            total = crc32(block, total)
    return total
