"""All rows of a run: training rows by index or as streams, and evaluation rows."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from partita.data.rows import Rows
from partita.data.splits import TRAINING, check_columns, is_streamed, open_splits
from partita.data.streams.opening import TrainingStreams, training_streams
from partita_schema.config import Config


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
        streams = training_streams(config, folder=folder, dataset=dataset)
    mixed = config.data.mix is not None and dataset is None
    return RunData(config, open_splits(config, folder=folder, dataset=dataset), streams, mixed)
