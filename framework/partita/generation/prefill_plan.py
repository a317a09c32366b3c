"""Which prompts are prefilled together, so that padding and passes take the least time."""

import math
from collections.abc import Sequence

from partita.lm.base import AnsweringSlots
from partita.lm.cheapest_split import cheapest_split

PASS_TOKENS = 64
"""Tokens that are prefilled in the time that one more pass takes, for a small model on a CPU."""
PLANNED_PROMPTS = 64
"""Number of prompts that are planned at a time."""


def split_into_passes(lengths: Sequence[int], slots: AnsweringSlots) -> list[tuple[int, int]]:
    """Return the start and the end of each pass in a sequence of prompts.

    Args:
        lengths: Tokens to prefill of each prompt, in falling order.
        slots: The slots.
    """

    def cost(start: int, end: int) -> float:
        count = end - start
        allowed = slots.readable(lengths[start], count) == count
        return PASS_TOKENS + slots.read_length(lengths[start]) * count if allowed else math.inf

    return cheapest_split(len(lengths), cost)
