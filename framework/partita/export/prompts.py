"""The prompts on which an export is compared with its model."""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from partita.data.rows import Rows
from partita.generation.requests import usable_lengths
from partita.lm.base import GenerationRequest
from partita.lm.loaded_model import LoadedModel
from partita.pipeline.build import LocalPipeline
from partita_schema.common.text import counted
from partita_schema.errors import DataError, PartitaError
from partita_schema.rows import check_rows

logger = logging.getLogger(__name__)

NUM_PROMPTS = 32
"""Prompts that are answered."""
NUM_TOKENS = 64
"""Maximum tokens of an answer."""
CANDIDATES = 4
"""Rows that are read for each prompt, since some may be unusable."""
LENGTHS = (4, 24)
"""Minimum and maximum tokens of a generic prompt."""


@dataclass(frozen=True)
class CheckPrompts:
    """Prompts, and where they are from."""

    origin: str
    """Such as `32 rows of the test split`."""
    requests: tuple[GenerationRequest, ...]
    """The prompts, with the maximum tokens of their answers."""
    names: tuple[str, ...]
    """A name of each prompt for messages, such as `rows.jsonl:17`."""
    texts: tuple[str, ...] | None
    """The text of each prompt; None if they were made from tokens."""


def check_prompts(
    pipeline: LocalPipeline, lm: LoadedModel, rows: Callable[[], tuple[str, Rows]], *, must_exist: bool
) -> CheckPrompts:
    """Return the prompts of rows, or generic ones if there are no rows.

    Args:
        pipeline: Turns rows into prompts.
        lm: The model.
        rows: Returns rows and what they are.
        must_exist: Whether to raise errors of rows, because the caller named them.

    Raises:
        PartitaError: With `must_exist`, if the rows cannot be read, or none has a usable prompt.
    """
    try:
        name, found = rows()
        prompts = prompts_of_rows(pipeline, lm, found, name=name)
        if not prompts.requests:
            raise DataError(f"{name} has no row with a usable prompt")
    except (PartitaError, OSError) as error:
        if must_exist:
            raise
        reason = str(error)
    else:
        return prompts
    logger.info("the export is compared on generic prompts, made from the tokenizer: %s", reason)
    return generic_prompts(pipeline, lm)


def prompts_of_rows(pipeline: LocalPipeline, lm: LoadedModel, rows: Rows, *, name: str) -> CheckPrompts:
    """Return the prompts of evenly spaced rows; rows that cannot be used are left out.

    Args:
        pipeline: Turns rows into prompts.
        lm: The model.
        rows: The rows.
        name: What the rows are, for messages.
    """
    indices = np.unique(np.linspace(0, len(rows) - 1, NUM_PROMPTS * CANDIDATES).astype(int)).tolist() if rows else []
    clean = check_rows(pipeline.row_schema, rows.get(indices)).clean
    keys = [rows.key(indices[number]) for number in clean]
    encoded = [
        prompt for prompt in pipeline.row_tokenizer.encode_prompts(list(clean.values()), keys) if prompt.error is None
    ]
    limits = limits_of(pipeline, lm, [len(prompt.input_ids) for prompt in encoded])
    usable = [(prompt, limit) for prompt, limit in zip(encoded, limits, strict=True) if limit]
    spaced = [usable[i] for i in np.unique(np.linspace(0, len(usable) - 1, NUM_PROMPTS).astype(int))] if usable else []
    return CheckPrompts(
        origin=f"{counted(len(spaced), 'row')} of {name}",
        requests=tuple(GenerationRequest(list(prompt.input_ids), limit) for prompt, limit in spaced),
        names=tuple(prompt.key for prompt, _ in spaced),
        texts=tuple(prompt.text for prompt, _ in spaced),
    )


def generic_prompts(pipeline: LocalPipeline, lm: LoadedModel) -> CheckPrompts:
    """Return prompts of random tokens, the same for each tokenizer."""
    rng = random.Random(0)
    shortest, longest = LENGTHS
    longest = min(longest, max(shortest, (lm.context_length or longest) // 2))
    prompts = [rng.choices(lm.token_ids, k=rng.randint(shortest, longest)) for _ in range(NUM_PROMPTS)]
    limits = limits_of(pipeline, lm, [len(ids) for ids in prompts])
    return CheckPrompts(
        origin=f"{NUM_PROMPTS} generic prompts",
        requests=tuple(GenerationRequest(ids, limit) for ids, limit in zip(prompts, limits, strict=True)),
        names=tuple(f"prompt {number}" for number in range(1, NUM_PROMPTS + 1)),
        texts=None,
    )


def limits_of(pipeline: LocalPipeline, lm: LoadedModel, lengths: list[int]) -> list[int]:
    """Return the maximum tokens of the answers to prompts of these lengths; 0 for a prompt that does not fit."""
    most = NUM_TOKENS if pipeline.generation.labels else min(NUM_TOKENS, pipeline.max_new_tokens)
    most = 1 if lm.head is not None else max(1, most)
    counts = np.array(lengths, dtype=np.int64)
    usable, limits = usable_lengths(counts, most, context_length=lm.context_length, answers=lm.answer_context)
    answer_tokens: list[int] = np.where(usable > 0, limits, 0).tolist()
    return answer_tokens
