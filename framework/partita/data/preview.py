"""What a run reads: rendered rows with loss tokens marked, row lengths, and rows left out with their reasons."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from partita.data.batching.collate import evenly
from partita.data.column_checks import has_answers
from partita.data.dialogue import expanded
from partita.data.eval_rows import build_eval_rows
from partita.data.formatting.row_tokenizer import Example, RowTokenizer
from partita.data.labels import find_labels, rows_with_known_labels
from partita.data.ledger import (
    LEDGER,
    QUARANTINE,
    Ledger,
    RowCounts,
    accepted_if_exceeded,
    read_counts,
    read_quarantine,
)
from partita.data.rows import Rows
from partita.data.run_data import open_run_data
from partita.data.sources.sources import found_in_files, open_rows
from partita.data.sources.transcripts import WantedRows
from partita.data.splits import TRAINING, is_streamed, open_splits
from partita.data.tokenized import encoded_chunks, note_chunk
from partita.data.training_rows import configured_row_tokenizer
from partita.lm.model_config.encoders import heads_of_encoder
from partita_schema.config import Config
from partita_schema.dialogues.read import format_of
from partita_schema.errors import DataError
from partita_schema.rows import check_rows, row_schema
from partita_schema.sections.outputs import OutputFeature

MEASURED_ROWS = 1000
"""Number of evenly spaced training rows whose lengths are measured; of dialogues, all rows expanded from them."""


@dataclass(frozen=True)
class PreviewSpan:
    """A text span of consecutive tokens."""

    text: str
    in_loss: bool
    name: str = ""
    """What is said of an answer: chosen or rejected, or good or bad; empty if there is one answer without a label."""


@dataclass(frozen=True)
class PreviewRow:
    """One row as the model sees it, or why it cannot be used."""

    key: str
    pieces: tuple[PreviewSpan, ...] = ()
    tokens: int = 0
    loss_tokens: int = 0
    cut_tokens: int = 0
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preview:
    """The first rows, and the lengths of many."""

    rows: tuple[PreviewRow, ...]
    lengths: np.ndarray
    """Tokens of each measured row, prompt and answer together, without rows that cannot be used."""
    num_rows: int
    """Rows in the split; a dialogue counts as one. For a stream, the rows that were read."""
    left_out: Counter[str]
    """Number of measured rows that cannot be used, by their first reason."""
    unreadable: Counter[str]
    """Number of rows that could not be read, by the reason; they are not measured."""
    accepted: str | None
    """How many rows data.max_bad_rows accepts, if more are expected to be left out; else None."""
    limit: int | None
    """Maximum length of an example in tokens; None if there is none, or if it holds for each answer of a pair."""
    chat: bool
    """Whether the model's chat template is used."""
    supervised: bool
    """Whether the rows hold answers; if not, only prompts are shown."""
    head: str | None = None
    """What a head learns, in words; None without a head, where rows have loss tokens."""
    mode: str = ""
    """How dialogues become rows; empty for other rows."""
    formats: tuple[str, ...] = ()
    """Formats of the measured dialogues, the most frequent first."""
    files: tuple[str, ...] = ()
    """Detected options of files that differ from the default of their format, such as a delimiter."""
    streamed: bool = False
    """Whether there may be more rows."""
    chunk_length: int | None = None
    """Tokens of the chunks that rows are joined and cut into; None if they are not."""


