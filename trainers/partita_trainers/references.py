"""Log-probabilities of the reference: the model before the first step, which preference losses compare with.

`before`: the answers of all rows are computed once, before the first step, when the model itself is the reference; no
second copy of the weights exists, and a resumed run reads them from the run directory. `in_step`: they are computed in
each step, with a copy of the weights that training changes.

A row is identified by a hash of its tokens, so that a changed row never gets the value of another one.

Shapes: N loss tokens, R rows of a batch, A answers of a row: 2 for a pair, 1 for a labelled answer.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

import torch

from partita_schema.common.files import replacing
from partita_schema.common.text import counted
from partita_schema.errors import ConfigError, Problem, ResumeError, TrainingError
from partita_trainers.base import Batch, IndexedBatches, LanguageModel
from partita_trainers.batch_size.device_errors import attempt
from partita_trainers.micro_batches import MicroBatchSplitter
from partita_trainers.objective import ObjectiveContext
from partita_trainers.process_group import synchronized_errors
from partita_trainers.step import open_steps
from partita_trainers.training_probe import Begin, TakeStep, TrainingProbe

if TYPE_CHECKING:
    from partita_trainers.finetune import FinetuneRun

logger = logging.getLogger(__name__)

FILE = "references.jsonl"
"""Name of the file in the run directory: a line about the steps whose rows it has, and a line per row."""
When = Literal["auto", "before", "in_step"]


class ReferenceModel(LanguageModel, Protocol):
    """A model that can also compute with the weights before training."""

    def keep_reference(self) -> None:
        """Copy the weights that training changes, for `reference`. Called before the first step and before a resume."""

    def drop_reference(self) -> None:
        """Free the copy that `keep_reference` has made."""

    def reference(self) -> AbstractContextManager[None]:
        """Compute with the weights of `keep_reference` inside the context, in evaluation mode, without gradients."""


@dataclass(frozen=True)
class AnswerSums:
    """The answers of the rows of a batch."""

    log_probs_RA: torch.Tensor
    """Log-probability of each answer: the sum over its tokens, float64 where the device has it."""
    tokens_RA: torch.Tensor
    """Number of tokens of each answer, at least 1, in the same type."""


@dataclass
class References:
    """Log-probabilities of the answers of rows under the reference."""

    answers: int
    """Answers of a row."""
    in_step: bool = False
    """Whether they are computed in each step, and not kept for the next."""
    started: bool = False
    """Whether the weights may differ from those before the first step."""
    log_probs: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """By the digest of the row, one for each answer."""
    recorded: bool = False
    """Whether they are those of a finished run, whose model before training is not there any more."""

    def read(self, run: Path | None) -> None:
        """Use what a finished run recorded. Raises ResumeError if its file is damaged."""
        known = None if run is None else read_references(run / FILE, answers=self.answers)
        self.log_probs, self.recorded = {} if known is None else known[1], True

    def knows(self, batch: Batch) -> bool:
        """Return whether the log-probabilities of all rows of a batch are known."""
        return all(digest in self.log_probs for digest in row_digests(batch))

    def of_batch(self, batch: Batch) -> "References":
        """Return the known log-probabilities of the rows of a batch."""
        known = {digest: self.log_probs[digest] for digest in row_digests(batch) if digest in self.log_probs}
        return replace(self, log_probs=known)

    def compute(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        """Compute the rows of the batches that are not known yet, in evaluation mode.

        Raises TrainingError for an unknown row after the first step, if references are not computed in steps.
        """
        if self.in_step and self.started:
            self.log_probs.clear()
            with context.full_weights(), cast(ReferenceModel, context.lm).reference():
                self.add(context, batches)
            return
        if self.started:
            self.check_known(batches)
            return
        with torch.no_grad():
            self.add(context, batches)

    def add(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        """Compute the rows of the batches that are not known yet with the weights as they are."""
        for batch in batches:
            if not self.knows(batch):
                sums = answer_sums(context.token_log_probs(batch), batch, answers=self.answers)
                self.log_probs |= zip(row_digests(batch), map(tuple, sums.log_probs_RA.tolist()), strict=True)

    def check_known(self, batches: Iterable[Batch]) -> None:
        """Raise TrainingError if a row of the batches is not known."""
        for batch in batches:
            for key, digest in zip(batch.keys, row_digests(batch), strict=True):
                if digest not in self.log_probs:
                    raise TrainingError(
                        f"row {key} has no log-probability of the model before training, because it was not in the "
                        "data when training began: write trainer.references: in_step, and start a new run"
                    )

    def of(self, batch: Batch, like: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the rows of a batch [R, A], with the type and device of `like`."""
        values = [self.log_probs[digest] for digest in row_digests(batch)]
        return like.new_tensor(values).view(len(values), self.answers)


def answer_sums(log_probs_N: torch.Tensor, batch: Batch, *, answers: int) -> AnswerSums:
    """Add up the log-probabilities of loss tokens by row and answer.

    Args:
        log_probs_N: Result of `token_log_probs`.
        batch: The batch.
        answers: A, answers of a row.
    """
    if log_probs_N.device.type != "mps":
        log_probs_N = log_probs_N.double()  # sums of hundreds of tokens are compared: their differences are small
    index_N = answers * batch.loss_token_rows + batch.loss_token_branches
    tokens_RA = index_N.bincount(minlength=answers * batch.rows).clamp(min=1)
    sums_RA = log_probs_N.new_zeros(answers * batch.rows).index_add(0, index_N.to(log_probs_N.device), log_probs_N)
    return AnswerSums(sums_RA.view(-1, answers), tokens_RA.to(sums_RA).view(-1, answers))


