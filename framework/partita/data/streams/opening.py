"""The streams that a file names, and a look at their first rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from partita.data.chunks import Unreadable, parsed
from partita.data.planning.policies import Fixed, Policy
from partita.data.reading.records import MAX_ROW_BYTES
from partita.data.reading.sources import source_of
from partita.data.rows import ListStore, Rows, digest
from partita.data.streams.open import NamedStream, open_stream
from partita.data.streams.shard_group import ShardPlan
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.sources import Source

SAMPLED_ROWS = 2048
"""Rows at the beginning of a stream from which its lengths are told."""


@dataclass(frozen=True)
class TrainingStreams:
    """Streams that are read together."""

    sources: Sequence[Source]
    weights: Sequence[float]
    stop: str
    folder: Path
    """Where relative paths start."""
    seed: int
    names: Sequence[str] = ()
    """Names of the sources of a mix."""
    shuffle: bool = True
    """Whether the first rows are looked at in a shuffled order."""
    max_row_bytes: int = MAX_ROW_BYTES
    """Longest line of a text file."""

    def plan(self, policy: Policy, *, lanes: int) -> ShardPlan:
        """The lanes; each source has at least as many shards as there are lanes where it can be cut so finely.

        Raises DataError where there is nothing to read.
        """
        streams = [
            open_stream(source, folder=self.folder, least_shards=lanes, max_row_bytes=self.max_row_bytes)
            for source in self.sources
        ]
        if self.names:
            streams = [NamedStream(stream, name=name) for stream, name in zip(streams, self.names, strict=True)]
        return ShardPlan(streams, self.weights, self.stop, lanes=lanes, seed=self.seed, policy=policy)

    def first_rows(self) -> Rows:
        """The rows at the beginning of the first epoch that can be read. Raises DataError where there are none."""
        plan = self.plan(Fixed(SAMPLED_ROWS, shuffle_rows=self.shuffle), lanes=1)
        read = plan.reader(0, epoch=0).take(SAMPLED_ROWS)
        good, bad = parsed([Unreadable(row.reason, row.raw) if row.reason else row.row for _, row in read])
        if not good:
            names = ", ".join(stream.name for stream in plan.streams)
            first = next((reasons[0] for reasons in bad.values()), None)
            raise DataError(f"{names} has no good row: {first}" if first else f"{names} has no rows")
        columns = dict.fromkeys(str(name) for row in good.values() for name in row)
        return Rows(
            ListStore(list(good.values())),
            columns=list(columns),
            keys=plan.keys([read[place] for place in good]),
            fingerprint=digest(*(stream.fingerprint for stream in plan.streams)),
        )


def training_streams(config: Config, *, folder: Path, dataset: str | Path | None = None) -> TrainingStreams:
    """The streams of the training rows, or of a path or Hub name in their place.

    Relative paths of the file start at `folder`, those of `dataset` at the current folder. Raises DataError where an
    ending does not tell a format.
    """
    mix, shuffle = config.data.mix, getattr(config.data.batching, "shuffle", True)
    if dataset is not None:
        source = source_of(str(dataset), folder=Path.cwd())
        return TrainingStreams(
            [source], [1.0], "all", Path.cwd(), config.seed, shuffle=shuffle, max_row_bytes=config.data.max_row_bytes
        )
    written = [(part.source, part.weight) for part in mix] if mix else [(config.data.source, 1.0)]
    return TrainingStreams(
        [source_of(source, folder=folder) if isinstance(source, str) else source for source, _ in written if source],
        [weight for _, weight in written],
        config.data.stop,
        folder,
        config.seed,
        config.data.mix_names,
        shuffle=shuffle,
        max_row_bytes=config.data.max_row_bytes,
    )