def preview(config: Config, *, folder: Path, dataset: Any = None, count: int = 3) -> Preview:
    """Render the first `count` training rows and measure up to 1,000. Load no model weights.

    A row that training refuses, such as one without a loss token, is refused here with the same reason. Without
    training rows (`trainer: none`), evaluation rows are shown.

    Args:
        config: The configuration.
        folder: Base of relative paths in the configuration.
        dataset: Replaces `data.source`.
        count: Number of rows to render.

    Raises:
        DataError: If there are no rows, or columns are missing.
    """
    config = heads_of_encoder(config, folder=folder)
    data = open_run_data(config, folder=folder, dataset=dataset)
    rows = data.training if data.training is not None else next(iter(data.splits.values()))
    supervised = config.trains or has_answers(rows, config)
    schema = row_schema(config, supervised=supervised)
    labels = find_labels(config, rows if supervised else None)
    row_tokenizer = configured_row_tokenizer(config, rows, folder=folder, labels=labels, supervised=supervised)
    chosen = evenly(len(rows), MEASURED_ROWS)
    first, some = rows.select(range(min(count, len(rows)))), rows.select(chosen)
    formats = formats_of(some, config)
    if supervised:
        first, some = expanded(first, row_tokenizer.expander), expanded(some, row_tokenizer.expander)
    shown = preview_rows(first.select(range(min(count, len(first)))), row_tokenizer, schema, supervised=supervised)
    measured = preview_rows(some, row_tokenizer, schema, supervised=supervised)
    left_out = Counter(row.reasons[0] for row in measured if row.reasons)
    scale = len(rows) / max(1, len(chosen))
    num_others = sum(len(part) for part in data.splits.values() if part is not rows)
    return Preview(
        rows=tuple(shown),
        lengths=np.array([row.tokens for row in measured if not row.reasons]),
        num_rows=len(rows),
        left_out=left_out,
        unreadable=Counter(row.reason for row in rows.bad),
        accepted=accepted_if_exceeded(
            left_out.total() * scale + len(rows.bad),
            rows=round(len(measured) * scale) + len(rows.bad) + num_others,
            max_bad_rows=config.data.max_bad_rows,
        ),
        limit=None if config.output_features[0].has_pairs else row_tokenizer.max_length,
        chat=row_tokenizer.formatter.chat and formats != ("segments",),
        supervised=supervised,
        head=None if config.has_answer_texts else target_in_words(config.head_output),
        mode=mode_of(row_tokenizer, formats),
        formats=formats,
        files=tuple(files_found(config, folder=folder, dataset=dataset)),
        streamed=data.streams is not None,
        chunk_length=row_tokenizer.chunk_length,
    )


def target_in_words(output: OutputFeature | None) -> str:
    """Return what the head of an output learns, in words."""
    assert output is not None, "a model without a head learns answers"
    return {"words": "tags", "texts": "the matching text"}.get(output.head_reads, f"the {output.type}")


def files_found(config: Config, *, folder: Path, dataset: Any) -> Iterator[str]:
    """Yield the detected options of the files of training rows that differ from the default, file by file."""
    if dataset is not None:
        yield from found_in_files(dataset, folder=Path.cwd())
        return
    for source in (config.data.source, *(part.source for part in config.data.mix or ())):
        yield from found_in_files(source, folder=folder)


def formats_of(rows: Rows, config: Config) -> tuple[str, ...]:
    """Return the formats of dialogues, the most frequent first; none for other rows."""
    feature, options = config.dialogue_input, config.data.dialogue
    if feature is None:
        return ()
    names = Counter(
        format_of(row, column=feature.source_column, format_name=options.format, columns=options.columns)
        for chunk in rows.iterate()
        for row in chunk
    )
    return tuple(name for name, _ in names.most_common() if name is not None)


def mode_of(row_tokenizer: RowTokenizer, formats: Sequence[str]) -> str:
    """Return how dialogues become rows; empty for other rows."""
    expander = row_tokenizer.expander
    if expander is None:
        return "last_turn" if row_tokenizer.formatter.config.dialogue_input is not None else ""
    return "packed_dialogue" if tuple(formats) == ("segments",) and expander.packs_segments else expander.mode


def preview_rows(rows: Rows, row_tokenizer: RowTokenizer, schema: Any, *, supervised: bool) -> list[PreviewRow]:
    """Return rows as the model sees them, in order.

    Args:
        rows: The rows.
        row_tokenizer: Tokenizes the rows.
        schema: The marshmallow schema of a row.
        supervised: Whether the rows hold answers.
    """
    checked = check_rows(schema, rows.get(range(len(rows))))
    previews = {index: PreviewRow(rows.key(index), reasons=reasons) for index, reasons in checked.bad.items()}
    indices = list(checked.clean)
    clean, keys = list(checked.clean.values()), [rows.key(index) for index in indices]
    tokenizer = row_tokenizer.formatter.tokenizer
    if supervised:
        config = row_tokenizer.formatter.config
        output = config.head_output
        for index, key, row, example in zip(indices, keys, clean, row_tokenizer.encode_rows(clean, keys), strict=True):
            if not isinstance(example, Example):
                previews[index] = PreviewRow(key, reasons=(str(example),))
            elif output is None or config.scores_answers:
                names = names_of_answers(config, example.values)
                previews[index] = supervised_row(example, tokenizer, names=names)
            else:
                previews[index] = row_of_head(example, tokenizer, target=output.answer_text(row[output.name]))
    else:
        for index, prompt in zip(indices, row_tokenizer.encode_prompts(clean, keys), strict=True):
            reasons = (prompt.error,) if prompt.error else ()
            piece = PreviewSpan(prompt.text, False)
            previews[index] = PreviewRow(prompt.key, (piece,), len(prompt.input_ids), reasons=reasons)
    return [previews[index] for index in sorted(previews)]


