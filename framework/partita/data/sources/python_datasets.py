"""Datasets passed in Python: which objects are read by index, which are streams, and which hold several splits."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from partita_schema.errors import DataError

SPLIT_NAMES = {
    "train": "training",
    "training": "training",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "test": "test",
}
"""Names of splits in a `datasets.DatasetDict`, and ours."""


def kind_of(dataset: Any) -> tuple[str, str]:
    """Return the package and the class name of an object, without importing the package."""
    return type(dataset).__module__.split(".")[0], type(dataset).__name__


def is_hf_stream(dataset: Any) -> bool:
    """Return whether this is a `datasets.IterableDataset`."""
    package, name = kind_of(dataset)
    return package == "datasets" and name == "IterableDataset"


def is_stream(dataset: Any) -> bool:
    """Return whether an object yields rows from the first one only: an iterable dataset, or a generator function."""
    if is_hf_stream(dataset) or inspect.isgeneratorfunction(dataset):
        return True
    if isinstance(dataset, str | bytes | Mapping | Sequence) or hasattr(dataset, "__getitem__") != hasattr(
        dataset, "__len__"
    ):
        return is_torch_iterable(dataset)
    return isinstance(dataset, Iterable) and not hasattr(dataset, "__getitem__")


def is_torch_iterable(dataset: Any) -> bool:
    """Return whether this is a `torch.utils.data.IterableDataset`, whose base class has `__getitem__`."""
    return any(
        base.__name__ == "IterableDataset" and base.__module__.startswith("torch.") for base in type(dataset).__mro__
    )


def is_map_style(dataset: Any) -> bool:
    """Return whether rows are read by index, as from a torch map-style dataset."""
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
        split = SPLIT_NAMES.get(key)
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
        DataError: If the object can be read only once, such as a generator.
    """
    rows = dataset() if inspect.isgeneratorfunction(dataset) else dataset
    if rows is dataset and isinstance(dataset, Iterator):
        raise DataError(
            f"a {type(dataset).__name__} can be read only once; pass the function that creates it, without calling it"
        )
    return iter(rows)


class MapStore:
    """Rows of an object with `__len__` and `__getitem__`, such as a torch map-style dataset."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: np.ndarray) -> list[dict[str, Any]]:
        return [self.row(index) for index in indices.tolist()]

    def row(self, index: int) -> dict[str, Any]:
        """Return a row. Raise DataError if it is not a mapping."""
        row = self._dataset[index]
        if not isinstance(row, Mapping):
            raise DataError(
                f"item {index:,} of the {type(self._dataset).__name__} is a {type(row).__name__}; return a dict of "
                "column to value"
            )
        return {str(name): value for name, value in row.items()}
