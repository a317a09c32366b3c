"""Datasets passed in Python: which objects are read by index, which are streams, and which hold several splits."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from partita.data.arrow_values import convert_rows, converters
from partita.data.rows import ListStore, digest, hash_rows
from partita.data.user_objects import error_of, errors_of
from partita_schema.errors import DataError, PartitaError

SPLIT_OF_NAME = {
    **dict.fromkeys(("0", "train", "training"), "training"),
    **dict.fromkeys(("1", "valid", "validation", "val", "dev", "eval"), "validation"),
    **dict.fromkeys(("2", "test", "testing"), "test"),
}
"""Names of splits, in a column of a fixed split and in a `datasets.DatasetDict`, and our name of each."""
HASHED_ROWS = 64
"""Rows at the start of a stream that identify its content."""


def kind_of(dataset: Any) -> tuple[str, str]:
    """Return the package and the class name of an object, without importing the package."""
    return type(dataset).__module__.split(".")[0], type(dataset).__name__


def is_hf_stream(dataset: Any) -> bool:
    """Return whether this is a `datasets.IterableDataset`."""
    return kind_of(dataset) == ("datasets", "IterableDataset")


def is_torch_iterable(dataset: Any) -> bool:
    """Return whether this is a `torch.utils.data.IterableDataset`, whose base class has `__getitem__`."""
    bases = type(dataset).__mro__
    return any(base.__name__ == "IterableDataset" and base.__module__.startswith("torch.") for base in bases)


def is_stream(dataset: Any) -> bool:
    """Return whether an object yields rows from the first one only: an iterable dataset, or a generator function."""
    if is_hf_stream(dataset) or is_torch_iterable(dataset) or inspect.isgeneratorfunction(dataset):
        return True
    if isinstance(dataset, str | bytes | Mapping | Sequence):
        return False
    return isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__")


def is_map_style(dataset: Any) -> bool:
    """Return whether rows are read by index with `__len__` and `__getitem__`, as from a torch map-style dataset."""
    if isinstance(dataset, str | bytes | Mapping | Sequence) or kind_of(dataset)[0] in ("pandas", "numpy", "datasets"):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not is_torch_iterable(dataset)


def splits_of(dataset: Any) -> dict[str, Any] | None:
    """Return the datasets by split of a `DatasetDict` or `IterableDatasetDict`; None for other objects.

    Raises:
        DataError: If the name of a split is unknown, or there are two of a kind.
    """
    package, name = kind_of(dataset)
    if package != "datasets" or not name.endswith("DatasetDict"):
        return None
    splits: dict[str, Any] = {}
    for key, part in dataset.items():
        split = SPLIT_OF_NAME.get(key)
        if split is None:
            raise DataError(
                f"split {key!r} of the {name} is none of train, validation and test; pass one dataset, such as "
                f"dataset[{key!r}], or rename it"
            )
        if split in splits:
            raise DataError(f"the {name} has two {split} splits; remove {key!r}")
        splits[split] = part
    return splits


def rows_of_stream(dataset: Any) -> Iterator[Any]:
    """Return an iterator over all rows from the first one.

    Raises:
        DataError: If the object can be read only once, such as a generator, or raises an exception itself.
    """
    refuse_iterator(dataset)
    with errors_of(name_of(dataset)):
        if is_hf_stream(dataset) and dataset.features is not None:
            convert = converters(dataset.features.arrow_schema)
            for row in dataset:
                convert_rows([row], convert)
                yield row
        else:
            yield from dataset() if inspect.isgeneratorfunction(dataset) else dataset


def refuse_iterator(dataset: Any) -> None:
    """Raise DataError for an object that can be read only once, such as a generator."""
    if isinstance(dataset, Iterator):
        raise DataError(
            f"an object of type {type(dataset).__name__} can be read only once; pass the function that creates it, "
            "without calling it"
        )


def name_of(dataset: Any) -> str:
    """Return the name of a function, or of the class of an object."""
    return str(getattr(dataset, "__name__", type(dataset).__name__))


def content_of_stream(dataset: Any) -> str:
    """Return a hash of what identifies a stream: its `fingerprint`, else its first rows.

    Other rows, or a shuffle without a seed, then count as changed data on resume.
    """
    named = getattr(dataset, "fingerprint", None)
    if isinstance(named, str):
        return digest(name_of(dataset), named)
    first = [row for row in islice(rows_of_stream(dataset), HASHED_ROWS) if isinstance(row, Mapping)]
    return digest(name_of(dataset), hash_rows(ListStore(first)))


class MapStore:
    """Rows of an object with `__len__` and `__getitem__`, such as a torch map-style dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.columns: dict[str, None] = {}
        """Columns of the rows that were read, in their order."""

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        return [self.row(index) for index in indices.tolist()]

    def row(self, index: int) -> dict[str, Any]:
        """Return a row. Raise DataError if it is not a mapping, or reading it raises an exception."""
        try:
            row = self._dataset[index]
        except PartitaError:
            raise
        except (Exception, SystemExit) as error:  # not in errors_of, which takes longer than reading most rows
            raise error_of(f"item {index:,} of {name_of(self._dataset)}", error) from error
        if not isinstance(row, Mapping):
            raise DataError(
                f"item {index:,} of {name_of(self._dataset)} is of type {type(row).__name__}; return a dict of column "
                "to value"
            )
        self.columns.update(dict.fromkeys(map(str, row)))
        return {str(name): value for name, value in row.items()}
