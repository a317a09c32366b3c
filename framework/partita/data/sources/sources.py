"""Open a path, a glob, a Hub name or in-memory data as Rows.

Text formats store every row as JSON text. Parquet, Arrow and Hub datasets are typed and are read by the `datasets`
library, memory-mapped, through a cache that only this process uses, so that a changed file is never served from the
cache of an earlier run. Folders of `save_to_disk` are mapped where they are.
"""

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from partita.data.formats import EXTENSIONS, FORMATS, format_of
from partita.data.formats.arrow_rows import readable_rows
from partita.data.formats.base import MAX_ROW_BYTES, FileOptions, FileSlice
from partita.data.formats.csv import found_in_file
from partita.data.formats.datasets_loading import load_table
from partita.data.rows import RowKeys, Rows
from partita.data.sources.folders import is_saved, load_saved, name_files, refuse_saved_inside
from partita.data.sources.in_memory import open_custom, open_in_memory
from partita.data.sources.transcripts import ANSWERS, WantedRows, open_transcripts
from partita_schema.common.text import nearest
from partita_schema.errors import DataError, shortened
from partita_schema.sections.sources import CustomSource, FileSource, HubSource, SimulationSource, Source

if TYPE_CHECKING:
    import datasets

SHOWN_FILES = 10
"""Number of files of a source whose options are detected for a preview."""
MAX_NAME, MAX_PATH = 255, 4096
"""Bytes that file systems allow in a name and in a path."""


def open_rows(
    dataset: Any,
    *,
    folder: Path,
    name: str = "dataset",
    max_row_bytes: int = MAX_ROW_BYTES,
    wanted: WantedRows = ANSWERS,
) -> Rows:
    """Open anything that a user may pass as a dataset.

    Single bad rows are in `Rows.bad`.

    Args:
        dataset: A path or glob (relative to `folder`), a Hub name, a Source of the configuration, a pandas data frame,
            a dataset of `datasets` or torch, a generator function, a list of mappings or a mapping of lists.
        folder: Base of relative paths.
        name: Name in the keys of rows that have no file.
        max_row_bytes: Maximum size of a line in bytes; longer ones are bad rows.
        wanted: What transcripts of simulations are read for.

    Raises:
        DataError: If there is nothing to read, or none of it can be read.
    """
    if isinstance(dataset, Rows):
        return dataset
    dataset = named_source(dataset, folder=folder)
    if isinstance(dataset, FileSource):
        return open_files(dataset, folder=folder, max_row_bytes=max_row_bytes)
    if isinstance(dataset, HubSource):
        return open_hub(dataset, folder=folder)
    if isinstance(dataset, SimulationSource):
        return open_transcripts(dataset, paths=find_files(dataset.path, folder=folder), wanted=wanted)
    if isinstance(dataset, CustomSource):
        return open_custom(dataset, folder=folder, name=dataset.target.partition(":")[2])
    return open_in_memory(dataset, name=name)


@contextmanager
def errors_at(key: str) -> Iterator[None]:
    """Prefix a DataError with the key of the file that names the source; an empty key changes nothing."""
    try:
        yield
    except DataError as error:
        if not key:
            raise
        raise type(error)(f"{key}: {error}") from error.__cause__


def named_source(dataset: Any, *, folder: Path) -> Any:
    """Return the Source that a path, a Hub name or a mapping with `type` denotes; anything else unchanged."""
    if isinstance(dataset, str | Path):
        return source_of(str(dataset), folder=folder)
    if isinstance(dataset, Mapping) and isinstance(dataset.get("type"), str):
        return source_of_mapping(dataset)
    return dataset


def source_of(text: str, *, folder: Path) -> FileSource | HubSource:
    """Return the source that a string denotes: a path with a known file extension, else a folder or a Hub id."""
    if not text.strip():
        raise DataError("the path of the data is empty; write a path (is a variable of the command not set?)")
    check_path(text)
    kind = format_of(text)
    if kind is not None:
        return FileSource(type=kind, path=text)
    full_path = folder / Path(text).expanduser()
    if full_path.is_dir():
        return HubSource(type="hub", name=str(full_path))
    looks_like_file = full_path.exists() or glob.has_magic(text) or "://" in text or Path(text).is_absolute()
    if looks_like_file or re.search(r"\.[A-Za-z]{2,7}$", text) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text):
        known = ", ".join(sorted(extension[1:] for extension in EXTENSIONS))
        raise DataError(
            f"{text}: the file extension is not one of a known format; known are {known}. "
            f"For another ending write {{type: csv, path: ...}} with the format as type{in_braces(text)}"
        )
    return HubSource(type="hub", name=text)


def check_path(path: str) -> None:
    """Raise DataError if a path is not UTF-8, or longer than file systems allow: a text that was taken for a path."""
    try:
        sizes = [len(part.encode()) for part in (path, *Path(path).parts)]
    except UnicodeEncodeError:
        raise DataError(f"the path {path!a} is not UTF-8; rename the file or the folder") from None
    if sizes[0] > MAX_PATH or max(sizes[1:], default=0) > MAX_NAME:
        raise DataError(
            f"{shortened(path)} is too long for a path; to use texts that are in no file, pass a list of rows, such as "
            '[{"column": "text"}]'
        )


def source_of_mapping(mapping: Mapping[str, Any]) -> Source:
    """Return the source that a mapping describes."""
    try:
        source: Source = TypeAdapter(Source).validate_python(dict(mapping))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"the source {dict(mapping)} is wrong: {where}: {first['msg']}") from None
    return source


