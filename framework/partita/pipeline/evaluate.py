"""Evaluation on labeled rows: the loss, and metrics of generated answers."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from partita.data.batching.evaluation_batches import EvaluationBatches, evenly
from partita.data.dialogue.expand import expanded, for_scores
from partita.data.ledger import Ledger
from partita.data.rows import Rows
from partita.data.sources.mixed import places_by_source
from partita.data.splits import check_columns
from partita.data.token_cache import TokenCache
from partita.data.tokenized import TokenizedDataset
from partita.generation.oom_backoff import BatchLimit, run_with_oom_backoff
from partita.generation.predict import ShowProgress, generate_for_rows
from partita.generation.predictions import answer_of
from partita.outputs.metrics import OutputScores, Scorer
from partita.pipeline.build import EndpointPipeline, Pipeline, RayPipeline
from partita_schema.counted import counted
from partita_schema.data import Data
from partita_schema.errors import OutOfMemory
from partita_schema.rows import row_schema
from partita_trainers.base import Batch, LanguageModel, Metrics
from partita_trainers.batch_size.memory import attempt
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

TOKENS_OF_RANKS = ".tokens-"
"""Prefix of the temporary folders in which the ranks of a job share tokens."""

AnyParts = TypeVar("AnyParts", bound=Pipeline | EndpointPipeline | RayPipeline)


@dataclass(frozen=True)
class EvalDataset:
    """The rows of a split, checked and tokenized once."""

    rows: Rows
    """The valid rows."""
    encoded: TokenizedDataset
    """The same rows, tokenized with their answers."""


def build_eval_dataset(
    pipeline: Pipeline | EndpointPipeline | RayPipeline, rows: Rows, *, split: str, ledger: Ledger
) -> EvalDataset:
    """Check and tokenize labeled rows; a dialogue becomes one row per answer.

    Args:
        pipeline: The parts of the run.
        rows: Rows with answers.
        split: Name of the split in the ledger.
        ledger: Counts the rows that cannot be used.

    Raises:
        DataError: A column is missing, or too many rows are invalid.
    """
    check_columns(rows, pipeline.config, supervised=True)
    if pipeline.encoder.expander is not None:
        rows = expanded(rows, for_scores(pipeline.encoder.expander))
    encode = TokenizedDataset.build if pipeline.tokens is None else pipeline.tokens.encode
    encoded = encode(rows, pipeline.encoder, ledger=ledger, split=split)
    return EvalDataset(rows=rows.select(encoded.indices_N), encoded=encoded)


def remove_tokens(folder: Path) -> None:
    """Remove token folders that killed processes left in `folder`."""
    for left in folder.glob(f"{TOKENS_OF_RANKS}*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def tokens_made_once(process_group: ProcessGroup, parts: AnyParts, *, folder: Path) -> Iterator[AnyParts]:
    """Yield the parts of a run with a token cache in `folder`, so that one rank tokenizes for all ranks.

    The parts are yielded unchanged in a single process, and if the file asks for a persistent token cache.
    """
    if process_group.world_size == 1 or parts.tokens is not None:
        yield parts
        return

    def make_place() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=TOKENS_OF_RANKS, dir=folder))

    place = process_group.run_on_rank_zero(make_place, "a place for tokens")
    try:
        yield replace(parts, tokens=TokenCache(place, lasting=False))
        process_group.all_gather_object(None, "tokens that are not needed any more")
    finally:
        if process_group.rank == 0:
            shutil.rmtree(place, ignore_errors=True)


def mean_loss(
    pipeline: Pipeline,
    encoded: TokenizedDataset,
    *,
    batch_size: int,
    limit: BatchLimit | None = None,
    data: Data | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Metrics:
    """Compute `loss`, the mean cross-entropy per loss token in nats, in evaluation mode without gradients.

    A batch that runs out of memory is halved, and so are the batches after it. The ranks of `process_group` share the
    rows and return the same metrics.

    Args:
        pipeline: The parts of the run.
        encoded: Tokenized rows with loss tokens.
        batch_size: Rows per batch.
        limit: Upper bound on the rows per batch; lowered when memory runs out.
        data: The `data` section of a mix; adds `loss/SOURCE` for each source.
        process_group: The ranks that share the rows.

    Raises:
        OutOfMemory: A single row does not fit.
    """
    lm = pipeline.lm
    lm.check_loss()
    limit = BatchLimit(batch_size) if limit is None else limit
    indices_by_source = places_by_source(data, encoded.keys) if data is not None else {}
    groups = indices_by_source or {"": np.arange(len(encoded))}
    sums = dict.fromkeys(groups, 0.0)
    counts = dict.fromkeys(groups, 0)
    lm.module.eval()
    with torch.no_grad():
        for source, places in groups.items():
            pad = lm.tokenizer.pad_token_id
            mine = places[process_group.rank :: process_group.world_size]
            for batch in EvaluationBatches(encoded, batch_size=batch_size, pad_token_id=pad, places=mine):
                sums[source] += batch_loss(lm, batch, limit=limit)
                counts[source] += batch.loss_tokens
    if process_group.world_size > 1:
        sums_of_ranks = process_group.all_gather_object((sums, counts), "the loss")
        sums = {name: sum(mine[name] for mine, _ in sums_of_ranks) for name in groups}
        counts = {name: sum(mine[name] for _, mine in sums_of_ranks) for name in groups}
    count = sum(counts.values())
    loss = {"loss": sum(sums.values()) / count} if count else {}
    return loss | {f"loss/{source}": sums[source] / counts[source] for source in groups if source and counts[source]}


def batch_loss(lm: LanguageModel, batch: Batch, *, limit: BatchLimit) -> float:
    """Return the cross-entropy summed over the batch's loss tokens. Raise OutOfMemory if a single row does not fit."""

    def work(places: range) -> tuple[float | None, Exception | None]:
        return attempt(lambda: float(lm.loss(lm.module, some_rows(batch, places))))

    def longest(places: range) -> int:
        return int(batch.lengths_B[places.start : places.stop].max())

    def describe(places: range) -> str:
        return f"{counted(len(places), 'row')} of {counted(longest(places), 'token')}"

    total = 0.0
    for part in run_with_oom_backoff(batch.rows, work, limit=limit, tokens=longest, describe=describe):
        if part.result is None:
            place = part.places[0]
            raise OutOfMemory(
                f"row {batch.keys[place]} of {int(batch.lengths_B[place]):,} tokens does not fit in memory even alone: "
                "write a smaller preprocessing.global_max_sequence_length, quantization or a smaller model"
            ) from part.failure
        total += part.result
    return total


