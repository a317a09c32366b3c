"""Consecutive parts of the least total cost."""

import math
from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from partita.lm.slots.cheapest_split import cheapest_split

from ....properties import examples


@examples(200)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9), fixed=st.integers(0, 60), most=st.integers(1, 9))
def test_no_other_split_costs_less(sizes: list[int], fixed: int, most: int) -> None:
    def cost(start: int, end: int) -> float:
        return fixed + (end - start) * max(sizes[start:end]) if end - start <= most else math.inf

    def parts_from(start: int) -> list[tuple[int, float]]:
        return [(end, cost(start, end)) for end in range(start + 1, min(start + most, len(sizes)) + 1)]

    def total(cuts: tuple[bool, ...]) -> float:
        bounds = [0, *(index for index, cut in enumerate(cuts, 1) if cut), len(sizes)]
        return sum(cost(start, end) for start, end in pairwise(bounds))

    parts = cheapest_split(len(sizes), parts_from)
    assert [index for start, end in parts for index in range(start, end)] == list(range(len(sizes)))
    assert sum(cost(start, end) for start, end in parts) == min(
        total(cuts) for cuts in product((False, True), repeat=len(sizes) - 1)
    )
