"""Parquet and Arrow. Rows by index are memory-mapped by `datasets`."""

import tempfile
from collections.abc import Sequence
from functools import partial
from hashlib import file_digest
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partita.data.formats.arrow_rows import BATCH, readable_rows
from partita.data.formats.base import FileFormat, FileOptions, FileSlice, opened
from partita.data.formats.datasets_loading import load_table
from partita.data.formats.table_files import open_parquet, readable, record_batches
from partita.data.formats.table_slices import read_arrow, read_parquet
from partita.data.rows import RowKeys, Rows, digest
from partita_schema.errors import DataError

if TYPE_CHECKING:
    import pyarrow


def open_tables(
    kind: str, paths: Sequence[str], names: Sequence[str], *, max_row_bytes: int, options: FileOptions
) -> Rows:
    """Return the rows of Parquet or Arrow files.

    Args:
        kind: Name of the format, and of its builder in `datasets`.
        paths: Paths or URLs.
        names: Name of each file in keys.
        max_row_bytes: Has no effect, since rows have no lines.
        options: Have no effect.
    """
    import datasets
    import pyarrow

    slices = [FileSlice(path, name, kind) for path, name in zip(paths, names, strict=True)]
    filled = [file_slice for file_slice in slices if has_rows(file_slice)]
    parts: list[Any]
    if all(map(has_known_types, filled)):
        parts = [load_table(kind, data_files=[one.path], split="train", label=one.label) for one in filled]
        join = datasets.concatenate_datasets
    else:
        parts = [read_mapped(one) for one in filled]
        join = partial(pyarrow.concat_tables, promote_options="default")
    sizes_by_name = {one.label: len(part) for one, part in zip(filled, parts, strict=True)}
    sizes = [sizes_by_name.get(name, 0) for name in names]
    if not any(sizes):
        raise DataError(f"{', '.join(names[:3])} has no rows")
    try:
        table = join(parts) if len(parts) > 1 else parts[0]
    except (ValueError, TypeError) as error:
        raise DataError(f"the files {', '.join(names[:3])} have different columns: {error}") from None
    files = np.repeat(np.arange(len(names)), sizes)
    numbers = np.concatenate([np.arange(1, size + 1) for size in sizes])
    keys = RowKeys(names, files, numbers)
    hashes = [hash_file(path) if "://" not in path else "" for path in paths]
    return readable_rows(table, keys, content=digest(*names, *hashes) if all(hashes) else None)


def has_rows(file_slice: FileSlice) -> bool:
    """Return whether a file has rows; `datasets` cannot read one without. Files that are not local are not checked.

    Raises:
        DataError: If the file does not have its format, or two of its columns have the same name.
    """
    if "://" in file_slice.path:
        return True
    with opened(file_slice.path, file_slice.label) as stream, readable(file_slice):
        if file_slice.kind == "parquet":
            return bool(open_parquet(stream, file_slice).metadata.num_rows)
        return any(batch.num_rows for batch in record_batches(stream, file_slice))


def has_known_types(file_slice: FileSlice) -> bool:
    """Return whether `datasets` can represent the types of all columns of a file with rows.

    Files that are not local are not checked.
    """
    import datasets

    if "://" in file_slice.path:
        return True
    with opened(file_slice.path, file_slice.label) as stream, readable(file_slice):
        if file_slice.kind == "parquet":
            schema = open_parquet(stream, file_slice).schema_arrow
        else:
            schema = next(record_batches(stream, file_slice)).schema
    try:
        datasets.Features.from_arrow_schema(schema)
    except Exception:  # a ValueError for an unknown type, or anything for damaged metadata of `datasets`
        return False
    return True


def read_mapped(file_slice: FileSlice) -> "pyarrow.Table":
    """Return the rows of a file without `datasets`, mapped from a copy in the temporary folder of the system.

    The copy has no name any more once it is mapped, and its space is free when the rows are.
    """
    import pyarrow

    with (
        tempfile.TemporaryDirectory(prefix="partita-") as folder,
        opened(file_slice.path, file_slice.label) as stream,
        readable(file_slice),
    ):
        copy = f"{folder}/rows.arrow"
        if file_slice.kind == "parquet":
            batches = open_parquet(stream, file_slice).iter_batches(batch_size=BATCH)
        else:
            batches = record_batches(stream, file_slice)
        first = next(batches)
        with pyarrow.OSFile(copy, "wb") as sink, pyarrow.ipc.new_stream(sink, first.schema) as writer:
            for batch in chain([first], batches):
                writer.write_batch(batch)
        return pyarrow.ipc.open_stream(pyarrow.memory_map(copy)).read_all()


def hash_file(path: str) -> str:
    with Path(path).open("rb") as stream:
        return file_digest(stream, "blake2b").hexdigest()


def row_ranges(path: str, label: str, number: int) -> list[tuple[int, int]]:
    """Return row ranges of similar length in a Parquet file."""
    file_slice = FileSlice(path, label, "parquet")
    with opened(path, label) as stream, readable(file_slice):
        rows = open_parquet(stream, file_slice).metadata.num_rows
    marks = [rows * index // number for index in range(number + 1)]
    return list(pairwise(marks))


PARQUET = FileFormat(
    "parquet",
    (".parquet",),
    open=partial(open_tables, "parquet"),
    read_slice=read_parquet,
    row_ranges=row_ranges,
    hub_builder="parquet",
)
ARROW = FileFormat("arrow", (".arrow",), open=partial(open_tables, "arrow"), read_slice=read_arrow, hub_builder="arrow")
