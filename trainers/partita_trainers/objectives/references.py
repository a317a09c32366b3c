"""Log-probabilities of the reference: the model before the first step, which preference losses compare with.

A row is identified by a hash of its tokens, so that a changed row never gets the value of another one.

Shapes: N loss tokens, R rows of a batch, A answers of a row: 2 for a pair, 1 for a labelled answer.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import torch

from partita_schema.common.files import replacing
from partita_schema.common.text import counted
from partita_schema.errors import ResumeError, TrainingError
from partita_trainers.base import Batch, LanguageModel
from partita_trainers.device_copies import to_device
from partita_trainers.objective import ObjectiveContext

FILE = "references.jsonl"
"""Name of the file in the run directory: a line about the steps and splits whose rows it has, and a line per row. The
log-probabilities are those without autocast, as in the evaluation of the finished model."""


class ReferenceModel(LanguageModel, Protocol):
    """A model that can also compute with the weights before training."""

    def keep_reference(self) -> None:
        """Copy the weights that training changes, for `reference`. Called before the first step and before a resume."""

    def drop_reference(self) -> None:
        """Free the copy that `keep_reference` has made."""

    def reference(self) -> AbstractContextManager[None]:
        """Compute with the weights of `keep_reference` inside the context, in evaluation mode, without gradients."""


@dataclass(frozen=True)
class KnownReferences:
    """What a file of references holds."""

    steps: int | None = 0
    """The number of steps whose rows it has; None for all training rows."""
    splits: frozenset[str] = frozenset()
    """The splits other than that of training whose rows it has."""
    log_probs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Log-probabilities by the digest of the row, one for each answer."""


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
    after_training: dict[str, tuple[float, ...]] | None = None
    """Those of evaluated rows without autocast; None if training has no autocast."""
    in_step_rows: dict[str, int] = field(default_factory=dict)
    """By the digest of a row of the present step, its index in `in_step_values`, if they are computed in each step."""
    in_step_values: torch.Tensor | None = None
    """Log-probabilities of the rows of the present step [R, A], on the device: they are not read."""
    recorded: bool = False
    """Whether they are those of a finished run: all that losses need are here, and the model is the trained one."""

    def read(self, run: Path | None) -> None:
        """Use what a finished run recorded; others can be computed, until `started`, with the model before training.

        Raises ResumeError if its file is damaged.
        """
        known = KnownReferences() if run is None else read_references(run / FILE, answers=self.answers)
        self.log_probs, self.recorded = dict(known.log_probs), True

    def end_training(self) -> None:
        """Use the log-probabilities without autocast from now on."""
        if self.after_training is not None:
            self.log_probs, self.after_training = self.after_training, None

    def knows(self, batch: Batch) -> bool:
        """Return whether the log-probabilities of all rows of a batch are known."""
        return all(digest in self.log_probs for digest in row_digests(batch))

    def compute(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        """Compute the rows of the batches that are not known yet, in evaluation mode.

        Raises TrainingError for an unknown row after the first step, if references are not computed in steps.
        """
        if self.in_step and self.started:
            with context.full_weights(), cast(ReferenceModel, context.lm).reference():
                self.compute_in_step(context, batches)
            return
        if self.started:
            self.check_known(batches)
            return
        with torch.no_grad():
            self.add(context, batches)

    def compute_in_step(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        """Replace the log-probabilities of the last step by those of the batches with the current weights."""
        self.log_probs.clear()
        self.in_step_rows = {}
        values = list[torch.Tensor]()
        first = 0
        for batch in batches:
            values.append(answer_sums(context.token_log_probs(batch), batch, answers=self.answers).log_probs_RA)
            self.in_step_rows |= {digest: first + row for row, digest in enumerate(row_digests(batch))}
            first += len(values[-1])
        self.in_step_values = torch.cat(values) if values else None

    def add(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        """Compute the rows of the batches that are not known yet with the weights as they are."""
        for batch in batches:
            if not self.knows(batch):
                sums = answer_sums(context.token_log_probs(batch), batch, answers=self.answers)
                self.log_probs |= zip(row_digests(batch), map(tuple, sums.log_probs_RA.tolist()), strict=True)

    def check_known(self, batches: Iterable[Batch]) -> None:
        """Raise TrainingError if a row of the batches is not known, with the number of such rows."""
        rows = [row for batch in batches for row in zip(batch.keys, row_digests(batch), strict=True)]
        unknown = [key for key, digest in rows if digest not in self.log_probs]
        if unknown:
            raise TrainingError(
                f"{len(unknown):,} of {counted(len(rows), 'row')}, such as {unknown[0]}, cannot be compared with the "
                "model before training, because they were not in the data when training began: write "
                "trainer.references: in_step, and start a new run"
            )

    def of(self, batch: Batch, like: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the rows of a batch [R, A], with the type and device of `like`."""
        digests = row_digests(batch)
        if self.in_step_values is not None and self.in_step_rows.keys() >= set(digests):
            rows_R = torch.tensor([self.in_step_rows[digest] for digest in digests], dtype=torch.int64)
            return self.in_step_values[to_device(rows_R, like.device)].to(like.dtype)
        values = torch.tensor([self.log_probs[digest] for digest in digests], dtype=like.dtype)
        return to_device(values.view(len(digests), self.answers), like.device)


@runtime_checkable
class RelativeObjective(Protocol):
    """An objective that may be relative to the model before training, which evaluations of a finished run provide."""

    references: References | None
    """The log-probabilities before training; None if the loss has no reference."""

    def reference_batches(self, context: ObjectiveContext, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return batches of all rows whose log-probabilities before training the losses of some rows need.

        All ranks call this together.

        Args:
            context: The model and its process group.
            batches: The rows of this rank.
        """


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
    tokens_RA = index_N.bincount(minlength=answers * batch.rows).clamp(min=1).to(log_probs_N.dtype)
    zeros_RA = log_probs_N.new_zeros(answers * batch.rows)
    sums_RA = zeros_RA.index_add(0, to_device(index_N, log_probs_N.device), log_probs_N)
    return AnswerSums(sums_RA.view(-1, answers), to_device(tokens_RA, sums_RA.device).view(-1, answers))


def rows_with_loss(batch: Batch) -> torch.Tensor:
    """Return the indices of the rows with loss tokens, int64; only batches that measure memory have others."""
    return batch.loss_token_rows.bincount(minlength=batch.rows).nonzero()[:, 0]


def row_columns(batch: Batch) -> Iterator[tuple[int, slice]]:
    """Yield for each row its sequence and its columns there."""
    lengths = batch.lengths_B.tolist()
    if batch.position_ids_BT is None:
        yield from ((sequence, slice(0, length)) for sequence, length in enumerate(lengths))
        return
    starts = batch.row_starts().nonzero().tolist()
    for (sequence, start), (next_sequence, end) in zip(starts, [*starts[1:], [-1, 0]], strict=True):
        yield sequence, slice(start, end if next_sequence == sequence else lengths[sequence])


def row_digests(batch: Batch) -> list[str]:
    """Return for each row of a batch a hash of its ids, labels and positions."""
    result = list[str]()
    for sequence, columns in row_columns(batch):
        ids_T = batch.input_ids_BT[sequence, columns]
        positions_T = (
            torch.arange(len(ids_T)) if batch.position_ids_BT is None else batch.position_ids_BT[sequence, columns]
        )
        digest = hashlib.blake2b(digest_size=12)
        for tensor_T in (ids_T, batch.labels_BT[sequence, columns], positions_T):
            digest.update(tensor_T.contiguous().numpy().tobytes())
        result.append(digest.hexdigest())
    return result


def write_references(path: Path, known: KnownReferences) -> None:
    """Write a line about steps and splits, and a line per row in an order that does not depend on the ranks."""
    about = {"steps": "all" if known.steps is None else known.steps, "splits": sorted(known.splits)}
    with replacing(path) as file:
        file.write(json.dumps(about).encode() + b"\n")
        for digest, values in sorted(known.log_probs.items()):
            file.write(json.dumps({"row": digest, "log_probs": values}).encode() + b"\n")


def file_of(mixed_precision: str) -> str:
    """Return the name of the file of log-probabilities in a precision: no, bf16 or fp16."""
    path = Path(FILE)
    return FILE if mixed_precision == "no" else f"{path.stem}-{mixed_precision}{path.suffix}"


def read_references(path: Path, *, answers: int) -> KnownReferences:
    """Return the content of a file; nothing is known if it is missing.

    Args:
        path: The file.
        answers: A, answers of a row.

    Raises:
        ResumeError: The file is damaged.
    """
    if not path.exists():
        return KnownReferences()
    steps: int | None = 0
    splits = frozenset[str]()
    log_probs = dict[str, tuple[float, ...]]()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                if number == 1:
                    steps = None if record["steps"] == "all" else int(record["steps"])
                    splits = frozenset(map(str, record["splits"]))
                    continue
                values = tuple(map(float, record["log_probs"]))
                log_probs[str(record["row"])] = values
            except (ValueError, KeyError, TypeError):
                values = ()
            if len(values) != answers:
                raise ResumeError(
                    f"line {number} of {path} is not a row's log-probabilities before training: remove the file, and "
                    "they are computed again"
                )
    return KnownReferences(steps, splits, log_probs)
