"""Report on the ledger of a run or of a file of rows, with an example for each reason."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from partita.data.dialogue.expand import expanded, for_scores
from partita.data.ledger import LEDGER, QUARANTINE, Ledger, RowCounts, read_counts, read_quarantine
from partita.data.preview import preview_encoder
from partita.data.sources.sources import open_rows
from partita.data.splits import TRAINING, has_answers, is_streamed, open_splits
from partita.data.tokenized import encoded_chunks, note_chunk
from partita_schema.config import Config
from partita_schema.errors import DataError


@dataclass(frozen=True)
class LedgerReport:
    """Counts by split, and an example row for each reason."""

    splits: dict[str, RowCounts]
    examples: dict[tuple[str, str], str]
    """Key of the first row left out, by split and reason."""


def read_report(run: Path) -> LedgerReport:
    """Read the ledger of a run. Raise DataError if it has none."""
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
    """Read all rows and return the ledger that a run would start with; any number of rows may be bad.

    Raises:
        DataError: For streams, which are read during training, and for rows without answers.
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
            expanded_rows = expanded(rows, expander)
            ledger.leave_out_unreadable(expanded_rows.bad, split=split)
            for start, encoded in encoded_chunks(expanded_rows, encoder, options=config.data.loader, chunk=1000):
                note_chunk(expanded_rows, start, encoded, ledger, split=split)
        ledger.save()
        return read_report(Path(place))


def newest_run(runs: Path) -> Path:
    """Return the run whose ledger was written last. Raise DataError if there is none."""
    ledgers = sorted(runs.glob(f"*/{LEDGER}"), key=lambda path: path.stat().st_mtime)
    if not ledgers:
        raise DataError(
            f"there is no run with a {LEDGER} in {runs}; name the directory of a run, or a YAML file to read its data "
            "now"
        )
    return ledgers[-1].parent
