from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.data.sources.mixed import MixedOrder, Mixer, choices, whole_shares
from partita_schema.errors import DataError

from ....work import counted_calls

some_weights = st.lists(st.one_of(st.integers(1, 30), st.floats(0.01, 50)), min_size=1, max_size=7)


def rng(epoch: int = 0) -> np.random.Generator:
    return np.random.default_rng([3, epoch])


@settings(deadline=None)
@given(some_weights)
def test_every_source_is_within_a_row_of_its_share_after_every_row(weights: list[float]) -> None:
    counts = np.cumsum(choices(weights, 2000)[:, None] == np.arange(len(weights)), axis=0)
    shares = np.array(weights) / sum(weights)

    assert np.abs(counts - np.arange(1, 2001)[:, None] * shares).max() < 1


@settings(deadline=None)
@given(some_weights, st.integers(0, 300))
def test_a_mixer_resumes_from_its_counts(weights: list[float], taken: int) -> None:
    mixer, result = Mixer(weights), []
    for number in range(taken + 50):
        if number == taken:
            mixer = Mixer(weights, counts=list(mixer.counts))
        result.append(mixer.choose())
        mixer.count(result[-1])

    assert result == choices(weights, taken + 50).tolist()


def test_weights_are_converted_to_integer_shares() -> None:
    assert whole_shares([0.7, 0.3]) == [7, 3]
    assert whole_shares([1.0, 1.0, 2.0]) == [1, 1, 2]
    assert whole_shares([1 / 3, 2 / 3]) == [1, 2]
    assert sum(whole_shares([0.123456789, 0.987654321])) == pytest.approx(1_000_000, abs=2)
    assert whole_shares([1e-12, 1.0])[0] == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.2, 5)), min_size=1, max_size=5), st.integers(0, 3))
def test_all_once_has_every_row_once(parts: list[tuple[int, float]], epoch: int) -> None:
    sizes, weights = zip(*parts, strict=True)
    order = MixedOrder(sizes, weights, "all_once").order(epoch, rng(epoch))

    assert sorted(order.tolist()) == list(range(sum(sizes)))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.2, 5)), min_size=1, max_size=5))
def test_first_ends_with_the_last_row_of_any_source(parts: list[tuple[int, float]]) -> None:
    sizes, weights = zip(*parts, strict=True)
    order = MixedOrder(sizes, weights, "first").order(0, rng())
    ends = np.cumsum(sizes)
    counts = np.bincount(np.searchsorted(ends, order, side="right"), minlength=len(sizes))
    last = np.searchsorted(ends, order[-1], side="right")

    assert len(set(order.tolist())) == len(order)
    assert counts[last] == sizes[last]
    assert all(count <= size for count, size in zip(counts, sizes, strict=True))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.2, 5)), min_size=2, max_size=5))
def test_all_ends_when_each_source_was_read_completely(parts: list[tuple[int, float]]) -> None:
    sizes, weights = zip(*parts, strict=True)
    order = MixedOrder(sizes, weights, "all").order(0, rng())
    counts = Counter(order.tolist())
    ends = np.cumsum(sizes)
    last = int(np.searchsorted(ends, order[-1], side="right"))

    assert len(counts) == sum(sizes)
    assert {counts[row] for row in range(ends[last] - sizes[last], ends[last])} == {1}
    for end, size in zip(ends, sizes, strict=True):
        passes = [counts[row] for row in range(end - size, end)]
        assert max(passes) - min(passes) <= 1


def test_passes_and_epochs_have_different_orders() -> None:
    mixed = MixedOrder([50, 500], [1, 1], "all")
    first, second = mixed.order(0, rng(0)), mixed.order(1, rng(1))
    passes = first[first < 50][:500].reshape(10, 50)

    assert mixed.order(0, rng(0)).tolist() == first.tolist() != second.tolist()
    assert len({tuple(one) for one in passes.tolist()}) == 10
    assert all(sorted(one) == list(range(50)) for one in passes.tolist())
    assert MixedOrder([2, 2], [1, 1], "all", shuffle=False).order(0, rng()).tolist() == [0, 2, 1, 3]


def test_the_number_of_calls_does_not_grow_with_the_rows() -> None:
    few, many = (
        counted_calls(lambda n=n: MixedOrder([3 * n, 3 * n, 4 * n], [0.5, 0.3, 0.2], "all").order(0, rng()))[1]
        for n in (10_000, 100_000)
    )

    assert many < 1.2 * few < 2_000


def test_unmixable_sources_are_refused() -> None:
    with pytest.raises(DataError, match=r"source 2 of data.mix has no rows to train on; remove it"):
        MixedOrder([5, 0], [1, 1], "all")
    with pytest.raises(DataError, match=r"an epoch of this mix would have .* rows, since the sources end so far from"):
        MixedOrder([100_000_000, 10], [0.001, 1], "all")
