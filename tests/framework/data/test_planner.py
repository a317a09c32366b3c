from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.data.planner import POLICIES, IndexedPlanner
from partita_schema.data import Batching, BucketBatching, FixedBatching

BATCHINGS = st.one_of(
    st.builds(BucketBatching, type=st.just("bucket"), window=st.integers(1, 40)),
    st.builds(FixedBatching, type=st.just("fixed"), shuffle=st.booleans()),
)


@st.composite
def planners(draw: st.DrawFn) -> IndexedPlanner:
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=120))
    return IndexedPlanner(
        np.array(lengths, dtype=np.int32),
        batching=draw(BATCHINGS),
        batch_size=draw(st.integers(1, 9)),
        batches_per_step=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 5)),
    )


def plain(steps: Iterator[list[np.ndarray]]) -> list[list[list[int]]]:
    return [[batch.tolist() for batch in step] for step in steps]


@given(planner=planners(), epoch=st.integers(0, 3))
def test_every_row_is_in_an_epoch_exactly_once(planner: IndexedPlanner, epoch: int) -> None:
    steps = plain(planner.steps(epoch))

    assert sorted(row for step in steps for batch in step for row in batch) == list(range(len(planner._lengths)))
    assert len(steps) == planner.steps_per_epoch


@given(planner=planners(), epoch=st.integers(0, 2))
def test_steps_are_full_but_for_the_tail(planner: IndexedPlanner, epoch: int) -> None:
    steps = plain(planner.steps(epoch))

    assert {len(step) for step in steps} == {planner._batches_per_step}
    batches = [batch for step in steps for batch in step]
    filled = [batch for batch in batches if batch]
    assert batches[: len(filled)] == filled
    assert sum(len(batch) < planner._batch_size for batch in filled) <= 1
    assert max(map(len, batches)) <= planner._batch_size


@settings(max_examples=50)
@given(planner=planners(), epoch=st.integers(0, 2))
def test_a_plan_that_starts_anywhere_is_the_rest_of_the_straight_plan(planner: IndexedPlanner, epoch: int) -> None:
    straight = plain(planner.steps(epoch))

    for start in range(planner.steps_per_epoch + 1):
        assert plain(planner.steps(epoch, start)) == straight[start:]


def make(lengths: np.ndarray, batching: Batching, *, seed: int = 0) -> IndexedPlanner:
    return IndexedPlanner(lengths, batching=batching, batch_size=8, batches_per_step=2, seed=seed)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 400)
    for batching in (BucketBatching(type="bucket", window=64), FixedBatching(type="fixed")):
        orders = [plain(make(lengths, batching, seed=seed).steps(epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
        assert orders[0] != orders[1]
        assert orders[0] != orders[2]
        assert orders[0] == plain(make(lengths, batching).steps(0))


def test_rows_that_are_not_shuffled_keep_their_order() -> None:
    steps = plain(make(np.ones(20), FixedBatching(type="fixed", shuffle=False)).steps(3))

    assert [row for step in steps for batch in step for row in batch] == list(range(20))


def test_buckets_hold_rows_of_like_length() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 0.7, 5000).astype(int) + 1

    def padding(batching: Batching) -> float:
        batches = [batch for step in make(lengths, batching).steps(0) for batch in step if len(batch)]
        padded = sum(len(batch) * lengths[batch].max() for batch in batches)
        return float(1 - lengths.sum() / padded)

    assert padding(BucketBatching(type="bucket")) < 0.02 < 0.4 < padding(FixedBatching(type="fixed"))


def test_long_and_short_batches_come_in_no_order() -> None:
    lengths = np.arange(2048)

    first = [int(step[0][0]) for step in make(lengths, BucketBatching(type="bucket")).steps(0)]

    assert abs(np.corrcoef(first, np.arange(len(first)))[0, 1]) < 0.3


def test_a_start_deep_in_an_epoch_plans_one_window_only(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = make(np.ones(100_000, dtype=np.int32), BucketBatching(type="bucket", window=1024))
    cut = type(planner._policy).cut
    windows = []

    def counted(policy: object, rows: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        windows.append(len(rows))
        return cut(policy, rows, lengths)  # type: ignore[arg-type]

    monkeypatch.setattr(type(planner._policy), "cut", counted)
    next(planner.steps(0, start=5000))

    assert windows == [1024]


def test_every_batching_of_the_schema_has_a_policy() -> None:
    types = {arm.model_fields["type"].annotation.__args__[0] for arm in Batching.__origin__.__args__}  # type: ignore[attr-defined,union-attr]

    assert types == set(POLICIES)
