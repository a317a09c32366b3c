"""Rows to evaluate on: checked, and tokenized once for all ranks."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from partita.data.batching.documents import cut_pieces
from partita.data.column_checks import check_columns
from partita.data.eval_rows import build_eval_rows
from partita.data.formatting.formatter import answer_text
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.data.labels import rows_with_known_labels
from partita.data.ledger import Ledger
from partita.data.rows import Rows
from partita.data.token_cache import TokenCache
from partita.data.tokenized import TokenizedDataset, why_none_is_used
from partita.pipeline.build import AnyPipeline, Pipeline
from partita_schema.config import Config
from partita_schema.errors import NoUsableRowsError
from partita_schema.rows import check_rows, row_schema
from partita_trainers.process_group import ProcessGroup

TOKENS_OF_RANKS = ".tokens-"
"""Prefix of the temporary folders in which the ranks of a job share tokens."""


@dataclass(frozen=True)
class EvalDataset:
    """The rows of a split, checked and tokenized once."""

    rows: Rows
    """The valid rows, one per answer."""
    encoded: TokenizedDataset
    """The same rows, tokenized with their answers; one row per output of a dialogue turn answered in sequence, and for
    language modelling one per piece."""
    answer_of_N: np.ndarray
    """For each row in `encoded`, the index of its row in `rows`; -1 if another output of the same turn is unusable."""
    expected_N: np.ndarray | None = None
    """Indices of the rows whose answer the model should give; None for all. Answers that are labelled bad are in the
    loss, and generated ones are not compared with them."""

    @property
    def num_expected(self) -> int:
        """Number of rows whose answer the model should give."""
        return len(self.rows) if self.expected_N is None else len(self.expected_N)


def build_eval_dataset(pipeline: Pipeline, rows: Rows, *, split: str, ledger: Ledger) -> EvalDataset:
    """Check and tokenize labeled rows; a dialogue becomes one row per answer.

    Rows whose label is unknown are left out, because no answer can equal it.

    Args:
        pipeline: The model, tokenizer and decoder of the run.
        rows: Rows with answers.
        split: Name of the split in the ledger.
        ledger: Counts the rows that cannot be used.

    Raises:
        DataError: A column is missing, or too many rows are invalid.
        NoUsableRowsError: No row is left.
    """
    check_columns(rows, pipeline.config, supervised=True)
    known = rows_with_known_labels(rows, pipeline.config, pipeline.labels, ledger=ledger, split=split)
    encode = TokenizedDataset.build if pipeline.tokens is None else pipeline.tokens.encode
    if pipeline.config.plain_text and not pipeline.config.compares_answers:
        documents = encode(rows, replace(pipeline.row_tokenizer, max_length=None), ledger=ledger, split=split)
        rows = rows.select(documents.indices_N)
        pieces = evaluation_pieces(documents, pipeline.row_tokenizer, text_bytes=count_bytes(pipeline.config, rows))
        return EvalDataset(rows, pieces, np.searchsorted(documents.indices_N, pieces.indices_N))
    answers = build_eval_rows(
        known, pipeline.row_tokenizer.expander, pipeline.config, pipeline.labels, ledger=ledger, split=split
    )
    if len(rows) and not len(answers.learned):
        ledger.save()
        raise NoUsableRowsError(why_none_is_used(ledger, split=split), unknown_labels=True)
    encoded = encode(answers.learned, pipeline.row_tokenizer, ledger=ledger, split=split)
    usable = answers.usable(encoded.indices_N)
    number_of = np.full(len(answers.scored), -1)
    number_of[usable] = np.arange(len(usable))
    answer_of_N = number_of[answers.answer_of_N[encoded.indices_N]]
    expected_N = good_answers(encoded, answer_of_N) if pipeline.config.output_features[0].has_label else None
    return EvalDataset(answers.scored.select(usable), encoded, answer_of_N, expected_N)


def good_answers(encoded: TokenizedDataset, answer_of_N: np.ndarray) -> np.ndarray:
    """Return the indices of the answers that are labelled good, in order; see `LabelTokenizer`."""
    assert encoded.row_values_NK is not None
    good_N = answer_of_N[np.asarray(encoded.row_values_NK)[:, 0] > 0]
    return np.unique(good_N[good_N >= 0])


def evaluation_pieces(documents: TokenizedDataset, row_tokenizer: RowTokenizer, *, text_bytes: int) -> TokenizedDataset:
    """Cut documents into pieces of at most the length used in training, in which every token is predicted once."""
    length = row_tokenizer.chunk_length or row_tokenizer.max_length
    pieces = cut_pieces(documents, length, prefix=None if row_tokenizer.beginning else row_tokenizer.end)
    return replace(pieces, text_bytes=text_bytes)


def count_bytes(config: Config, rows: Rows) -> int:
    """Return the bytes of the documents in UTF-8."""
    schema = row_schema(config, supervised=True)
    chunks = (check_rows(schema, chunk).clean.values() for chunk in rows.iterate())
    return sum(len(answer_text(config, row).encode()) for chunk in chunks for row in chunk)


def remove_tokens(folder: Path) -> None:
    """Remove token folders that killed processes left in `folder`."""
    for left in folder.glob(f"{TOKENS_OF_RANKS}*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def tokens_made_once(process_group: ProcessGroup, pipeline: AnyPipeline, *, folder: Path) -> Iterator[AnyPipeline]:
    """Yield the pipeline of a run with a token cache in `folder`, so that one rank tokenizes for all ranks.

    It is yielded unchanged in a single process, and if the file asks for a persistent token cache.
    """
    if process_group.world_size == 1 or pipeline.tokens is not None:
        yield pipeline
        return

    def make_folder() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=TOKENS_OF_RANKS, dir=folder))

    shared_folder = process_group.run_on_rank_zero(make_folder, "a folder for tokens")
    try:
        yield replace(pipeline, tokens=TokenCache(shared_folder, lasting=False))
        process_group.all_gather_object(None, "tokens that are not needed any more")
    finally:
        if process_group.rank == 0:
            shutil.rmtree(shared_folder, ignore_errors=True)
