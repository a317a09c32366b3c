"""Folders of data: those that `save_to_disk` of `datasets` has written, and what to write for the files of others."""

import glob
from pathlib import Path
from typing import TYPE_CHECKING

from partita.data.formats import format_of, is_compressed
from partita.data.formats.datasets_loading import quiet_datasets
from partita_schema.errors import DataError
from partita_schema.sections.sources import HubSource

if TYPE_CHECKING:
    import datasets

FILE_OF_SPLITS = "dataset_dict.json"
"""File in the folder of a saved `DatasetDict`."""
FILES_OF_DATASET = ("state.json", "dataset_info.json")
"""Files in the folder of a saved `Dataset`."""


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of a `datasets.Dataset` or `DatasetDict` has written a folder."""
    is_dataset = all((folder / name).is_file() for name in FILES_OF_DATASET)
    return is_dataset or (folder / FILE_OF_SPLITS).is_file()


def load_saved(folder: Path, source: HubSource) -> "tuple[datasets.Dataset, str]":
    """Return the rows of a folder of `is_saved`, memory-mapped, and their name in keys.

    Other files of the folder, such as those that `map` and `filter` cache there, are not read.

    Raises:
        DataError: If the folder cannot be read, has no such split, or the source has keys without effect.
    """
    import datasets

    label = folder.resolve().name
    for key in ("subset", "revision"):
        if getattr(source, key) is not None:
            raise DataError(f"{source.name} is a folder of save_to_disk, which has no {key}; remove {key}")
    with quiet_datasets():
        try:
            saved = datasets.load_from_disk(str(folder), keep_in_memory=False)
        except IndexError:  # there is no file with rows
            raise DataError(f"{source.name} has no rows") from None
        except Exception as error:  # pyarrow and fsspec raise exceptions without a common base
            reason = " ".join(str(error).split())[:500]
            raise DataError(f"{source.name} cannot be read: {type(error).__name__}: {reason}") from error
    if isinstance(saved, datasets.Dataset):
        if source.split not in ("train", str(saved.split)):
            raise DataError(f"{source.name} is a single dataset without splits; remove split: {source.split}")
        return saved, label
    if source.split not in saved:
        raise DataError(
            f"{source.name} has no split {source.split}, only {', '.join(saved)}; write {{type: hub, name: "
            f"{source.name}, split: ...}}"
        )
    return saved[source.split], f"{label}/{source.split}"


def refuse_saved_inside(folder: Path, label: str) -> None:
    """Raise DataError if a folder holds nothing but folders of `is_saved`: cached files in them would be read too.

    Args:
        folder: The folder, which may not exist.
        label: Its name in messages.
    """
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    inside = [path.name for path in paths if is_saved(path)]
    if inside and not any(path.is_file() and format_of(path.name) for path in paths):
        raise DataError(
            f"{label} is a folder of datasets that save_to_disk has written ({', '.join(inside[:3])}); write one of "
            f"them, such as {label.rstrip('/')}/{inside[0]}"
        )


def name_files(folder: Path, label: str) -> str:
    """Return the advice to name the files of a folder; empty if it has none of a known format.

    Args:
        folder: The folder.
        label: Its name in messages.
    """
    for pattern in ("*", "**/*"):
        names = glob.iglob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207 - Path.glob finds hidden files
        known = min((name for name in names if format_of(name) and (folder / name).is_file()), default=None)
        if known is not None:
            extension = "".join(Path(known).suffixes[-2 if is_compressed(known) else -1 :])
            return f"; to read its files as they are, write {label.rstrip('/')}/{pattern}{extension}"
    return ""
