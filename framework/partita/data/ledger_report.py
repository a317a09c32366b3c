"""What became of the rows of a run, or of those of a file: the ledger, with an example of each reason."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from partita.data.dialogue.expand import expanded, for_scores
from partita.data.ledger import LEDGER, QUARANTINE, Ledger, RowCounts, read_counts, read_quarantine
from partita.data.preview import preview_encoder
from partita.data.reading.sources import open_rows
from partita.data.splits import TRAINING, has_answers, is_streamed, open_splits
from partita.data.tokenized import encoded_chunks, note_chunk
from partita_schema.config import Config
from partita_schema.errors import DataError


@dataclass(frozen=True)
class LedgerReport:
    """Counts by split, and a row for each reason."""

    splits: dict[str, RowCounts]
    examples: dict[tuple[str, str], str]
    """Key of the first row left out, by split and reason."""


def read_report(run: Path) -> LedgerReport:
    """The ledger of a run. Raises DataError where it has none."""
    if not (run / LEDGER).exists():
        raise DataError(
            f"{run} has no {LEDGER}: no rows were read in that run; name the directory of another run, or a YAML file "
            "to read its data now"
        )
    examples: dict[tuple[str, str], str] = {}
    for record in read_quarantine(run / QUARANTINE):
        for reason in record["reasons"]:
            examples.setdefault((record["split"], reason), record["key"])
    return LedgerReport(read_counts(run), examples)


def make_report(config: Config, *, folder: Path, dataset: Any = None) -> LedgerReport:
    """The ledger that a run of the file would begin with: all of its rows are read, none is too many to be bad.

    Raises DataError for streams, which are read while they are trained on, and for rows without answers.
    """
    if config.data.streaming and dataset is None:
        raise DataError(
            "a stream is read while it is trained on; name the directory of the run, or with --dataset some of its rows"
        )
    splits = open_splits(config, folder=folder, dataset=dataset)
    if is_streamed(config, dataset):
        limit = config.data.max_row_bytes
        splits = {TRAINING: open_rows(dataset, folder=Path.cwd(), max_row_bytes=limit), **splits}
    first = next(iter(splits.values()))
    without = [name for name, rows in splits.items() if not has_answers(rows, config)]
    if without:
        raise DataError(f"the {without[0]} rows have no answers, so none of them could be learned or scored")
    encoder = preview_encoder(config, first, folder=folder, supervised=True)
    with TemporaryDirectory() as place:
        ledger = Ledger(Path(place), max_bad_rows=1.0)
        for split, rows in splits.items():
            expander = encoder.expander
            if expander is not None and (split != TRAINING or config.trainer.type == "none"):
                expander = for_scores(expander)
            made = expanded(rows, expander)
            ledger.leave_out_unreadable(made.bad, split=split)
            for start, found in encoded_chunks(made, encoder, options=config.data.loader, chunk=1000):
                note_chunk(made, start, found, ledger, split=split)
        ledger.save()
        return read_report(Path(place))


def newest_run(runs: Path) -> Path:
    """The run whose ledger was written last. Raises DataError where there is none."""
    found = sorted(runs.glob(f"*/{LEDGER}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise DataError(
            f"there is no run with a {LEDGER} in {runs}; name the directory of a run, or a YAML file to read its data "
            "now"
        )
    return found[-1].parent
