"""Metrics of a model on rows with known answers: the loss, and scores of generated answers."""

from dataclasses import dataclass

import torch

from partita.assembly import Assembly
from partita.data.encoded import EncodedRows
from partita.data.ledger import Ledger
from partita.data.loader import EvaluationBatches, evenly
from partita.data.rows import Rows
from partita.data.splits import check_columns
from partita.inference.metrics import Scorer, Scores
from partita.inference.predict import ShowProgress, answer_rows
from partita_schema.rows import row_schema
from partita_trainers.base import Metrics


@dataclass(frozen=True)
class Examination:
    """Rows of a split, checked and encoded once."""

    rows: Rows
    """The good rows."""
    encoded: EncodedRows
    """The same, encoded with their answers."""


def prepare(assembly: Assembly, rows: Rows, *, split: str, ledger: Ledger) -> Examination:
    """Check and encode rows with answers. Raises DataError where a column is missing, or too many rows are bad."""
    check_columns(rows, assembly.config, supervised=True)
    schema = row_schema(assembly.config, supervised=True)
    encoded = EncodedRows.build(rows, assembly.encoder, schema=schema, ledger=ledger, split=split)
    return Examination(rows=rows.select(encoded.places_N), encoded=encoded)


def mean_loss(assembly: Assembly, encoded: EncodedRows, *, batch_size: int) -> Metrics:
    """`loss`: mean cross-entropy a learned token, in nats. Without gradients, in evaluation mode."""
    lm = assembly.lm
    batches = EvaluationBatches(encoded, batch_size=batch_size, pad_token_id=lm.tokenizer.pad_token_id)
    total, count = 0.0, 0
    lm.module.eval()
    with torch.no_grad():
        for batch in batches:
            total += float(lm.loss(lm.module, batch))
            count += batch.loss_tokens
    return {"loss": total / count} if count else {}


def score(
    assembly: Assembly,
    rows: Rows,
    *,
    batch_size: int,
    max_rows: int | None = None,
    progress: ShowProgress | None = None,
) -> Scores:
    """Generate an answer for every row, or for `max_rows` at even distances, and compare it with the right one."""
    config = assembly.config
    chosen = evenly(len(rows), max_rows)
    asked = rows if len(chosen) == len(rows) else rows.select(chosen)
    schema = row_schema(config, supervised=True)
    answers = answer_rows(
        lm=assembly.lm,
        rows=asked,
        encoder=assembly.encoder,
        schema=row_schema(config, supervised=False),
        decoder=assembly.decoder,
        generation=assembly.generation,
        max_new_tokens=assembly.max_new_tokens,
        batch_size=batch_size,
        seed=config.seed if config.generation.seed is None else config.generation.seed,
        progress=progress,
        description="evaluating",
    )
    scorer = Scorer(config)
    for answer in answers:
        scorer.add(schema.load(asked.get([answer.row])[0]), answer)
    return scorer.scores()
