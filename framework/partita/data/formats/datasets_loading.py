"""Tables that `datasets` loads, without its output."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from partita_schema.errors import DataError

if TYPE_CHECKING:
    import datasets

UNKNOWN_SPLIT = re.compile(r"Unknown split \"[^\"]*\"\. Should be one of \[(.*)\]\.")
"""How `datasets` says that a folder or a Hub dataset has other splits."""


def load_table(
    path: str,
    *,
    label: str,
    split: str,
    data_files: list[str] | None = None,
    name: str | None = None,
    revision: str | None = None,
    remote: bool = False,
) -> "datasets.Dataset":
    """Load a table with `datasets.load_dataset`, without its output.

    Local files use a cache that is deleted afterwards; the table stays mapped. Hub datasets use the usual cache, which
    tracks their commits.

    Args:
        path: Name of a builder, of a Hub dataset or of a folder.
        label: Name in messages.
        split: The split.
        data_files: Files to read, for a builder.
        name: Subset of a Hub dataset.
        revision: Commit, branch or tag of a Hub dataset.
        remote: Whether `path` is on the Hub.

    Raises:
        DataError: If the table cannot be read.
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
        except Exception as error:  # pyarrow, fsspec and the Hub client raise exceptions without a common base
            cause = error.__cause__ or error
            reason = " ".join(str(cause).split())[:500]
            if there := UNKNOWN_SPLIT.fullmatch(reason):
                splits = there[1].replace("'", "")
                raise DataError(
                    f"{label} has no split {split}, only {splits}; write {{type: hub, name: {label}, split: ...}}"
                ) from error
            raise DataError(f"{label} cannot be read: {type(cause).__name__}: {reason}") from error
    return table


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Disable progress bars and log messages of `datasets` while in this context."""
    import datasets

    shown, verbosity = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if shown:
            datasets.enable_progress_bars()
