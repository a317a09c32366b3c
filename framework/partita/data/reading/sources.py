"""From a path, a glob, a Hub name or something in memory to Rows.

Text formats keep every row as the text that it is (spool.py). Parquet, Arrow and Hub data sets have types of their own
and are read by the `datasets` library, memory mapped, through a cache of this process alone, so that a file that
changed is never served from an older run.
"""

import glob
import gzip
import lzma
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from partita.data.reading.custom_source import open_custom
from partita.data.reading.in_memory import hash_rows, open_in_memory
from partita.data.reading.readers import READERS
from partita.data.reading.spool import SpoolWriter
from partita.data.reading.transcripts import open_transcripts
from partita.data.rows import BadRow, DatasetStore, RowKeys, Rows, digest
from partita_schema.errors import DataError
from partita_schema.nearest import nearest
from partita_schema.sources import CustomSource, FileSource, HubSource, SimulationSource, Source

if TYPE_CHECKING:
    import datasets

ENDINGS = {f".{kind}": kind for kind in (*READERS, "parquet", "arrow")} | {".ndjson": "jsonl", ".text": "txt"}
"""Format by ending of the file's name."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
"""Endings that may follow it, for text formats."""
BROKEN_START = 1000
"""A file whose first so many rows are all broken is refused as a whole."""


def open_rows(dataset: Any, *, folder: Path, name: str = "dataset") -> Rows:
    """Rows of whatever a user may call a data set.

    `dataset` is a path or glob (relative to `folder`), a Hub name, a Source of the file, a pandas frame, a
    `datasets.Dataset`, a list of mappings or a mapping of lists. `name` stands in the keys of rows that have no file.
    Raises DataError where there is nothing to read, or nothing of it can be read; single bad rows are in `Rows.bad`.
    """
    if isinstance(dataset, Rows):
        return dataset
    if isinstance(dataset, str | Path):
        dataset = source_of(str(dataset), folder=folder)
    elif isinstance(dataset, Mapping) and isinstance(dataset.get("type"), str):
        dataset = source_of_mapping(dataset)
    if isinstance(dataset, FileSource):
        return open_files(dataset, folder=folder)
    if isinstance(dataset, HubSource):
        return open_hub(dataset, folder=folder)
    if isinstance(dataset, SimulationSource):
        return open_transcripts(dataset, paths=find_files(dataset.path, folder=folder))
    if isinstance(dataset, CustomSource):
        return open_custom(dataset, folder=folder, name=dataset.target.partition(":")[2])
    return open_in_memory(dataset, name=name)


def source_of(text: str, *, folder: Path) -> FileSource | HubSource:
    """The source that a plain text stands for: a path whose ending tells the format, else a folder or a Hub id."""
    kind = format_of(text)
    if kind is not None:
        return FileSource(type=kind, path=text)
    place = folder / Path(text).expanduser()
    if place.is_dir():
        return HubSource(type="hub", name=str(place))
    looks_like_file = place.exists() or glob.has_magic(text) or "://" in text or Path(text).is_absolute()
    if looks_like_file or re.search(r"\.[A-Za-z]{2,7}$", text) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text):
        known = ", ".join(sorted(ending[1:] for ending in ENDINGS))
        raise DataError(
            f"{text}: the ending does not tell the format; known are {known}. "
            "For another ending write {type: csv, path: ...} with the format as type"
        )
    return HubSource(type="hub", name=text)


def source_of_mapping(mapping: Mapping[str, Any]) -> Source:
    """A source written as a mapping."""
    try:
        source: Source = TypeAdapter(Source).validate_python(dict(mapping))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"the source {dict(mapping)} is wrong: {where}: {first['msg']}") from None
    return source


def format_of(path: str) -> str | None:
    """The format that the ending tells, past an ending of a compression."""
    name = path.lower()
    for ending in COMPRESSIONS:
        name = name.removesuffix(ending)
    return ENDINGS.get(Path(name).suffix)


def open_files(source: FileSource, *, folder: Path) -> Rows:
    """Rows of all files of a source, in the order of their names."""
    paths = find_files(source.path, folder=folder)
    names = short_names(paths)
    if source.type in READERS:
        return open_text(source.type, paths, names)
    return open_typed(source.type, paths, names)


def find_files(path: str, *, folder: Path) -> list[str]:
    """Files that a path or glob stands for, sorted. URLs are opened by fsspec, everything else is local."""
    if "://" in path:
        return find_remote(path)
    place = str(folder / Path(path).expanduser())
    if Path(place).is_file():
        return [place]
    if glob.has_magic(path):
        matches = glob.glob(place, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        found = sorted(name for name in matches if Path(name).is_file())
        if not found:
            raise DataError(f"no file matches {path} in {folder}")
        return found
    if Path(place).is_dir():
        raise DataError(f"{path} is a folder; write a glob such as {path.rstrip('/')}/*.jsonl")
    raise DataError(missing_file(path, Path(place)))


def find_remote(path: str) -> list[str]:
    import fsspec  # type: ignore[import-untyped] # it ships no types

    try:
        system, _, (inside, *_) = fsspec.get_fs_token_paths(path)
        found = sorted(system.glob(path)) if glob.has_magic(path) else [inside]
    except Exception as error:  # every file system raises its own
        raise DataError(f"{path} cannot be opened: {error}{missing(path, error)}") from error
    if not found:
        raise DataError(f"no file matches {path}")
    return [system.unstrip_protocol(name) for name in found]


def missing(path: str, error: Exception) -> str:
    """What to install, where that is why a URL cannot be opened."""
    web = path.startswith(("http://", "https://")) and isinstance(error, ImportError)
    return "; to read from the web, pip install aiohttp" if web else ""


def missing_file(path: str, place: Path) -> str:
    """What is said of a file that is not there, with the nearest names that are."""
    if not place.parent.is_dir():
        return f"{path} does not exist: there is no folder {place.parent}"
    near = nearest(place.name, sorted(entry.name for entry in place.parent.iterdir()))
    return f"{path} does not exist in {place.parent}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def short_names(paths: Sequence[str]) -> list[str]:
    """Base names of files, with as many folders before them as it takes to tell them apart."""
    parts = [Path(path).parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def open_text(kind: str, paths: Sequence[str], names: Sequence[str]) -> Rows:
    """Rows of text files."""
    columns: dict[str, None] = {}
    bad: list[BadRow] = []
    with SpoolWriter() as spool:
        hashes = [spool_file(kind, path, (names[i], i), spool, columns, bad) for i, path in enumerate(paths)]
        if not len(spool):
            what = f"has no good row: {bad[0].key}: {bad[0].reason}" if bad else "has no rows"
            raise DataError(f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''} {what}")
        keys = RowKeys(names, np.array(spool.files), np.array(spool.numbers))
        store = spool.finish()
    return Rows(store, columns=list(columns), keys=keys, fingerprint=digest(*names, *hashes), bad=bad)


def spool_file(
    kind: str, path: str, name: tuple[str, int], spool: SpoolWriter, columns: dict[str, None], bad: list[BadRow]
) -> str:
    """Move a file's rows to the spool; returns a hash of all that was read."""
    import fsspec

    label, place = name
    state = blake2b(digest_size=16)
    before, broken = len(spool), 0
    known: tuple[str, ...] = ()
    try:
        with fsspec.open(path, "rb", compression="infer") as stream:
            for record in READERS[kind](stream, label):
                if record.reason:
                    broken += 1
                    key = f"{label}:{record.number}"
                    bad.append(BadRow(key, label, record.number, record.reason, record.raw, place=len(spool)))
                    state.update(f"{record.number}{record.raw}".encode())
                    if broken == BROKEN_START and len(spool) == before:
                        raise DataError(f"{label}: the first {BROKEN_START:,} rows are broken; {record.reason}")
                    continue
                spool.add(record.row, file=place, number=record.number)
                state.update(record.row)
                if record.columns != known:
                    known = record.columns
                    columns.update(dict.fromkeys(known))
    except (OSError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return state.hexdigest()


def open_typed(kind: str, paths: Sequence[str], names: Sequence[str]) -> Rows:
    """Rows of Parquet or Arrow files."""
    import datasets

    parts = [load(kind, data_files=[path], split="train", label=name) for path, name in zip(paths, names, strict=True)]
    try:
        table = datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    except (ValueError, TypeError) as error:
        raise DataError(f"the files {', '.join(names[:3])} have different columns: {error}") from None
    if not len(table):
        raise DataError(f"{', '.join(names[:3])} has no rows")
    sizes = [len(part) for part in parts]
    files = np.repeat(np.arange(len(parts)), sizes)
    numbers = np.concatenate([np.arange(1, size + 1) for size in sizes])
    keys = RowKeys(names, files, numbers)
    hashes = [hash_file(path) if "://" not in path else "" for path in paths]
    store = DatasetStore(table)
    content = digest(*names, *hashes) if all(hashes) else hash_rows(store)
    return Rows(store, columns=table.column_names, keys=keys, fingerprint=content)


def hash_file(path: str) -> str:
    with Path(path).open("rb") as stream:
        return file_digest(stream, "blake2b").hexdigest()


def open_hub(source: HubSource, *, folder: Path) -> Rows:
    """Rows of a data set on the Hub, or of a folder in its layout."""
    place = folder / Path(source.name).expanduser()
    name = str(place) if place.is_dir() else source.name
    label = Path(source.name).name
    table = load(
        name,
        name=source.subset,
        split=source.split,
        revision=source.revision,
        label=source.name,
        remote=name != str(place),
    )
    if not len(table):
        raise DataError(f"{source.name} has no rows in split {source.split}")
    store = DatasetStore(table)
    keys = RowKeys.counted(f"{label}/{source.split}", len(table))
    return Rows(store, columns=table.column_names, keys=keys, fingerprint=hash_rows(store))


def load(
    path: str,
    *,
    label: str,
    split: str,
    data_files: list[str] | None = None,
    name: str | None = None,
    revision: str | None = None,
    remote: bool = False,
) -> "datasets.Dataset":
    """A table by `datasets.load_dataset`, without its noise.

    Local files go through a cache that is gone afterwards; the table stays mapped. Hub data sets keep the usual cache,
    which knows their commits.
    """
    import datasets

    with quiet_datasets(), tempfile.TemporaryDirectory(prefix="partita-") as cache:
        try:
            table = datasets.load_dataset(
                path,
                name,
                split=split,
                data_files=data_files,
                revision=revision,
                cache_dir=None if remote else cache,
            )
        except Exception as error:  # pyarrow, fsspec and the Hub client raise trees of their own
            cause = error.__cause__ or error
            said = " ".join(str(cause).split())[:500]
            raise DataError(f"{label} cannot be read: {type(cause).__name__}: {said}") from error
    return table


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """No progress bars and no log lines of `datasets`, with its settings as before afterwards."""
    import datasets

    shown, verbosity = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if shown:
            datasets.enable_progress_bars()
