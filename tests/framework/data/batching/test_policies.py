from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.batching.plan import PlannedBatch
from partita.data.batching.policies import POLICIES, Fixed, Policy, build_policy
from partita_schema.errors import DataError
from partita_schema.sections.batching import (
    AutoBatching,
    Batching,
    BucketBatching,
    ChunkBatching,
    FixedBatching,
    PackBatching,
    TokenBudgetBatching,
)

from ....properties import examples


@st.composite
def some_lengths(draw: st.DrawFn) -> np.ndarray:
    """Return row lengths of windows; some windows have a row 100 times as long as the others."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=150))
    if draw(st.booleans()):
        lengths[draw(st.integers(0, len(lengths) - 1))] = 6000
    return np.array(lengths, dtype=draw(st.sampled_from([np.int32, np.int64])))


SORTED = {"window": st.integers(1, 200), "noise": st.sampled_from([0.0, 0.1, 0.9]), "longest_first": st.booleans()}
FIXED = st.builds(FixedBatching, type=st.just("fixed"), shuffle=st.booleans())
BUCKET = st.builds(BucketBatching, type=st.just("bucket"), length_spread=st.none() | st.integers(1, 40), **SORTED)


def token_budgets(multiple_of: int) -> st.SearchStrategy[TokenBudgetBatching]:
    """Return token budgets that round the numbers of rows down to a multiple."""
    fewest = 1 if multiple_of == 1 else multiple_of + 1
    return st.builds(
        TokenBudgetBatching,
        type=st.just("token_budget"),
        max_rows=st.none() | st.integers(fewest, 20),
        multiple_of=st.just(multiple_of),
        **SORTED,
    )


TOKEN_BUDGET = st.sampled_from([1, 2, 8]).flatmap(token_budgets)
PACK = st.builds(PackBatching, type=st.just("pack"), window=SORTED["window"])
CHUNK = st.builds(ChunkBatching, type=st.just("chunk"), shuffle=st.booleans(), window=SORTED["window"])
STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "fixed": FIXED,
    "bucket": BUCKET,
    "token_budget": TOKEN_BUDGET,
    "pack": PACK,
    "chunk": CHUNK,
}
ANY = st.one_of(*STRATEGIES.values())
SEEDS = st.integers(0, 99)


def cut(policy: Policy, lengths: np.ndarray, seed: int = 0) -> list[PlannedBatch]:
    return policy.cut(lengths, np.random.default_rng(seed))


def line_tokens(batch: PlannedBatch, lengths: np.ndarray) -> list[int]:
    """Return the numbers of tokens per line."""
    tokens = [0] * (max(batch.sequences.tolist()) + 1)
    for row, line in zip(batch.rows.tolist(), batch.sequences.tolist(), strict=True):
        tokens[line] += int(lengths[row])
    return tokens


@given(lengths=some_lengths(), batching=ANY, batch_size=st.integers(1, 9), seed=SEEDS)
def test_every_row_of_a_window_is_in_one_batch(
    lengths: np.ndarray, batching: Batching, batch_size: int, seed: int
) -> None:
    batches = cut(build_policy(batching, batch_size=batch_size, max_tokens=6000), lengths, seed)

    assert sorted(row for batch in batches for row in batch.rows.tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch.rows) == len(batch.sequences) > 0
        assert batch.sequences.tolist() == sorted(batch.sequences.tolist())
        assert sorted({*batch.sequences.tolist()}) == list(range(batch.sequences.max() + 1))
        assert {batch.rows.dtype, batch.sequences.dtype} == {np.dtype(np.int64)}
        if batching.type != "pack":
            assert batch.sequences.tolist() == list(range(len(batch.rows)))


@given(lengths=some_lengths(), batching=ANY, seed=SEEDS)
def test_batches_depend_only_on_lengths_and_seed(lengths: np.ndarray, batching: Batching, seed: int) -> None:
    policy = build_policy(batching, batch_size=4, max_tokens=6000)

    one, other = cut(policy, lengths, seed), cut(policy, lengths, seed)

    plans = [[(batch.rows.tolist(), batch.sequences.tolist()) for batch in batches] for batches in (one, other)]
    assert plans[0] == plans[1]


@given(lengths=some_lengths(), batching=TOKEN_BUDGET, spare=st.integers(0, 9000), seed=SEEDS)
def test_a_token_budget_with_padding_is_never_exceeded(
    lengths: np.ndarray, batching: TokenBudgetBatching, spare: int, seed: int
) -> None:
    budget = int(lengths.max()) + spare
    for batch in cut(build_policy(batching, batch_size=1, max_tokens=budget), lengths, seed):
        rows = len(batch.rows)
        assert rows * int(lengths[batch.rows].max()) <= budget
        assert rows <= (batching.max_rows or rows)
        assert rows <= batching.multiple_of or rows % batching.multiple_of == 0


@given(lengths=some_lengths(), spare=st.integers(0, 9000))
def test_the_next_row_would_not_fit_into_a_batch_of_a_budget(lengths: np.ndarray, spare: int) -> None:
    budget = int(lengths.max()) + spare
    policy = build_policy(TokenBudgetBatching(type="token_budget"), batch_size=1, max_tokens=budget)
    batches = sorted(
        cut(policy, lengths),
        key=lambda batch: (-lengths[batch.rows].max(), -lengths[batch.rows].min(), -len(batch.rows)),
    )

    for batch, after in pairwise(batches):
        assert (len(batch.rows) + 1) * int(lengths[batch.rows].max()) > budget
        assert lengths[batch.rows].min() >= lengths[after.rows].max()


@given(lengths=some_lengths(), spare=st.integers(0, 500), lines=st.integers(1, 5), seed=SEEDS)
def test_packed_lines_are_within_the_limit_and_few(lengths: np.ndarray, spare: int, lines: int, seed: int) -> None:
    room = int(lengths.max()) + spare
    batches = cut(build_policy(PackBatching(type="pack"), batch_size=lines, max_tokens=room), lengths, seed)

    tokens = [count for batch in batches for count in line_tokens(batch, lengths)]
    assert max(tokens) <= room
    assert sum(tokens) == lengths.sum()
    assert sum(len(line_tokens(batch, lengths)) < lines for batch in batches) <= 1
    assert all(len(line_tokens(batch, lengths)) <= lines for batch in batches)
    assert sum(2 * count <= room for count in tokens) <= 1, "two half-empty lines would have been merged"


def test_a_row_is_packed_into_the_line_with_the_least_remaining_space() -> None:
    """With a worst-fit rule the row of 3 would follow the 6, and the last 2 would need a third line."""
    lengths = np.array([7, 6, 3, 2, 2])
    [batch] = cut(build_policy(PackBatching(type="pack"), batch_size=4, max_tokens=10), lengths)
    lines = [sorted(lengths[batch.rows[batch.sequences == line]].tolist()) for line in range(2)]
    assert sorted(lines) == [[2, 2, 6], [3, 7]]
    assert line_tokens(batch, lengths) == [10, 10]


@given(lengths=some_lengths(), spread=st.integers(0, 30), noise=st.sampled_from([0.0, 0.3]), size=st.integers(1, 9))
def test_lengths_in_a_bucket_differ_at_most_by_the_spread(
    lengths: np.ndarray, spread: int, noise: float, size: int
) -> None:
    batching = BucketBatching(type="bucket", length_spread=spread or None, noise=noise)
    for batch in cut(build_policy(batching, batch_size=size), lengths):
        held = lengths[batch.rows]
        assert len(held) <= size
        assert not spread or held.max() - held.min() <= spread


@given(lengths=some_lengths(), size=st.integers(1, 9), batching=FIXED | BUCKET)
def test_incomplete_batches_are_dropped_if_requested(lengths: np.ndarray, size: int, batching: Any) -> None:
    kept = cut(build_policy(batching, batch_size=size), lengths)
    dropped = cut(build_policy(batching.model_copy(update={"drop_last": True}), batch_size=size), lengths)

    full = sorted(batch.rows.tolist() for batch in kept if len(batch.rows) == size)
    assert sorted(batch.rows.tolist() for batch in dropped) == full


@pytest.mark.parametrize("kind", ["token_budget", "pack"])
def test_a_row_longer_than_the_budget_is_an_error_with_advice(kind: str) -> None:
    types = {"token_budget": TokenBudgetBatching, "pack": PackBatching}
    policy = build_policy(types[kind](type=kind, max_tokens=100), batch_size=2)

    with pytest.raises(DataError) as error:
        cut(policy, np.array([5, 150, 101, 7]))

    assert str(error.value) == (
        "a row has 150 tokens, more than the 100 of data.batching.max_tokens (2 rows are longer); "
        "write at least 150 there, or preprocessing.global_max_sequence_length: 100"
    )


def test_noise_changes_the_batches_and_increases_padding() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 0.7, 2048).astype(int) + 1

    def padding(noise: float) -> float:
        policy = build_policy(BucketBatching(type="bucket", noise=noise), batch_size=16)
        padded = sum(len(batch.rows) * lengths[batch.rows].max() for batch in cut(policy, lengths))
        return float(1 - lengths.sum() / padded)

    def together(noise: float) -> float:
        """Return the fraction of the batches of one split that another split has as well."""
        policy = build_policy(BucketBatching(type="bucket", noise=noise), batch_size=16)
        one, other = ({frozenset(batch.rows.tolist()) for batch in cut(policy, lengths, seed)} for seed in (0, 1))
        return len(one & other) / len(one)

    assert padding(0.0) < 0.05 < padding(0.2) < 0.25
    assert together(0.0) == 1.0
    assert together(0.2) == 0.0


@pytest.mark.parametrize(
    "batching",
    [
        FixedBatching(type="fixed"),
        BucketBatching(type="bucket"),
        TokenBudgetBatching(type="token_budget", max_tokens=4096),
        PackBatching(type="pack", max_tokens=2048),
    ],
    ids=lambda batching: batching.type,
)
def test_batches_are_not_sorted_by_length(batching: Batching) -> None:
    lengths = np.random.default_rng(0).permutation(np.arange(1, 2001))
    batches = cut(build_policy(batching, batch_size=4), lengths)

    means = [float(lengths[batch.rows].mean()) for batch in batches]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


@examples(20)
@given(rows=st.integers(1, 300), size=st.integers(1, 20), drop=st.booleans(), batching=FIXED | BUCKET)
def test_batches_are_counted_without_a_plan_if_lengths_do_not_matter(
    rows: int, size: int, drop: bool, batching: Any
) -> None:
    policy = build_policy(batching.model_copy(update={"drop_last": drop}), batch_size=size)
    lengths = np.random.default_rng(rows).integers(1, 50, rows)
    made = sum(len(cut(policy, lengths[start : start + policy.window])) for start in range(0, rows, policy.window))

    assert policy.count(rows) == (None if getattr(batching, "length_spread", None) else made)


def test_every_batching_of_the_schema_has_a_policy() -> None:
    types = {arm.model_fields["type"].annotation.__args__[0] for arm in Batching.__origin__.__args__}  # type: ignore[attr-defined]

    assert types == set(POLICIES)


def test_every_policy_is_tried_by_the_property_tests() -> None:
    assert set(STRATEGIES) == set(POLICIES) - {"auto"}


def test_auto_has_no_separate_policy() -> None:
    with pytest.raises(AssertionError, match="has to be resolved"):
        build_policy(AutoBatching(), batch_size=1)


def test_ordered_rows_are_planned_in_small_windows_of_whole_batches() -> None:
    assert Fixed(32).window == 2048
    assert Fixed(32, shuffle_rows=False).window == 256
    assert Fixed(100, shuffle_rows=False).window == 300
