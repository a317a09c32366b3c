import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.data.streams.sharding import assign_shards, unevenness

some_sizes = st.lists(st.one_of(st.integers(0, 10**12), st.floats(0, 100)), max_size=30)


@settings(deadline=None)
@given(some_sizes, st.integers(1, 6), st.none() | st.integers(0, 9))
def test_each_shard_is_in_one_shard_group_that_depends_on_the_seed(
    sizes: list[float], num_groups: int, seed: int | None
) -> None:
    def dealt() -> list[list[int]]:
        rng = None if seed is None else np.random.default_rng(seed)
        return [own.tolist() for own in assign_shards(sizes, num_groups, rng=rng)]

    assert len(dealt()) == num_groups
    assert sorted(shard for own in dealt() for shard in own) == list(range(len(sizes)))
    assert dealt() == dealt()


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40), st.integers(1, 6), st.none() | st.integers(0, 9))
def test_no_shard_group_has_more_than_its_share_and_one_shard(
    sizes: list[int], num_groups: int, seed: int | None
) -> None:
    rng = None if seed is None else np.random.default_rng(seed)
    longest = max(sum(sizes[shard] for shard in own) for own in assign_shards(sizes, num_groups, rng=rng))

    assert longest <= sum(sizes) / num_groups + max(sizes)


def test_shards_of_equal_size_are_distributed_round_robin() -> None:
    assert [own.tolist() for own in assign_shards([5.0] * 7, 3)] == [[0, 3, 6], [1, 4], [2, 5]]


def test_large_shards_are_distributed_first_and_read_in_order() -> None:
    assert [own.tolist() for own in assign_shards([1, 1, 6, 1, 2, 1], 2)] == [[2], [0, 1, 3, 4, 5]]


def test_shards_of_similar_size_change_groups_between_epochs_and_groups_stay_even() -> None:
    sizes = [100 + number % 7 for number in range(40)] + [1000]
    first, second = (assign_shards(sizes, 4, rng=np.random.default_rng(seed)) for seed in (1, 2))

    assert [set(own.tolist()) for own in first] != [set(own.tolist()) for own in second]
    for dealt in (first, second):
        totals = [sum(sizes[shard] for shard in own) for own in dealt]
        assert max(totals) - min(totals) <= 110


def test_unevenness_is_the_largest_shard_group_divided_by_the_mean() -> None:
    assert unevenness([3, 1, 1, 1], 2) == 1
    assert unevenness([6, 1, 1], 2) == pytest.approx(1.5)
    assert unevenness([5], 4) == 4
    assert unevenness([], 4) == 1