def names_of_answers(config: Config, values: Sequence[float]) -> tuple[str, ...]:
    """Return what is said of the answers of a row with these values: chosen and rejected, or good or bad."""
    output = config.output_features[0]
    if output.has_pairs:
        return ("chosen", "rejected")
    return ("good" if values[0] else "bad",) if output.has_label else ()


def supervised_row(example: Any, tokenizer: Any, *, names: Sequence[str] = ()) -> PreviewRow:
    """Return a row in spans, decoded from the tokens that are trained on; `names` are those of the loss spans."""
    pieces, done = [], 0
    spans = *example.spans, (len(example.input_ids), len(example.input_ids))
    for (start, end), name in zip(spans, chain(names, repeat("")), strict=False):
        for ids, in_loss in ((example.input_ids[done:start], False), (example.input_ids[start:end], True)):
            if ids:
                pieces.append(PreviewSpan(tokenizer.decode(ids), in_loss, name if in_loss else ""))
        done = end
    loss_tokens = sum(end - max(start, 1) for start, end in example.spans)
    return PreviewRow(example.key, tuple(pieces), len(example.input_ids), loss_tokens, example.cut_tokens)


def row_of_head(example: Example, tokenizer: Any, *, target: str) -> PreviewRow:
    """Return a row for a head: the tokens that it reads, and the value that it learns in place of loss tokens."""
    pieces = PreviewSpan(tokenizer.decode(example.input_ids), False), PreviewSpan(target, True)
    return PreviewRow(example.key, pieces, len(example.input_ids), len(example.targets), example.cut_tokens)


def histogram(lengths: np.ndarray, *, bins: int = 10) -> list[tuple[int, int, int]]:
    """Return first length, last length and number of rows of bins of equal width."""
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // bins))
    starts = range(low, high + 1, width)
    inside = {start: (lengths >= start) & (lengths < start + width) for start in starts}
    return [(start, min(start + width - 1, high), int(marks.sum())) for start, marks in inside.items()]


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
    config = heads_of_encoder(config, folder=folder)
    if config.data.streaming and dataset is None:
        raise DataError(
            "a stream is read while it is trained on; name the directory of the run, or with --dataset some of its rows"
        )
    splits = open_splits(config, folder=folder, dataset=dataset)
    if is_streamed(config, dataset):
        limit, wanted = config.data.max_row_bytes, WantedRows.by(config)
        splits = {TRAINING: open_rows(dataset, folder=Path.cwd(), max_row_bytes=limit, wanted=wanted), **splits}
    first = next(iter(splits.values()))
    without = [name for name, rows in splits.items() if not has_answers(rows, config)]
    if without:
        raise DataError(f"the {without[0]} rows have no answers, so none of them could be learned or scored")
    labels = find_labels(config, first)
    row_tokenizer = configured_row_tokenizer(config, first, folder=folder, labels=labels)
    with TemporaryDirectory() as scratch:
        ledger = Ledger(Path(scratch), max_bad_rows=1.0)
        for split, rows in splits.items():
            if split != TRAINING:
                rows = rows_with_known_labels(rows, config, labels, ledger=ledger, split=split)
            if split != TRAINING or not config.trains:
                answers = build_eval_rows(rows, row_tokenizer.expander, config, labels, ledger=ledger, split=split)
                expanded_rows = answers.learned
            else:
                expanded_rows = expanded(rows, row_tokenizer.expander)
            ledger.leave_out_unreadable(expanded_rows.bad, split=split)
            for start, encoded in encoded_chunks(expanded_rows, row_tokenizer, options=config.data.loader, chunk=1000):
                note_chunk(expanded_rows, start, encoded, ledger, split=split)
        ledger.save()
        return read_report(Path(scratch))


def newest_run(runs: Path) -> Path:
    """Return the run whose ledger was written last. Raise DataError if there is none."""
    ledgers = sorted(runs.glob(f"*/{LEDGER}"), key=lambda path: path.stat().st_mtime)
    if not ledgers:
        raise DataError(
            f"there is no run with a {LEDGER} in {runs}; name the directory of a run, or a YAML file to read its data "
            "now"
        )
    return ledgers[-1].parent
