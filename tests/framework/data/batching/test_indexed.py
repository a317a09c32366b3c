from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.batching.indexed import IndexedPlanner, PlannedStep
from partita.data.batching.policies import POLICIES, Policy, build_policy
from partita.data.sources.mixed import MixedOrder
from partita_schema.errors import DataError, ResumeError
from partita_schema.sections.batching import (
    Batching,
    BucketBatching,
    ChunkBatching,
    FixedBatching,
    PackBatching,
    TokenBudgetBatching,
)

from ....properties import examples

SORTED = {"window": st.integers(1, 40), "noise": st.sampled_from([0.0, 0.2]), "longest_first": st.booleans()}
STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "fixed": st.builds(FixedBatching, type=st.just("fixed"), shuffle=st.booleans()),
    "bucket": st.builds(BucketBatching, type=st.just("bucket"), length_spread=st.none() | st.integers(1, 20), **SORTED),
    "token_budget": st.builds(
        TokenBudgetBatching, type=st.just("token_budget"), max_rows=st.none() | st.integers(1, 9), **SORTED
    ),
    "pack": st.builds(PackBatching, type=st.just("pack"), window=st.integers(1, 40)),
    "chunk": st.builds(ChunkBatching, type=st.just("chunk"), shuffle=st.booleans(), window=st.integers(1, 40)),
}
BATCHINGS = st.one_of(*STRATEGIES.values())
LONGEST = 3000


@st.composite
def planners(draw: st.DrawFn) -> IndexedPlanner:
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=120))
    if draw(st.booleans()):
        lengths[draw(st.integers(0, len(lengths) - 1))] = LONGEST
    policy = build_policy(draw(BATCHINGS), batch_size=draw(st.integers(1, 9)), max_tokens=LONGEST)
    return IndexedPlanner(
        np.array(lengths, dtype=np.int32),
        policy=policy,
        batches_per_step=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 5)),
    )


def plain(step: PlannedStep) -> Any:
    return [(batch.rows.tolist(), batch.sequences.tolist()) for batch in step.batches], step[1:]


def rows_of(steps: list[PlannedStep]) -> list[int]:
    return [row for step in steps for batch in step.batches for row in batch.rows.tolist()]


def test_every_policy_is_tried_by_the_property_tests() -> None:
    assert set(STRATEGIES) == set(POLICIES) - {"auto"}


@given(planner=planners(), epoch=st.integers(0, 3))
def test_every_row_is_in_an_epoch_exactly_once(planner: IndexedPlanner, epoch: int) -> None:
    steps = list(planner.steps(epoch))

    assert sorted(rows_of(steps)) == list(range(planner.num_rows))
    assert len(steps) == planner.count_steps(epoch)
    assert sum(len(batch.rows) > 0 for step in steps for batch in step.batches) == planner.count_batches(epoch)


@given(planner=planners(), epoch=st.integers(0, 2))
def test_all_steps_but_the_last_are_full(planner: IndexedPlanner, epoch: int) -> None:
    steps = list(planner.steps(epoch))

    assert {len(step.batches) for step in steps} == {planner.batches_per_step}
    batches = [batch.rows.tolist() for step in steps for batch in step.batches]
    filled = [batch for batch in batches if batch]
    assert batches[: len(filled)] == filled
    assert len(batches) - len(filled) < planner.batches_per_step


@examples(60)
@given(planner=planners(), epoch=st.integers(0, 2))
def test_a_plan_from_any_position_is_the_rest_of_the_whole_plan(planner: IndexedPlanner, epoch: int) -> None:
    straight = list(planner.steps(epoch))

    for done, step in enumerate(straight[:-1], start=1):
        assert (step.epoch, step.step) == (epoch, done)
        planner.check(epoch, step.window, step.taken, step.step)
        rest = [plain(later) for later in planner.steps(epoch, step.window, step.taken, step.step)]
        assert rest == [plain(later) for later in straight[done:]]
    assert straight[-1][1:] == (epoch + 1, 0, 0, 0, epoch + 1)
    passed = [step.passed for step in straight]
    assert passed == sorted(passed)
    assert epoch < passed[0] <= epoch + 1


def make(lengths: np.ndarray, batching: Batching, *, seed: int = 0, **changes: Any) -> IndexedPlanner:
    policy = build_policy(batching, batch_size=8, max_tokens=changes.pop("max_tokens", None))
    return IndexedPlanner(lengths, policy=policy, batches_per_step=2, seed=seed, **changes)


def test_epochs_and_seeds_have_different_orders() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 400)
    for batching in (
        BucketBatching(type="bucket", window=64),
        FixedBatching(type="fixed"),
        TokenBudgetBatching(type="token_budget", max_tokens=800, window=64),
        PackBatching(type="pack", max_tokens=256, window=64),
    ):
        orders = [
            list(map(plain, make(lengths, batching, seed=seed).steps(epoch)))
            for seed, epoch in ((0, 0), (0, 1), (1, 0))
        ]
        assert [step[0] for step in orders[0]] != [step[0] for step in orders[1]]
        assert orders[0] != orders[2]
        assert orders[0] == list(map(plain, make(lengths, batching).steps(0)))


def test_each_window_has_a_different_random_order() -> None:
    """Windows with the same order would have their longest batch at the same position."""
    lengths = np.arange(1, 257)
    [*steps] = make(lengths, BucketBatching(type="bucket", window=64)).steps(0)
    means = np.array([lengths[batch.rows].mean() for step in steps for batch in step.batches]).reshape(4, 8)
    assert len({tuple(window) for window in np.argsort(means).tolist()}) == 4


