"""Datasets that a caller passes in Python: written once to the folder of the sweep, and read by every trial."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from partita.data.sources.python_datasets import kind_of, splits_of
from partita.data.sources.sources import open_rows
from partita.runs.files import new_file
from partita_schema.errors import DataError

FILE = ".sweep-rows.pickle"
"""No file of a user has this name: it is replaced, and removed at the end."""
PASSED = "passed in Python"
"""What sweep.json records instead of the rows, whose fingerprint is in the manifest of each run."""
KINDS = (("pandas", "DataFrame"), ("datasets", "Dataset"), ("datasets", "DatasetDict"))


def named_dataset(dataset: Any) -> Any:
    """Return a dataset as JSON: a name, or a source of the configuration; PASSED for rows."""
    if isinstance(dataset, Path):
        return str(dataset)
    is_name = dataset is None or isinstance(dataset, str)
    return dataset if is_name or is_source(dataset) else PASSED


def is_source(dataset: Any) -> bool:
    """Return whether this is a mapping that describes a source, such as `{"type": "csv", "path": "rows.csv"}`."""
    return isinstance(dataset, Mapping) and isinstance(dataset.get("type"), str)


def check_passed(dataset: Any) -> None:
    """Raise DataError for rows that other processes cannot read, and for what is no dataset."""
    if named_dataset(dataset) != PASSED:
        return
    if kind_of(dataset) not in KINDS and not isinstance(dataset, list | tuple | Mapping):
        raise DataError(
            f"dataset is a {type(dataset).__name__}, which the processes of trials cannot read; pass a pandas frame, a "
            "Dataset or DatasetDict of datasets, a list of dicts or a dict of lists, or write the rows to a file and "
            "pass its path"
        )
    for part in (splits_of(dataset) or {"": dataset}).values():
        open_rows(part, folder=Path.cwd())


@contextmanager
def written_rows(dataset: Any, folder: Path) -> Iterator[Path | None]:
    """Write rows to a file in the folder of the sweep, which exists in this context; None for a named dataset.

    Raises:
        DataError: The rows cannot be pickled.
    """
    if named_dataset(dataset) != PASSED:
        yield None
        return
    path = folder / FILE
    try:
        content = pickle.dumps(dataset)
    except Exception as error:  # PicklingError, or any error of a user's object
        message = f"the dataset cannot be sent to the processes of trials ({error}); write it to a file, and name that"
        raise DataError(message) from error
    with new_file(path) as file:
        file.write(content)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def read_rows(path: Path) -> Any:
    """Read the rows of `written_rows`, in a process that the command has started."""
    return pickle.loads(path.read_bytes())