def rows_with_loss(batch: Batch) -> torch.Tensor:
    """Return the indices of the rows with loss tokens, int64; only batches that measure memory have others."""
    return batch.loss_token_rows.bincount(minlength=batch.rows).nonzero()[:, 0]


def row_columns(batch: Batch) -> Iterator[tuple[int, slice]]:
    """Yield for each row its line and its columns there."""
    lengths = batch.lengths_B.tolist()
    if batch.position_ids_BT is None:
        yield from ((line, slice(0, length)) for line, length in enumerate(lengths))
        return
    starts = batch.row_starts().nonzero().tolist()
    for (line, start), (next_line, end) in zip(starts, [*starts[1:], [-1, 0]], strict=True):
        yield line, slice(start, end if next_line == line else lengths[line])


def row_digests(batch: Batch) -> list[str]:
    """Return for each row of a batch a hash of its ids, labels and positions."""
    result = list[str]()
    for line, columns in row_columns(batch):
        ids_T = batch.input_ids_BT[line, columns]
        positions_T = (
            torch.arange(len(ids_T)) if batch.position_ids_BT is None else batch.position_ids_BT[line, columns]
        )
        digest = hashlib.blake2b(digest_size=12)
        for tensor_T in (ids_T, batch.labels_BT[line, columns], positions_T):
            digest.update(tensor_T.contiguous().numpy().tobytes())
        result.append(digest.hexdigest())
    return result


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


# Before the first step


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
    if not references.in_step:
        compute_before(run, references)
    else:
        cast(ReferenceModel, run.lm).keep_reference()
    references.started = True


def compute_before(run: "FinetuneRun", references: References) -> None:
    """Read the references from the file of the run, compute those of further steps, and write the file."""
    group, path = run.process_group, run.run.folder / FILE
    known = group.run_on_rank_zero(lambda: read_references(path, answers=references.answers), "the references")
    steps_known, references.log_probs = known or (0, {})
    if known is not None and (steps_known is None or steps_known >= run.schedule.total):
        return
    started, rows_known = time.perf_counter(), len(references.log_probs)
    with run.engine.summon_full_params():
        steps = compute_training_rows(run, references)
        for split in evaluated_splits(run):
            run.context.evaluate(split, False, 1, step=0)
    share(run, references)
    group.run_on_rank_zero(lambda: write_references(path, steps, references.log_probs), "the references")
    seconds, rows = time.perf_counter() - started, len(references.log_probs)
    computed = counted(rows - rows_known, "row")
    logger.info("computed the log-probabilities of %s before training in %.1f s", computed, seconds)
    run.run.note(references={"rows": rows, "seconds": round(seconds, 3)})


def evaluated_splits(run: "FinetuneRun") -> list[str]:
    """Return the splits that are evaluated during or after training."""
    if run.config.skip_all_evaluation:
        return []
    wanted = ["validation", *(["test"] if run.config.evaluate_test else [])]
    return [split for split in wanted if split in run.context.splits]


def compute_training_rows(run: "FinetuneRun", references: References) -> int | None:
    """Compute the unknown references of all rows that training will read, on the rank that reads each first.

    Returns:
        The number of steps whose rows are known then; None if all rows are.
    """
    context, total, batches = run.engine.context, run.schedule.total, cast(IndexedBatches, run.batches)
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
        parts = splitter.split(batches)
        _, failure = attempt(partial(references.compute, context, parts))
        if failure is None:
            return
        splitter.halve(max(parts, key=lambda part: part.input_ids_BT.numel()), number=0, failure=failure)


def share(run: "FinetuneRun", references: References) -> None:
    """Merge the references of all ranks."""
    for of_rank in run.process_group.all_gather_object(references.log_probs, "the references"):
        references.log_probs |= of_rank


def write_references(path: Path, steps: int | None, log_probs: Mapping[str, tuple[float, ...]]) -> None:
    """Write a line about the steps, and a line per row in an order that does not depend on the ranks."""
    with replacing(path) as file:
        file.write(json.dumps({"steps": "all" if steps is None else steps}).encode() + b"\n")
        for digest, values in sorted(log_probs.items()):
            file.write(json.dumps({"row": digest, "log_probs": values}).encode() + b"\n")


def read_references(path: Path, *, answers: int) -> tuple[int | None, dict[str, tuple[float, ...]]] | None:
    """Return the content of a file: the steps whose rows it has, None for all, and the references by digest.

    Args:
        path: The file. If it is missing, the result is None.
        answers: A, answers of a row.

    Raises:
        ResumeError: The file is damaged.
    """
    if not path.exists():
        return None
    steps: int | None = 0
    result = dict[str, tuple[float, ...]]()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                if number == 1:
                    steps = None if record["steps"] == "all" else int(record["steps"])
                    continue
                values = tuple(map(float, record["log_probs"]))
                result[str(record["row"])] = values
            except (ValueError, KeyError, TypeError):
                values = ()
            if len(values) != answers:
                raise ResumeError(
                    f"line {number} of {path} is not a row's log-probabilities before training: remove the file, and "
                    "they are computed again"
                )
    return steps, result
