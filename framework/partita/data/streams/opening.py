"""Open the configured streams, and read their first rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from partita.data.batching.policies import Fixed, Policy
from partita.data.chunks import Unreadable, parsed
from partita.data.rows import ListStore, Rows, digest
from partita.data.sources.records import MAX_ROW_BYTES
from partita.data.sources.sources import source_of
from partita.data.streams.open import NamedStream, open_stream
from partita.data.streams.shard_group import ShardPlan
from partita_schema.config import Config
from partita_schema.errors import DataError
from partita_schema.sources import Source

SAMPLED_ROWS = 2048
"""Number of rows at the start of a stream from which lengths are estimated."""


@dataclass(frozen=True)
class TrainingStreams:
    """Streams that are read together."""

    sources: Sequence[Source]
    weights: Sequence[float]
    stop: str
    folder: Path
    """Base of relative paths."""
    seed: int
    names: Sequence[str] = ()
    """Names of the sources of a mix."""
    shuffle: bool = True
    """Whether the first rows are read in shuffled order."""
    max_row_bytes: int = MAX_ROW_BYTES
    """Maximum size of a line of a text file in bytes."""

    def plan(self, policy: Policy, *, lanes: int) -> ShardPlan:
        """Return the plan of `lanes` shard groups; each source has at least one shard per group if it can be split.

        Raises:
            DataError: If there is nothing to read.
        """
        streams = [
            open_stream(source, folder=self.folder, least_shards=lanes, max_row_bytes=self.max_row_bytes)
            for source in self.sources
        ]
        if self.names:
            streams = [NamedStream(stream, name=name) for stream, name in zip(streams, self.names, strict=True)]
        return ShardPlan(streams, self.weights, self.stop, lanes=lanes, seed=self.seed, policy=policy)

    def first_rows(self) -> Rows:
        """Return the readable rows at the start of the first epoch. Raise DataError if there are none."""
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
    """Return the streams of the training rows, or of a path or Hub name that replaces them.

    Args:
        config: The configuration.
        folder: Base of relative paths in the configuration.
        dataset: Replaces the configured sources; a relative path starts at the current folder.

    Raises:
        DataError: If a file extension does not identify a format.
    """
    mix, shuffle = config.data.mix, getattr(config.data.batching, "shuffle", True)
    if dataset is not None:
        source = source_of(str(dataset), folder=Path.cwd())
        return TrainingStreams(
            [source], [1.0], "all", Path.cwd(), config.seed, shuffle=shuffle, max_row_bytes=config.data.max_row_bytes
        )
    sources = [(part.source, part.weight) for part in mix] if mix else [(config.data.source, 1.0)]
    return TrainingStreams(
        [source_of(source, folder=folder) if isinstance(source, str) else source for source, _ in sources if source],
        [weight for _, weight in sources],
        config.data.stop,
        folder,
        config.seed,
        config.data.mix_names,
        shuffle=shuffle,
        max_row_bytes=config.data.max_row_bytes,
    )