def test_rows_keep_their_order_without_shuffling() -> None:
    planner = make(np.ones(20), FixedBatching(type="fixed", shuffle=False))

    assert rows_of(list(planner.steps(3))) == list(range(20))


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=3),
    stop=st.sampled_from(["first", "all", "all_once"]),
    epoch=st.integers(0, 2),
)
def test_the_plan_of_a_mix_follows_its_order_with_repeated_rows(sizes: list[int], stop: Any, epoch: int) -> None:
    mixed = MixedOrder(sizes, [1.0] * len(sizes), stop)
    planner = make(np.arange(1, sum(sizes) + 1), BucketBatching(type="bucket", window=16), order=mixed.order)

    steps = list(planner.steps(epoch))

    chosen = mixed.order(epoch, np.random.default_rng([0, epoch, 0]))
    assert sorted(rows_of(steps)) == sorted(chosen.tolist())
    assert planner.num_rows == mixed.length
    assert len(steps) == planner.count_steps(epoch)


def test_buckets_have_rows_of_similar_length() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 0.7, 5000).astype(int) + 1

    def padding(batching: Batching, **changes: Any) -> float:
        padded = 0
        for step in make(lengths, batching, **changes).steps(0):
            for batch in step.batches:
                line_tokens = (
                    np.bincount(batch.sequences, weights=lengths[batch.rows]) if len(batch.rows) else np.zeros(1)
                )
                padded += len(line_tokens) * int(line_tokens.max())
        return float(1 - lengths.sum() / padded)

    assert padding(BucketBatching(type="bucket")) < 0.02 < 0.4 < padding(FixedBatching(type="fixed"))
    assert padding(TokenBudgetBatching(type="token_budget"), max_tokens=1024) < 0.025
    assert padding(PackBatching(type="pack"), max_tokens=1024) < 0.01


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=100).map(np.array),
    window=st.integers(1, 40),
    kind=st.sampled_from(["bucket", "token_budget"]),
    epoch=st.integers(0, 2),
)
def test_an_epoch_starts_with_the_longest_row_if_requested(
    lengths: np.ndarray, window: int, kind: str, epoch: int
) -> None:
    types: Any = {"bucket": BucketBatching, "token_budget": TokenBudgetBatching}
    batching = types[kind](type=kind, window=window, longest_first=True)

    first = next(make(lengths, batching, max_tokens=90).steps(epoch)).batches[0]

    assert lengths[first.rows].max() == lengths.max()


@pytest.mark.parametrize(
    "batching",
    [
        FixedBatching(type="fixed"),
        BucketBatching(type="bucket", noise=0.1, window=1024),
        TokenBudgetBatching(type="token_budget", max_tokens=8000, longest_first=True),
        PackBatching(type="pack", max_tokens=2048),
    ],
    ids=lambda batching: batching.type,
)
def test_a_start_in_the_middle_of_an_epoch_plans_only_one_window(
    batching: Batching, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = np.random.default_rng(0).lognormal(4, 0.7, 100_000).astype(np.int32).clip(1, 2000)
    planner = make(lengths, batching)
    cut = type(planner.policy).cut
    windows = []

    def noted(policy: Policy, lengths: np.ndarray, rng: np.random.Generator) -> Any:
        windows.append(len(lengths))
        return cut(policy, lengths, rng)

    monkeypatch.setattr(type(planner.policy), "cut", noted)
    planner.check(0, 24, 5, 3000)
    next(planner.steps(0, 24, 5, 3000))

    assert windows == [planner.policy.window]


def test_a_row_too_long_for_the_policy_is_reported_before_planning() -> None:
    names = ["a.jsonl:1", "a.jsonl:2"]
    batching = TokenBudgetBatching(type="token_budget", max_tokens=10)

    with pytest.raises(DataError, match=r"^row a.jsonl:2 has 11 tokens, more than the 10 of data.batching.max_tokens;"):
        make(np.array([10, 11]), batching, name=names.__getitem__)


@pytest.mark.parametrize(
    "batching", [FixedBatching(type="fixed", drop_last=True), BucketBatching(type="bucket", drop_last=True)]
)
def test_an_epoch_without_any_batch_is_an_error(batching: Batching) -> None:
    planner = make(np.ones(7), batching)

    message = (
        r"^no batch of 7 rows is full, so that all are left out; remove data\.batching\.drop_last or write a smaller "
        r"trainer\.batch_size$"
    )
    for ask in (lambda: next(planner.steps(0)), lambda: planner.count_steps(0)):
        with pytest.raises(DataError, match=message):
            ask()


def test_rows_that_fill_no_batch_are_dropped_if_requested() -> None:
    batching = BucketBatching(type="bucket", window=16, drop_last=True)

    steps = list(make(np.arange(1, 45), batching).steps(0))

    assert {len(batch.rows) for step in steps for batch in step.batches} == {8, 0}
    assert len(set(rows_of(steps))) == len(rows_of(steps)) == 40
    assert steps[-1].passed == 1.0


@pytest.mark.parametrize(
    ("window", "taken", "step"), [(2, 0, 3), (1, 2, 3), (1, 9, 3), (0, 0, 1), (0, 1, 0), (99, 0, 4)]
)
def test_a_position_outside_the_epoch_is_refused(window: int, taken: int, step: int) -> None:
    planner = make(np.ones(32), BucketBatching(type="bucket", window=16))
    planner.check(0, 0, 0, 0)
    planner.check(0, 1, 1, 1)

    with pytest.raises(ResumeError) as error:
        planner.check(0, window, taken, step)

    assert str(error.value) == (
        f"the data position is step {step} at batch {taken} of window {window}, and epoch 0 of 2 windows has no such "
        "position; continue from an older checkpoint"
    )