def some_rows(batch: Batch, places: range) -> Batch:
    """Select consecutive rows of a batch, without the padding that the other rows needed."""
    rows = slice(places.start, places.stop)
    lengths_B = batch.lengths_B[rows]
    width = int(lengths_B.max())
    return Batch(batch.input_ids_BT[rows, :width], batch.labels_BT[rows, :width], lengths_B, batch.keys[rows])


def score(
    pipeline: Pipeline | EndpointPipeline | RayPipeline,
    rows: Rows,
    *,
    batch_size: int,
    max_rows: int | None = None,
    progress: ShowProgress | None = None,
    limit: BatchLimit | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> OutputScores:
    """Generate an answer for each row and score it against the reference.

    The ranks of `process_group` share the rows and return the same scores.

    Args:
        pipeline: The parts of the run.
        rows: Rows with answers.
        batch_size: Rows generated at a time.
        max_rows: Score only this many rows, evenly spaced. Default: all.
        progress: Opens a progress display.
        limit: Upper bound on the batch size; lowered when memory runs out.
        process_group: The ranks that share the rows.
    """
    config = pipeline.config
    chosen = evenly(len(rows), max_rows)
    asked = rows if len(chosen) == len(rows) else rows.select(chosen)
    schema = row_schema(config, supervised=True)
    answers = generate_for_rows(
        lm=pipeline.lm,
        rows=asked,
        encoder=pipeline.encoder,
        schema=row_schema(config, supervised=False),
        decoder=pipeline.decoder,
        generation=pipeline.generation,
        max_new_tokens=pipeline.max_new_tokens,
        batch_size=batch_size,
        seed=config.seed if config.generation.seed is None else config.generation.seed,
        progress=progress,
        description="evaluating",
        limit=limit,
        process_group=process_group,
    )
    scorer = Scorer(config)
    if process_group.world_size > 1:
        records_of_ranks = process_group.all_gather_object([answer.record for answer in answers], "the answers")
        answers = (answer_of(record, pipeline.decoder) for records in records_of_ranks for record in records)
    for answer in answers:
        scorer.add(schema.load(asked.get([answer.row])[0]), answer)
    return scorer.scores()
