"""All rows of a run: training rows by index or as streams, and evaluation rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from partita.data.batching.policies import Fixed, Policy
from partita.data.chunks import Unreadable, parsed
from partita.data.column_checks import check_columns
from partita.data.formats.base import MAX_ROW_BYTES, Position, StreamRow
from partita.data.rows import ListStore, Rows, digest
from partita.data.sources.python_datasets import splits_of
from partita.data.sources.sources import errors_at, find_files, options_of, source_of
from partita.data.splits import TRAINING, is_streamed, open_splits
from partita.data.streams.base import Stream
from partita.data.streams.custom import PassedSource, open_custom_stream
from partita.data.streams.files import FileStream
from partita.data.streams.hub import open_hub_stream
from partita.data.streams.shard_group import ShardPlan
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.load import load_config
from partita_schema.sections.batching import ChunkBatching
from partita_schema.sections.data import Data
from partita_schema.sections.sources import CustomSource, FileSource, HubSource, Source

FIRST_STREAM_ROWS = 2048
"""Number of rows at the start of a stream from which lengths are estimated."""


@dataclass(frozen=True)
class TrainingStreams:
    """Streams that are read together."""

    sources: Sequence[Source | PassedSource]
    weights: Sequence[float]
    stop: str
    folder: Path
    """Base of relative paths."""
    seed: int
    names: Sequence[str] = ()
    """Names of the sources of a mix."""
    keys: Sequence[str] = ("",)
    """Keys of the sources in the file, for error texts; empty for a source that is not in the file."""
    shuffle: bool = True
    """Whether the first rows are read in shuffled order."""
    max_row_bytes: int = MAX_ROW_BYTES
    """Maximum size of a line of a text file in bytes."""

    def plan(self, policy: Policy, *, num_groups: int, chunks: ChunkBatching | None = None) -> ShardPlan:
        """Plan `num_groups` shard groups; each source has at least one shard per group if it can be split.

        Args:
            policy: Cuts windows into batches.
            num_groups: Number of shard groups.
            chunks: How documents are joined and cut, for language modelling.

        Raises:
            DataError: If there is nothing to read.
        """
        streams = []
        for source, key in zip(self.sources, self.keys, strict=True):
            with errors_at(key):
                streams.append(
                    open_stream(source, folder=self.folder, least_shards=num_groups, max_row_bytes=self.max_row_bytes)
                )
        if self.names:
            streams = [NamedStream(stream, name=name) for stream, name in zip(streams, self.names, strict=True)]
        return ShardPlan(
            streams, self.weights, self.stop, num_groups=num_groups, seed=self.seed, policy=policy, chunks=chunks
        )

    def first_rows(self) -> Rows:
        """Return the readable rows at the start of the first epoch. Raise DataError if there are none."""
        plan = self.plan(Fixed(FIRST_STREAM_ROWS, shuffle_rows=self.shuffle), num_groups=1)
        read = plan.reader(0, epoch=0).take(FIRST_STREAM_ROWS)
        good, bad = parsed([Unreadable(row.reason, row.raw) if row.reason else row.row for _, row in read])
        if not good:
            names = ", ".join(stream.name for stream in plan.streams)
            first = next((reasons[0] for reasons in bad.values()), None)
            raise DataError(f"{names} has no good row: {first}" if first else f"{names} has no rows")
        columns = dict.fromkeys(str(name) for row in good.values() for name in row)
        return Rows(
            ListStore(list(good.values())),
            columns=list(columns),
            keys=plan.keys([read[index] for index in good]),
            fingerprint=digest(*(stream.fingerprint for stream in plan.streams)),
        )


def training_streams(config: Config, *, folder: Path, dataset: Any = None) -> TrainingStreams:
    """Return the streams of the training rows, or of a dataset that replaces them.

    Args:
        config: The configuration.
        folder: Base of relative paths in the configuration.
        dataset: Replaces the configured sources: a path or Hub name, where a relative path starts at the current
            folder, or an object of `is_stream`.

    Raises:
        DataError: If a file extension does not identify a format.
    """
    mix, shuffle = config.data.mix, getattr(config.data.batching, "shuffle", True)
    if dataset is not None:
        named = isinstance(dataset, str | Path)
        source = source_of(str(dataset), folder=Path.cwd()) if named else PassedSource(dataset)
        return TrainingStreams(
            [source], [1.0], "all", Path.cwd(), config.seed, shuffle=shuffle, max_row_bytes=config.data.max_row_bytes
        )
    sources = [part.source for part in mix] if mix else [config.data.source]
    return TrainingStreams(
        [source_of(source, folder=folder) if isinstance(source, str) else source for source in sources if source],
        config.data.mix_weights if mix else [1.0],
        config.data.stop,
        folder,
        config.seed,
        config.data.mix_names,
        [f"data.mix[{index}].source" for index in range(len(mix))] if mix else ["data.source"],
        shuffle=shuffle,
        max_row_bytes=config.data.max_row_bytes,
    )


@dataclass(frozen=True)
class RunData:
    """The opened rows of a run."""

    config: Config
    splits: dict[str, Rows]
    """Rows by split, without empty splits and without streamed training rows."""
    streams: TrainingStreams | None
    """The streamed training rows; None if rows are not streamed."""
    mixed: bool = False
    """Whether the rows come from a mix of sources."""

    @property
    def num_rows(self) -> dict[str, int]:
        """Number of rows of each split in `splits`."""
        return {split: len(rows) for split, rows in self.splits.items()}

    @cached_property
    def training(self) -> Rows | None:
        """The training rows, the first ones of streams; None if there are none.

        Raises:
            DataError: If a stream has no good row, or columns are missing.
        """
        if self.streams is None:
            return self.splits.get(TRAINING)
        rows = self.streams.first_rows()
        check_columns(rows, self.config, supervised=True)
        return rows

    def record(self) -> dict[str, dict[str, Any]]:
        """Return the number of rows and the fingerprint by split, as JSON; the length of streams is unknown."""
        splits = {split: {"rows": len(rows), "fingerprint": rows.fingerprint} for split, rows in self.splits.items()}
        if self.streams is None or self.training is None:
            return splits
        return {TRAINING: {"rows": None, "fingerprint": self.training.fingerprint}} | splits


def open_run_data(config: Config, *, folder: Path, dataset: Any = None) -> RunData:
    """Open the rows of a run.

    Args:
        config: The configuration.
        folder: Base of relative paths in the configuration.
        dataset: Replaces `data.source`; a path starts at the current folder and is streamed if `data.streaming` is set.

    Raises:
        DataError: As `open_splits` does.
    """
    streams = None
    if is_streamed(config, dataset):
        passed = splits_of(dataset)
        training = dataset if passed is None else passed[TRAINING]
        if not config.data.streaming:
            check_streaming(config)
        streams = training_streams(config, folder=folder, dataset=training)
    mixed = config.data.mix is not None and dataset is None
    return RunData(config, open_splits(config, folder=folder, dataset=dataset), streams, mixed)


def check_streaming(config: Config) -> None:
    """Raise ConfigError if a configuration does not support streamed training rows, which were passed in Python."""
    sections = config.model_dump(mode="json")
    sections["data"] |= {
        "mix": None,
        "stop": Data().stop,
        "source": {"type": "custom", "target": "passed:dataset", "streaming": True},
    }
    load_config(sections)


def open_stream(
    source: Source | PassedSource, *, folder: Path, least_shards: int, max_row_bytes: int = MAX_ROW_BYTES
) -> Stream:
    """Return the stream of a source. Nothing is read except file sizes and metadata.

    Args:
        source: The source.
        folder: Base of relative paths.
        least_shards: Minimum number of shards.
        max_row_bytes: Maximum size of a line in bytes; longer ones are bad rows.

    Raises:
        DataError: If there is nothing to read.
        ConfigError: If a user's class does not exist.
    """
    if isinstance(source, PassedSource):
        return source.open(name="dataset", least_shards=least_shards)
    if isinstance(source, FileSource):
        paths = find_files(source.path, folder=folder)
        return FileStream(
            source.type,
            paths,
            name=source.path,
            least_shards=least_shards,
            max_row_bytes=max_row_bytes,
            options=options_of(source),
        )
    if isinstance(source, HubSource):
        return open_hub_stream(source, folder=folder, least_shards=least_shards, max_row_bytes=max_row_bytes)
    if not isinstance(source, CustomSource):
        raise AssertionError(f"a source of type {source.type} is not streamed")
    return open_custom_stream(source, folder=folder, least_shards=least_shards)


class NamedStream:
    """A stream of a mix; its labels are prefixed with its name, as the keys of a mix are."""

    def __init__(self, stream: Stream, *, name: str) -> None:
        self._stream = stream
        self.name = name
        self.fingerprint = stream.fingerprint
        self.shards: Sequence[str] = [f"{name}/{label}" for label in stream.shards]
        """Label of each shard."""
        self.sizes = stream.sizes

    def read(self, shard: int, start: Position | None) -> Iterator[tuple[StreamRow, Position]]:
        """Yield the rows of a shard from a position on."""
        return self._stream.read(shard, start)
