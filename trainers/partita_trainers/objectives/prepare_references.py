"""Computes the log-probabilities before training of all rows before the first step, or keeps the weights for that.

`before`: the answers of all rows are computed once, before the first step, when the model itself is the reference; no
second copy of the weights exists, and a resumed run reads them from the run directory. `in_step`: they are computed in
each step, with a copy of the weights that training changes.

With mixed precision, training steps and the evaluations between them run under autocast, and the final evaluation does
not. Log-probabilities with and without autocast differ by as much as rewards, so that only those of the same kind are
compared. `before` therefore computes the evaluated rows both ways.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Literal, cast

from partita_schema.common.text import counted
from partita_schema.errors import ConfigError, Problem
from partita_schema.sections.trainer import final_splits
from partita_trainers.base import Batch, IndexedBatches
from partita_trainers.batch_size.device_errors import attempt
from partita_trainers.learning_rate_search import STEPS
from partita_trainers.objective import ObjectiveContext
from partita_trainers.objectives.references import (
    FILE,
    KnownReferences,
    ReferenceModel,
    References,
    file_of,
    read_references,
    write_references,
)
from partita_trainers.process_group import synchronized_errors
from partita_trainers.steps.micro_batches import MicroBatchSplitter
from partita_trainers.steps.step import open_steps
from partita_trainers.training_probe import Begin, TakeStep, TrainingProbe

if TYPE_CHECKING:
    from partita_trainers.finetune_run import FinetuneRun

logger = logging.getLogger(__name__)

When = Literal["auto", "before", "in_step"]


def is_in_step(when: When, *, streamed: bool) -> bool:
    """Return whether references are computed in each step, with a copy of the weights before the first one."""
    return when == "in_step" or streamed


def with_copy(probe: TrainingProbe) -> TrainingProbe:
    """Let a probe hold the copy of the weights that `reference` needs, so that it takes as much memory as training."""
    probe.begin = partial(begin_with_copy, cast(ReferenceModel, probe.work.lm), probe.begin)
    return probe


@contextmanager
def begin_with_copy(lm: ReferenceModel, begin: Begin) -> Iterator[TakeStep]:
    """Yield what `begin` does, with a copy of the weights of the model in memory."""
    lm.keep_reference()
    try:
        with begin() as take_step:
            yield take_step
    finally:
        lm.drop_reference()


def prepare_references(run: "FinetuneRun", references: References, *, when: When) -> None:
    """Compute the references of all rows before the first step, or keep what computing them in steps needs.

    Call it before a checkpoint is restored. All ranks have the same references afterwards.

    Args:
        run: The run, with the weights before the first step.
        references: Filled.
        when: The key `trainer.references`.

    Raises:
        ConfigError: References cannot be computed then.
        ResumeError: The file of an interrupted run is damaged.
    """
    rows = run.batches.num_rows
    if when == "before" and rows is None:
        raise ConfigError(
            [Problem("trainer.references", "before needs data of a known size, not a stream; write in_step or auto")]
        )
    references.in_step = is_in_step(when, streamed=rows is None)
    references.log_probs.clear()
    references.after_training = None
    if not references.in_step:
        compute_before(run, references)
    else:
        cast(ReferenceModel, run.lm).keep_reference()
    references.started = True


def compute_before(run: "FinetuneRun", references: References) -> None:
    """Read the references from the files of the run, compute those of further steps and splits, and write the files."""
    started, precision, computed = time.perf_counter(), run.engine.mixed_precision, 0
    evaluated = evaluated_splits(run)
    if precision != "no":
        with run.engine.without_autocast():
            computed = complete_file(run, references, FILE, splits=evaluated)
        references.after_training = references.log_probs
        evaluated = [split for split in evaluated if split == "validation"]
    computed += complete_file(run, references, file_of(precision), splits=evaluated, steps=steps_to_read(run))
    if not computed:
        return
    seconds, rows = time.perf_counter() - started, len({*references.log_probs, *(references.after_training or ())})
    logger.info("computed the log-probabilities of %s before training in %.1f s", counted(computed, "row"), seconds)
    run.run.note(references={"rows": rows, "seconds": round(seconds, 3)})


def complete_file(
    run: "FinetuneRun", references: References, name: str, *, splits: Sequence[str], steps: int = 0
) -> int:
    """Read a file of the run, compute the rows that it lacks, and write it.

    Args:
        run: The run, with the weights before the first step.
        references: Filled with the rows of the file.
        name: Name of the file.
        splits: Splits other than that of training whose rows it should have.
        steps: Number of steps whose rows it should have.

    Returns:
        The number of rows that were computed.
    """
    group, path = run.process_group, run.run.folder / name
    known = group.run_on_rank_zero(lambda: read_references(path, answers=references.answers), "the references")
    references.log_probs = dict(known.log_probs)
    has_steps, steps_known = known.steps is None or known.steps >= steps, known.steps
    if has_steps and known.splits.issuperset(splits):
        return 0
    with run.engine.summon_full_params():
        if not has_steps:
            steps_known = compute_training_rows(run, references)
        for split in splits:
            run.context.evaluate(split, generated=False, max_rows=1, step=0)
    share(run, references)
    whole = KnownReferences(steps_known, known.splits.union(splits), references.log_probs)
    group.run_on_rank_zero(lambda: write_references(path, whole), "the references")
    return len(whole.log_probs) - len(known.log_probs)


def evaluated_splits(run: "FinetuneRun") -> list[str]:
    """Return the splits that are evaluated during or after training."""
    if run.config.skip_all_evaluation:
        return []
    wanted = final_splits(run.config)
    return [split for split in wanted if split in run.context.splits]


def steps_to_read(run: "FinetuneRun") -> int:
    """Return of how many steps the rows are read: those of training, or of the range test before it."""
    return max(run.schedule.total, STEPS if run.config.learning_rate == "auto" else 0)


def compute_training_rows(run: "FinetuneRun", references: References) -> int | None:
    """Compute the unknown references of all rows that training will read, on the rank that reads each first.

    Returns:
        The number of steps whose rows are known then; None if all rows are.
    """
    context, total, batches = run.engine.context, steps_to_read(run), cast(IndexedBatches, run.batches)
    first_epoch = min(total, run.batches.steps_per_epoch or total)
    # Another splitter than that of the steps: a resumed run, which reads the file, splits steps in the same way.
    keys, splitter = set[str](), MicroBatchSplitter()
    with (
        synchronized_errors(run.process_group, "the references"),
        open_steps(batches.from_start()) as steps,
        run.run.progress(first_epoch, "references") as progress,
    ):
        for step in islice(steps, first_epoch):
            keys.update(key for batch in step.micro_batches for key in batch.keys)
            compute_step(references, context, step.micro_batches, splitter=splitter)
            progress.advance(1)
    share(run, references)
    if sum(map(len, run.process_group.all_gather_object(keys, "the references"))) >= (run.batches.num_rows or 0):
        return None
    # Epochs of a mix have different rows.
    with synchronized_errors(run.process_group, "the references"), open_steps(batches.from_start()) as steps:
        for step in islice(steps, first_epoch, total):
            compute_step(references, context, step.micro_batches, splitter=splitter)
    return total


def compute_step(
    references: References, context: ObjectiveContext, batches: Sequence[Batch], *, splitter: MicroBatchSplitter
) -> None:
    """Compute the references of a step on this rank, with smaller micro-batches if memory runs out.

    Args:
        references: Filled.
        context: The model.
        batches: The micro-batches of this rank.
        splitter: How finely micro-batches are split so far; updated.

    Raises:
        TrainingError: One row does not fit in memory.
    """
    while True:
        micro_batches = splitter.split(batches)
        _, failure = attempt(partial(references.compute, context, micro_batches))
        if failure is None:
            return
        splitter.halve(max(micro_batches, key=lambda batch: batch.input_ids_BT.numel()), number=0, failure=failure)


def share(run: "FinetuneRun", references: References) -> None:
    """Merge the references of all ranks."""
    for of_rank in run.process_group.all_gather_object(references.log_probs, "the references"):
        references.log_probs |= of_rank
