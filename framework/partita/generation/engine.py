"""Choice of the generation engine.

Continuous batching is used where the model and the options support it, else static batching; the log says which and
why.
"""

import logging
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from partita.generation.requests import usable_lengths
from partita.lm.base import AnswerContext, BatchSupport, GenerationOptions
from partita_schema.errors import ModelError

logger = logging.getLogger(__name__)

Engine = Literal["slots", "static", "server"]


class EngineSupport(Protocol):
    """What a model says about the engines that it supports."""

    @property
    def context_length(self) -> int | None:
        """Longest sequence in tokens."""

    @property
    def answer_context(self) -> AnswerContext | None:
        """The context of answers; None if prompt and answer share `context_length`."""

    def why_no_slots(self, options: GenerationOptions, *, tokens: int) -> str | None:
        """Return why rows of up to `tokens` tokens cannot use continuous batching; None if they can."""

    def batch_support(self, options: GenerationOptions, *, tokens: int) -> BatchSupport:
        """Return which rows of up to `tokens` tokens can be answered in one batch."""


def choose_engine(
    model: EngineSupport, lengths: npt.NDArray[np.integer], *, options: GenerationOptions, max_new_tokens: int
) -> Engine:
    """Return the engine for prompts of these lengths; log why it is not continuous batching.

    Args:
        model: The model.
        lengths: Prompt lengths in tokens, [rows].
        options: Generation options.
        max_new_tokens: Limit of generated tokens per row.
    """
    usable, new_tokens = usable_lengths(
        lengths, max_new_tokens, context_length=model.context_length, answers=model.answer_context
    )
    reason = model.why_no_slots(options, tokens=int((usable + new_tokens)[usable > 0].max(initial=0)))
    if reason is None:
        return "slots"
    support = batch_support_for(model, usable, new_tokens, options=options)
    refuse_without_slots(options, reason, support=support)
    if max_new_tokens:  # a head generates nothing
        logger.info("answers are generated %s", support.describe(reason))
    return "static"


def refuse_without_slots(options: GenerationOptions, reason: str, *, support: BatchSupport) -> None:
    """Raise ModelError if the options constrain answers in a way that needs continuous batching.

    Args:
        options: Generation options.
        reason: Why continuous batching cannot be used.
        support: What the model supports without it.
    """
    key = "decoder.scoring" if options.scores_labels else "decoder.constrain" if options.is_constrained else None
    if key == "decoder.scoring" and support.scores_labels:
        return
    if key is not None:
        raise ModelError(f"{key} needs continuous batching, which is not available here: {reason}; remove {key}")


def batch_support_for(
    model: EngineSupport,
    lengths: npt.NDArray[np.integer],
    new_tokens: npt.NDArray[np.integer],
    *,
    options: GenerationOptions,
) -> BatchSupport:
    """Return which rows of these lengths can be generated together.

    Args:
        model: The model.
        lengths: Prompt lengths in tokens, [rows]; 0 for rows to skip.
        new_tokens: Limit of generated tokens, [rows].
        options: Generation options.
    """
    return model.batch_support(options, tokens=int((lengths + new_tokens)[lengths > 0].max(initial=0)))
