"""Stream Hub datasets, folders in their layout, and those that `save_to_disk` of `datasets` has written.

Parquet, Arrow and JSON lines are read file by file, so that resuming is fast. Other formats are read by `datasets`,
which reads its shards again up to a position, without decoding rows.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from partita.data.formats import FORMATS, format_of
from partita.data.formats.arrow_rows import rows_of_batch, table_row
from partita.data.formats.base import Position, StreamRow
from partita.data.formats.datasets_loading import quiet_datasets
from partita.data.rows import digest
from partita.data.sources.folders import is_saved, load_saved, name_files, refuse_saved_inside
from partita.data.streams.base import Stream
from partita.data.streams.files import FileStream
from partita_schema.errors import DataError
from partita_schema.sections.sources import HubSource

SHUFFLE_BUFFER = "BufferShuffled"
"""Part of the class names of iterables with a shuffle buffer in `datasets`."""
BATCH = 512
"""Rows that are decoded at a time."""
DIRECT = {file_format.hub_builder: name for name, file_format in FORMATS.items() if file_format.hub_builder}
"""Formats that are read without `datasets`, by the name of its builder."""


def open_hub_stream(source: HubSource, *, folder: Path, least_shards: int, max_row_bytes: int) -> Stream:
    """Return the stream of a Hub source.

    Args:
        source: The source.
        folder: Base of relative paths.
        least_shards: Minimum number of shards.
        max_row_bytes: Maximum size of a line in bytes; longer ones are bad rows.

    Raises:
        DataError: If there is no such dataset or split, or it cannot be read.
    """
    import datasets

    local = folder / Path(source.name).expanduser()
    if is_saved(local):
        table, name = load_saved(local, source)
        files = [str(file["filename"]) for file in table.cache_files]
        return FileStream("arrow", files, name=name, least_shards=least_shards, max_row_bytes=max_row_bytes)
    refuse_saved_inside(local, source.name)
    path = str(local) if local.is_dir() else source.name
    name = f"{Path(source.name).name}/{source.split}"
    with quiet_datasets():
        try:
            builder = datasets.load_dataset_builder(path, source.subset, revision=source.revision)
            files = data_files(builder, source.split)
            if files:
                kind = DIRECT[builder.name]
                return FileStream(kind, files, name=name, least_shards=least_shards, max_row_bytes=max_row_bytes)
            return DatasetsStream(builder.as_streaming_dataset(source.split), name=name, least_shards=least_shards)
        except DataError:
            raise
        except Exception as error:  # pyarrow, fsspec and the Hub client raise exceptions without a common base
            cause = error.__cause__ or error
            reason = " ".join(str(cause).split())[:500]
            advice = name_files(local, source.name) if local.is_dir() else ""
            raise DataError(f"{source.name} cannot be read: {type(cause).__name__}: {reason}{advice}") from error


def data_files(builder: Any, split: str) -> list[str]:
    """Return the files of a split that are read without `datasets`; empty if it is needed."""
    kind = DIRECT.get(builder.name)
    by_split = builder.config.data_files or {}
    files = [str(file) for file in by_split.get(split, ())]
    return files if kind is not None and all(format_of(file) == kind for file in files) else []


def has_shuffle_buffer(table: Any) -> bool:
    """Return whether a `datasets.IterableDataset` has a shuffle buffer, whose content its state does not hold."""
    seen, found = set[int](), [table]
    while found:
        part = found.pop()
        if isinstance(part, list | tuple):
            found += part
        elif type(part).__module__.startswith("datasets.iterable_dataset") and id(part) not in seen:
            seen.add(id(part))
            if SHUFFLE_BUFFER in type(part).__name__:
                return True
            found += vars(part).values()
    return False


class DatasetsStream:
    """Rows of a streaming `datasets` dataset; if it has too few shards, several shards share one.

    A position is the number of rows so far, the number of rows at an earlier batch, and the state of the dataset there.
    No state restores a shuffle buffer, so the rows of a dataset with one are read again up to a position.
    """

    def __init__(self, table: Any, *, name: str, least_shards: int, content: str = "") -> None:
        """Stream a dataset.

        Args:
            table: A `datasets.IterableDataset`.
            name: Name in the keys of rows.
            least_shards: Minimum number of shards.
            content: A hash of what identifies its rows, besides its name, version and features.
        """
        self._table = table
        self._saves_state = not has_shuffle_buffer(table)
        self._count = table.num_shards
        self._every = -(-least_shards // self._count)
        self.name = name
        checksums = sorted(str(item) for item in (table.info.download_checksums or {}).items())
        self.fingerprint = digest(
            name, str(self._count), str(table.info.version), str(table.features), *checksums, content
        )
        labels = [name] if self._count == 1 else [f"{name}/{shard}" for shard in range(self._count)]
        self.shards: Sequence[str] = [label for label in labels for _ in range(self._every)]
        """Label of each shard."""
        self.sizes: Sequence[float] = [1.0] * len(self.shards)
        """Shards count as equally long."""

    def read(self, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
        """Yield the rows of a shard from a position on. Raise DataError if it cannot be read."""
        own, first = divmod(shard, self._every)
        passed, begin, state = start if isinstance(start, list) else (0, 0, None)
        index = begin
        table = self._table.shard(num_shards=self._count, index=own).with_format("arrow")
        if state is not None:
            table.load_state_dict(state)
        for batch, after in self._batches(table):
            if index + batch.num_rows > passed:
                for number, row in enumerate(rows_of_batch(batch), start=index):
                    if number >= passed and number % self._every == first:
                        yield table_row(row, shard, number + 1), [number + 1, begin, state]
            index += batch.num_rows
            if after is not None:
                begin, state = index, after

    def _batches(self, table: Any) -> Iterator[tuple[Any, Any]]:
        """Yield batches of rows, each with the state after it; None if the state does not restore all rows."""
        try:
            for batch in table.iter(batch_size=BATCH):
                yield batch, table.state_dict() if self._saves_state else None
        except Exception as error:  # pyarrow, fsspec and the Hub client raise exceptions without a common base
            reason = " ".join(str(error).split())[:500]
            raise DataError(f"{self.name} cannot be read: {type(error).__name__}: {reason}") from error
