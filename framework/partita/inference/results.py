"""What becomes of rows, whichever engine answers them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partita.inference.prompts import PromptSource
from partita.lm.base import Generated
from partita_schema.errors import JobError
from partita_trainers.batch_size.memory import is_broken_device

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
    """What became of rows that were asked for, and what it took."""

    results: tuple[RowResult, ...]
    """Rows, in the order in which they were done."""
    prompt_tokens: int
    """Prompt tokens that were read, those of rows that were not asked for included."""
    padded_tokens: int
    """The same with padding."""
    seconds: float
    """Time taken, that of tries that did not fit included."""
    batch_size: int
    """Most rows of this length at a time from here on."""
    out_of_memory: int = 0
    """How often something did not fit since the result before."""
    prefill_seconds: float = 0.0
    """Of the seconds, those that prompts were read in; 0 where that is not told apart."""
    decode_seconds: float = 0.0
    """Of the seconds, those that tokens were made in, one for each row at a time."""
    slot_steps: int = 0
    """Slots in each of those steps, added up ..."""
    row_steps: int = 0
    """... and those of them in use."""


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


def too_large(prompt_tokens: int, new_tokens: int) -> str:
    """Why a row that does not fit alone has no answer."""
    return (
        f"does not fit in memory even alone: {prompt_tokens:,} prompt tokens and up to {new_tokens:,} new ones; "
        "shorten the prompt, or write a smaller generation.max_new_tokens, quantization or a smaller model"
    )


def stop_if_broken(error: Exception) -> None:
    """Raises JobError where an error leaves the device unusable: every row after it would fail as well."""
    if is_broken_device(error):
        raise JobError(
            f"the device failed and cannot go on: {error}. Answers up to here are kept; start again, with "
            "CUDA_LAUNCH_BLOCKING=1 to see where it fails"
        ) from error
