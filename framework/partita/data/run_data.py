"""All rows of a run: training rows by index or as streams, and those to evaluate on."""

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
    """The rows of a run, opened."""

    config: Config
    splits: dict[str, Rows]
    """Rows by split, those splits that have any; training rows are not among them where they are streamed."""
    streams: TrainingStreams | None
    """The training rows where they are read while they are trained on."""
    mixed: bool = False
    """Whether they are of the sources of a mix."""

    @cached_property
    def training(self) -> Rows | None:
        """The training rows, of streams the first ones; None where there are none.

        Raises DataError where a stream has no good row, or columns are missing.
        """
        if self.streams is None:
            return self.splits.get(TRAINING)
        rows = self.streams.first_rows()
        check_columns(rows, self.config, supervised=True)
        return rows

    def record(self) -> dict[str, dict[str, Any]]:
        """Rows and fingerprint by split, as JSON; the rows of streams are not known."""
        found = {split: {"rows": len(rows), "fingerprint": rows.fingerprint} for split, rows in self.splits.items()}
        if self.streams is None or self.training is None:
            return found
        return {TRAINING: {"rows": None, "fingerprint": self.training.fingerprint}} | found


def open_run_data(config: Config, *, folder: Path, dataset: Any = None) -> RunData:
    """The rows of a run; `dataset` takes the place of data.source, and is streamed where that is and it is a path.

    Relative paths of the file start at `folder`, one given as `dataset` at the current folder. Raises DataError as
    `open_splits` does.
    """
    streams = None
    if is_streamed(config, dataset):
        streams = training_streams(config, folder=folder, dataset=dataset)
    mixed = config.data.mix is not None and dataset is None
    return RunData(config, open_splits(config, folder=folder, dataset=dataset), streams, mixed)
