"""Which prompts are prefilled together, so that padding and passes take the least time."""

from collections.abc import Iterator, Sequence
from itertools import takewhile

from partita.lm.base import AnsweringSlots
from partita.lm.slots.cheapest_split import cheapest_split

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

    counts = [count for count in range(1, len(lengths) + 1) if slots.prompts_per_pass(1, count) == count]

    def passes(start: int) -> Iterator[tuple[int, float]]:
        most = slots.prompts_per_pass(lengths[start], len(lengths) - start)
        padded = slots.padded_length(lengths[start])
        return ((start + count, PASS_TOKENS + padded * count) for count in takewhile(most.__ge__, counts))

    return cheapest_split(len(lengths), passes)
