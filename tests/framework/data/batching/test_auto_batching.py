import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.data.batching.auto_batching import choose_batching, expected_batches, expected_padding
from partita.data.batching.policies import build_policy
from partita_schema.sections.batching import BucketBatching, FixedBatching, PackBatching


def skewed(rows: int) -> np.ndarray:
    return np.random.default_rng(0).lognormal(4, 0.8, rows).astype(int).clip(2, 2000)


def test_rows_of_equal_length_are_not_sorted() -> None:
    batching, reason = choose_batching(np.full(300, 64), batch_size=16)

    assert batching == FixedBatching(type="fixed")
    assert reason == "batching fixed: rows have 64 tokens, and batches of 16 in random order would have 0.0 % padding"
    assert choose_batching(skewed(300), batch_size=1)[0].type == "fixed", "one row has no padding"


@pytest.mark.parametrize(("rows", "noise"), [(20, 0.1), (1000, 0.1), (6000, 0.05), (20_000, 0.0)])
def test_skewed_rows_are_sorted_with_more_noise_for_few_rows(rows: int, noise: float) -> None:
    batching, reason = choose_batching(skewed(rows), batch_size=16)

    assert batching == BucketBatching(type="bucket", noise=noise)
    assert reason.startswith("batching bucket: rows have ")
    assert ("few for windows of 2,048" in reason) == (noise > 0)


def test_the_reason_contains_the_numbers() -> None:
    lengths = np.array([10] * 500 + [100] * 500)

    assert choose_batching(lengths, batch_size=16)[1] == (
        "batching bucket: rows have 10 to 100 tokens, half of them up to 55; batches of 16 in random order would have "
        "45.0 % padding, those of similar length 0.7 % (with noise 0.1, since 1,000 rows are few for windows of 2,048)"
    )


def test_batches_of_few_rows_differ_between_epochs() -> None:
    lengths = skewed(1000)
    batching, _ = choose_batching(lengths, batch_size=16)
    policy = build_policy(batching, batch_size=16)

    def batches(seed: int) -> set[frozenset[int]]:
        rng = np.random.default_rng(seed)
        order = rng.permutation(1000)
        return {frozenset(order[batch.rows].tolist()) for batch in policy.cut(lengths[order], rng)}

    assert len(batches(0) & batches(1)) <= 1


@given(st.lists(st.integers(1, 90), min_size=1, max_size=60).map(np.array), st.integers(1, 9))
def test_the_estimated_padding_equals_a_plain_count(lengths: np.ndarray, batch_size: int) -> None:
    rest = lengths[np.random.default_rng(0).permutation(len(lengths))].tolist()
    batches = [rest[start : start + batch_size] for start in range(0, len(rest), batch_size)]
    cells = sum(len(batch) * max(batch) for batch in batches)

    result = expected_padding(lengths, build_policy(FixedBatching(type="fixed"), batch_size=batch_size))

    assert result == pytest.approx(1 - sum(rest) / cells)


def test_rows_that_drop_last_leaves_out_are_no_tokens_of_batches() -> None:
    lengths = np.array([10] * 7 + [1] * 3)
    policy = build_policy(FixedBatching(type="fixed", drop_last=True), batch_size=7)
    padding, left_out = expected_batches(lengths, policy)
    assert left_out == pytest.approx(0.3)
    assert 0 <= padding < 0.5


def test_padding_of_packed_lines_is_counted_by_line() -> None:
    policy = build_policy(PackBatching(type="pack", max_tokens=10), batch_size=2)

    assert expected_padding(np.array([4, 6, 5]), policy) == pytest.approx(1 - 15 / 20)
