"""The static engine: all rows longest first, cut into batches, each batch generated to its end.

The plan is a function of the prompts' lengths, the batch size and the context: never of what is already done. The seed
of a batch is a function of its place in the plan. A job that was killed and goes on therefore makes the answers that an
uninterrupted one makes, sampled ones too: a batch of which a part is missing is generated in full, as it was.

A batch that raises is tried again row by row, and only the rows that raise again are errors. A failure of the device
itself ends the job.
"""

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from partita.inference.prompts import Lengths, PromptSource, described
from partita.lm.base import Generated, GenerationOptions, GenerationRequest
from partita_schema.errors import ModelError

if TYPE_CHECKING:
    from partita.lm.base import GenerativeModel

logger = logging.getLogger(__name__)

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowResult:
    """What became of one row: an answer, or an error."""

    row: int
    """Place of the row in the data."""
    generated: Generated | None
    """The answer."""
    error: str | None = None
    """Why there is none."""


@dataclass(frozen=True)
class BatchResult:
    """What became of the rows of a batch that were asked for."""

    results: tuple[RowResult, ...]
    """Rows, the longest prompt first."""
    prompt_tokens: int
    """Prompt tokens that the batch held, those of rows that were not asked for included."""
    padded_tokens: int
    """The same with padding."""
    seconds: float
    """Time taken."""


def plan_batches(lengths: Lengths, *, batch_size: int) -> list[Rows]:
    """All rows with a length, the longest first, cut every `batch_size` rows. Rows of one length stay in order."""
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    order = order[lengths[order] > 0]
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def unanswerable(prompts: PromptSource, *, context_length: int | None) -> dict[int, str]:
    """Rows that are errors before any forward pass, with the reason: no prompt, or one that fills the context."""
    errors = dict(prompts.errors)
    if context_length is not None:
        for row in np.flatnonzero(prompts.lengths >= context_length).tolist():
            errors[row] = (
                f"the prompt has {prompts.lengths[row]:,} tokens and the context holds {context_length:,}; "
                "nothing can be answered"
            )
    return errors


def generate_rows(
    lm: "GenerativeModel",
    prompts: PromptSource,
    *,
    options: GenerationOptions,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    done: npt.NDArray[np.bool_],
) -> Iterator[BatchResult]:
    """Answers of all rows that have a prompt and are not `done` [rows], batch by batch.

    `unanswerable` rows are left out. Where the context leaves less room than `max_new_tokens`, a row gets what there
    is. An interrupt is passed on at once, and ModelError is raised where the device fails: what was yielded before is
    complete.
    """
    room = lm.context_length
    lengths = prompts.lengths if room is None else np.where(prompts.lengths >= room, 0, prompts.lengths)
    limits = np.full(len(lengths), max_new_tokens) if room is None else np.minimum(max_new_tokens, room - lengths)
    for position, rows in enumerate(plan_batches(lengths, batch_size=batch_size)):
        wanted = ~done[rows]
        if not wanted.any():
            continue
        started = time.perf_counter()
        results = _generate_batch(
            lm, prompts, rows, limits=limits[rows], wanted=wanted, options=options, seed=_seed(seed, position)
        )
        yield BatchResult(
            results=tuple(results),
            prompt_tokens=int(lengths[rows].sum()),
            padded_tokens=int(lengths[rows].max()) * len(rows),
            seconds=time.perf_counter() - started,
        )


def _generate_batch(
    lm: "GenerativeModel",
    prompts: PromptSource,
    rows: Rows,
    *,
    limits: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.bool_],
    options: GenerationOptions,
    seed: int,
) -> list[RowResult]:
    def generate(places: Sequence[int], seed: int) -> list[Generated]:
        ids = prompts.prompts([int(rows[place]) for place in places])
        requests = [
            GenerationRequest(input_ids=tokens, max_new_tokens=int(limits[place]))
            for place, tokens in zip(places, ids, strict=True)
        ]
        answers = lm.generate(requests, options, seed=seed)
        if len(answers) != len(requests):
            raise RuntimeError(f"the model gave {len(answers)} answers to {len(requests)} prompts")
        return answers

    asked = np.flatnonzero(wanted).tolist()
    try:
        answers = generate(range(len(rows)), seed)
        return [RowResult(int(rows[place]), answers[place]) for place in asked]
    except Exception as error:
        stop_if_broken(error)
        failure = described(error)
    # Outside the block above: while its exception is bound it holds the failed pass's tensors.
    logger.info("a batch of %s rows failed and is tried row by row: %s", len(rows), failure)
    results = []
    for place in asked:
        try:
            results.append(RowResult(int(rows[place]), generate([place], _seed(seed, place))[0]))
        except Exception as error:
            stop_if_broken(error)
            results.append(RowResult(int(rows[place]), None, described(error)))
    return results


def stop_if_broken(error: Exception) -> None:
    """Raises ModelError where an error leaves the device unusable: every row after it would fail as well."""
    import torch

    if isinstance(error, torch.AcceleratorError):
        raise ModelError(
            f"the device failed and cannot go on: {error}. Answers up to here are kept; start again, with "
            "CUDA_LAUNCH_BLOCKING=1 to see where it fails"
        ) from error


def _seed(*parts: int) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "little")
