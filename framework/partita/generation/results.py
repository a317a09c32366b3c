"""Results of rows and batches, the same for all engines."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.generation.prompts import PromptSource
from partita.lm.base import Generated
from partita_schema.errors import JobError
from partita_trainers.batch_size.memory import is_broken_device

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowResult:
    """The result of one row: an answer, or an error."""

    row: int
    """Index of the row in the dataset."""
    generated: Generated | None
    """The answer."""
    error: str | None = None
    """Why there is no answer."""


@dataclass(frozen=True)
class BatchResult:
    """The results of requested rows, and the work they took."""

    results: tuple[RowResult, ...]
    """Results in the order of completion."""
    prompt_tokens: int
    """Prompt tokens processed, including those of rows that were not requested."""
    padded_tokens: int
    """The same including padding."""
    seconds: float
    """Seconds taken, including tries that did not fit."""
    batch_size: int
    """Most rows of this length at a time from now on."""
    out_of_memory: int = 0
    """How often memory ran out since the last result."""
    prefill_seconds: float = 0.0
    """Seconds of prefill; 0 if not measured separately."""
    decode_seconds: float = 0.0
    """Seconds of decoding steps, each of one token per row."""
    slot_steps: int = 0
    """Number of slots, summed over the decoding steps."""
    row_steps: int = 0
    """Number of slots in use, summed over the decoding steps."""


def unanswerable(prompts: PromptSource, *, context_length: int | None) -> dict[int, str]:
    """Return the rows that fail before any forward pass, with the reason: no prompt, or one that fills the context."""
    errors = dict(prompts.errors)
    if context_length is not None:
        for row in np.flatnonzero(prompts.lengths >= context_length).tolist():
            errors[row] = (
                f"the prompt has {prompts.lengths[row]:,} tokens and the context holds {context_length:,}; "
                "nothing can be answered"
            )
    return errors


def too_large(prompt_tokens: int, new_tokens: int) -> str:
    """Return the error of a row that does not fit on the device alone."""
    return (
        f"does not fit in memory even alone: {prompt_tokens:,} prompt tokens and up to {new_tokens:,} new ones; "
        "shorten the prompt, or write a smaller generation.max_new_tokens, quantization or a smaller model"
    )


def stop_if_broken(error: Exception) -> None:
    """Raise JobError if an error leaves the device unusable, so that all later rows would fail."""
    if is_broken_device(error):
        raise JobError(
            f"the device failed and cannot continue: {error}. The answers so far are saved; start again, with "
            "CUDA_LAUNCH_BLOCKING=1 to see where it fails"
        ) from error