def open_files(source: FileSource, *, folder: Path, max_row_bytes: int = MAX_ROW_BYTES) -> Rows:
    """Return the rows of all files of a source, in the order of their names."""
    paths = find_files(source.path, folder=folder)
    options = options_of(source)
    return FORMATS[source.type].open(paths, short_names(paths), max_row_bytes=max_row_bytes, options=options)


def options_of(source: FileSource) -> FileOptions:
    """Return how the files of a source are written."""
    return FileOptions(
        encoding=source.encoding,
        delimiter=source.delimiter,
        quoting=source.quoting,
        header=source.header,
        sheet=source.sheet,
    )


def found_in_files(dataset: Any, *, folder: Path) -> Iterator[str]:
    """Yield the detected options of the first files of a dataset that differ from the default of their format.

    Args:
        dataset: A dataset as for `open_rows`. Only files are looked at.
        folder: Base of relative paths.

    Raises:
        DataError: If a file does not exist or cannot be read.
    """
    source = named_source(dataset, folder=folder)
    if not isinstance(source, FileSource):
        return
    paths = find_files(source.path, folder=folder)
    for path, label in zip(paths[:SHOWN_FILES], short_names(paths), strict=False):
        if text := found_in_file(FileSlice(path, label, source.type, options=options_of(source))):
            yield f"{label}: {text}"


def open_hub(source: HubSource, *, folder: Path) -> Rows:
    """Return the rows of a dataset on the Hub, or of a folder in its layout."""
    check_path(source.name)
    local = folder / Path(source.name).expanduser()
    if is_saved(local):
        table, name = load_saved(local, source)
    else:
        table, name = load_hub(source, local=local), f"{Path(source.name).name}/{source.split}"
    if not len(table):
        raise DataError(f"{source.name} has no rows in split {source.split}")
    return readable_rows(table, RowKeys.counted(name, len(table)), content=None)


def load_hub(source: HubSource, *, local: Path) -> "datasets.Dataset":
    """Return a split of a dataset on the Hub, or of `local` if this is a folder."""
    is_local = local.is_dir()
    refuse_saved_inside(local, source.name)
    try:
        return load_table(
            str(local) if is_local else source.name,
            name=source.subset,
            split=source.split,
            revision=source.revision,
            label=source.name,
            remote=not is_local,
        )
    except DataError as error:
        if not is_local:
            raise
        raise DataError(f"{error}{name_files(local, source.name)}") from error.__cause__


def find_files(path: str, *, folder: Path) -> list[str]:
    """Return the files that match a path or glob, sorted. URLs are opened by fsspec, anything else is local."""
    if "://" in path:
        return find_remote(path)
    check_path(path)
    full_path = str(folder / Path(path).expanduser())
    if Path(full_path).is_file():
        return [full_path]
    if glob.has_magic(path):
        matches = glob.glob(full_path, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        files = sorted(name for name in matches if Path(name).is_file())
        if not files:
            raise DataError(f"no file matches {path} in {shown_folder(folder)}")
        return files
    if Path(full_path).is_dir():
        raise DataError(f"{path} is a folder; write a glob such as {path.rstrip('/')}/*.jsonl")
    raise DataError(missing_file(path, Path(full_path)))


def local_files(dataset: Any, *, folder: Path) -> Iterator[Path]:
    """Yield the existing local files and folders that a dataset names; nothing is opened.

    Args:
        dataset: A dataset as for `open_rows`.
        folder: Base of relative paths.
    """
    with suppress(DataError):  # a source that cannot be read has no files
        source = named_source(dataset, folder=folder)
        if isinstance(source, HubSource) and (folder / source.name).is_dir():
            yield folder / source.name
        elif isinstance(source, FileSource | SimulationSource) and "://" not in source.path:
            yield from map(Path, find_files(source.path, folder=folder))


def find_remote(path: str) -> list[str]:
    import fsspec  # type: ignore[import-untyped] # it ships no types

    try:
        system, _, (inside, *_) = fsspec.get_fs_token_paths(path)
        files = sorted(system.glob(path)) if glob.has_magic(path) else [inside]
    except Exception as error:  # every file system raises its own exceptions
        raise DataError(f"{path} cannot be opened: {error}{missing(path, error)}") from error
    if not files:
        raise DataError(f"no file matches {path}")
    return [system.unstrip_protocol(name) for name in files]


def missing(path: str, error: Exception) -> str:
    """Return what to install if a missing package is why a URL cannot be opened."""
    web = path.startswith(("http://", "https://")) and isinstance(error, ImportError)
    return "; to read from the web, pip install aiohttp" if web else ""


def missing_file(path: str, full_path: Path) -> str:
    """Return the message for a missing file, with similar names or how to write an environment variable."""
    braces = in_braces(path)
    if not full_path.parent.is_dir():
        return f"{path} does not exist: there is no folder {full_path.parent}{braces}"
    near = nearest(full_path.name, sorted(entry.name for entry in full_path.parent.iterdir()))
    return f"{path} does not exist in {shown_folder(full_path.parent)}" + (
        f"; did you mean {' or '.join(near)}?" if near else braces
    )


def in_braces(path: str) -> str:
    """Return how to write the environment variable in a path; "" without one."""
    variable = re.search(r"\$(\w+)", path)
    return f"; for the environment variable, write ${{{variable[1]}}}" if variable else ""


def shown_folder(folder: Path) -> Path:
    """Return a folder for an error text: the path of the current folder instead of a dot."""
    return Path.cwd() if folder == Path() else folder


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the base names of files, with as many parent folders as needed to make them unique."""
    parts = [Path(path).parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)
