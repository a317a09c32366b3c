"""Tests of the training shape: batches are counted as the loader builds them, and saved for a resumed run."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.data.batching.settings import BatchSettings
from partita.data.indexed_loader import IndexedLoader
from partita.data.rows import RowKeys
from partita.data.tokenized import TokenizedDataset
from partita.data.training_shape import TrainingShape, training_shape
from partita.training.datasets import warn_of_other_steps
from partita_schema.config import Config
from partita_schema.sections.batching import Batching, BucketBatching, FixedBatching, PackBatching, TokenBudgetBatching
from partita_trainers.batch_size.probe import BatchSize, Volume

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=70).map(np.array)
SIZES = st.integers(1, 30)
WINDOWS = st.integers(1, 40)
BATCHING = st.one_of(
    st.builds(FixedBatching, type=st.just("fixed"), shuffle=st.booleans()),
    st.builds(BucketBatching, type=st.just("bucket"), window=WINDOWS, length_spread=st.none() | st.just(9)),
    st.builds(TokenBudgetBatching, type=st.just("token_budget"), window=WINDOWS),
    st.builds(PackBatching, type=st.just("pack"), window=WINDOWS),
)


def encoded(lengths: np.ndarray, learned: int = 1) -> TokenizedDataset:
    """Return rows with these numbers of tokens, of which the last `learned` are loss tokens."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    spans = np.stack([np.maximum(0, lengths - learned), lengths], axis=1).astype(np.int32)
    return TokenizedDataset(
        ids_L=np.ones(int(lengths.sum()), dtype=np.int32),
        starts_Nplus1=starts,
        loss_spans_S2=spans,
        span_starts_Nplus1=np.arange(len(lengths) + 1),
        keys=RowKeys.counted("rows", len(lengths)),
        indices_N=np.arange(len(lengths)),
        fingerprint_inputs={"files": "f"},
    )


def shape_of(lengths: np.ndarray, batching: Batching, *, learned: int = 1, **trainer: Any) -> TrainingShape:
    return training_shape(config_of(batching.model_dump(), **trainer), encoded(lengths, learned))


def config_of(batching: dict[str, Any], **trainer: Any) -> Config:
    return Config.model_validate(
        {
            "base_model": "unused",
            "input_features": [{"name": "question"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "data": {"batching": batching},
            "trainer": {"type": "finetune", **trainer},
        }
    )


def loader_of(shape: TrainingShape, size: BatchSize, *, batches_per_step: int = 1) -> IndexedLoader:
    return IndexedLoader(
        encoded(shape.lengths),
        settings=BatchSettings(
            batching=shape.batching,
            batch_size=size.rows,
            max_tokens=size.max_tokens,
            batches_per_step=batches_per_step,
            seed=shape.seed,
        ),
        pad_token_id=0,
    )


def tuned(rows: int) -> BatchSize:
    return BatchSize(rows=rows, origin="tuned", device="cpu")


@given(LENGTHS, SIZES, BATCHING)
@settings(deadline=None)
def test_the_count_of_an_epoch_equals_that_of_the_loader(lengths: np.ndarray, size: int, batching: Batching) -> None:
    shape = shape_of(lengths, batching)
    loader = loader_of(shape, shape.with_tokens(tuned(size)))
    steps = loader.steps()
    batches = [batch for _ in range(loader.steps_per_epoch) for batch in next(steps).micro_batches]

    tokens = sum(batch.input_ids_BT.numel() for batch in batches)
    assert shape.volume(size) == Volume(batches=len(batches), tokens=tokens, rows=len(lengths))


@given(LENGTHS, SIZES, BATCHING)
@settings(deadline=None)
def test_no_batch_is_larger_than_the_probe_of_its_size(lengths: np.ndarray, size: int, batching: Batching) -> None:
    shape = shape_of(lengths, batching, learned=7)
    loader = loader_of(shape, shape.with_tokens(tuned(size)))
    steps = loader.steps()

    for _ in range(loader.steps_per_epoch):
        for batch in next(steps).micro_batches:
            assert batch.input_ids_BT.numel() <= size * shape.longest


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_the_volume_of_large_data_is_estimated_from_a_sample(rows: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 5000)
    for batching in (FixedBatching(type="fixed"), TokenBudgetBatching(type="token_budget"), PackBatching(type="pack")):
        shape = shape_of(lengths, batching)
        whole = shape.volume(rows)
        sampled = replace(shape, sampled_rows=2500)
        assert len(sampled.sample) == 2500
        assert lengths[sampled.sample].max() == lengths.max()
        foretold = sampled.volume(rows)
        assert foretold.batches == pytest.approx(whole.batches, rel=0.15)
        assert foretold.tokens == pytest.approx(whole.tokens, rel=0.15)
        assert foretold.rows == 5000


def test_the_volume_of_a_mix_is_that_of_the_rows_of_an_epoch() -> None:
    shape = shape_of(np.array([100, 10, 10, 10]), FixedBatching(type="fixed"))
    mixed = replace(shape, order=lambda epoch, rng: np.array([0, 0, 0, 1, 2, 3]))
    assert mixed.volume(1) == Volume(batches=6, tokens=330, rows=6)


def test_a_tuned_token_budget_is_the_rows_times_the_longest() -> None:
    shape = shape_of(np.array([5, 30, 12]), TokenBudgetBatching(type="token_budget"))

    size = shape.with_tokens(tuned(4))

    assert (size.rows, size.max_tokens) == (4, 120)
    assert shape.user_set is None


def test_a_configured_token_budget_needs_no_search() -> None:
    shape = shape_of(np.array([5, 30, 12]), TokenBudgetBatching(type="token_budget", max_tokens=100))

    assert shape.user_set == 3
    assert shape.with_tokens(tuned(3)).max_tokens == 100


def test_a_started_run_keeps_its_token_budget_if_its_rows_change() -> None:
    begun = BatchSize.from_record(
        shape_of(np.array([5, 30]), TokenBudgetBatching(type="token_budget")).with_tokens(tuned(4)).record()
    )
    now = shape_of(np.array([5, 20]), TokenBudgetBatching(type="token_budget"))

    assert now.with_tokens(begun).max_tokens == 120


def test_a_packed_line_has_the_configured_length_or_that_of_the_longest_row() -> None:
    lengths = np.array([5, 30, 12])

    assert shape_of(lengths, PackBatching(type="pack", max_tokens=64)).longest == 64
    assert shape_of(lengths, PackBatching(type="pack")).longest == 30
    limited = config_of({"type": "pack"}).model_dump() | {"preprocessing": {"global_max_sequence_length": 40}}
    assert training_shape(Config.model_validate(limited), encoded(lengths)).longest == 40
    assert shape_of(lengths, BucketBatching(type="bucket")).longest == 30


def test_the_loss_tokens_of_many_short_rows_in_a_budget_add_up() -> None:
    lengths = np.array([100] * 4 + [10] * 200)

    assert shape_of(lengths, BucketBatching(type="bucket"), learned=9).max_loss_tokens == 9
    assert shape_of(lengths, TokenBudgetBatching(type="token_budget"), learned=9).max_loss_tokens == 90
    assert shape_of(lengths, PackBatching(type="pack"), learned=9).max_loss_tokens == 90


@pytest.mark.parametrize("kind", ["token_budget", "pack"])
def test_a_step_has_about_the_configured_number_of_rows(kind: str) -> None:
    lengths = np.random.default_rng(0).lognormal(3, 0.5, 3000).astype(int) + 1
    types: Any = {"token_budget": TokenBudgetBatching, "pack": PackBatching}
    shape = shape_of(lengths, types[kind](type=kind), effective_batch_size=256)
    config = config_of({"type": kind}, effective_batch_size=256)

    most = shape.max_rows_for(256)
    assert shape.batches_per_step(config.trainer, shape.with_tokens(tuned(most))) == 1
    for size in (1, most // 4):
        result = shape.with_tokens(tuned(size))
        steps = shape.batches_per_step(config.trainer, result)
        loader = loader_of(shape, result, batches_per_step=steps)
        assert 3000 / loader.steps_per_epoch == pytest.approx(256, rel=0.15)
    fixed = config_of({"type": kind}, gradient_accumulation_steps=3)
    assert shape.batches_per_step(fixed.trainer, shape.with_tokens(tuned(most))) == 3


def test_other_steps_than_on_one_process_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of({"type": "pack"}, effective_batch_size=40)
    shape = shape_of(np.full(100, 10), PackBatching(type="pack"), effective_batch_size=40)
    alone = shape.batches_per_step(config.trainer, tuned(10))
    assert alone == 4
    for ranks in (1, 2, 3, 4):
        warn_of_other_steps(replace(shape, ranks=ranks), config.trainer, tuned(10))
    (message,) = caplog.messages
    assert message == (
        "a step has 3 batches on 3 processes, and would have 4 on one process, because each process takes equally "
        "many; with smaller batches the difference is smaller"
    )
    accumulated = config_of({"type": "pack"}, gradient_accumulation_steps=3)
    warn_of_other_steps(replace(shape, ranks=2), accumulated.trainer, tuned(10))
    warn_of_other_steps(replace(shape, ranks=3, recorded_batches=6), config.trainer, tuned(10))
    assert caplog.messages == [message]


def test_a_step_of_unpacked_rows_has_exactly_the_configured_number() -> None:
    config = config_of({"type": "bucket"}, effective_batch_size=24)
    shape = training_shape(config, encoded(np.full(50, 9)))

    assert shape.batches_per_step(config.trainer, tuned(8)) == 3
    assert shape.max_rows_for(24) == 24


@pytest.mark.parametrize(
    ("trainer", "ranks", "accumulates"),
    [
        ({}, 1, True),
        ({}, 8, True),
        ({}, 16, False),
        ({"effective_batch_size": 1}, 1, False),
        ({"effective_batch_size": 2}, 1, True),
        ({"effective_batch_size": 2}, 2, False),
        ({"gradient_accumulation_steps": 1}, 1, False),
        ({"gradient_accumulation_steps": 2}, 4, True),
        ({"type": "custom", "target": "module:Class"}, 2, False),
    ],
)
def test_steps_accumulate_gradients_if_the_smallest_size_has_several_batches(
    trainer: dict[str, Any], ranks: int, accumulates: bool
) -> None:
    config = config_of({"type": "fixed"}, **trainer)
    shape = training_shape(config, encoded(np.full(40, 5)), ranks=ranks)
    assert shape.accumulates(config.trainer) is accumulates


@pytest.mark.parametrize(("max_tokens", "accumulates"), [(40, True), (80, False)])
def test_packed_steps_accumulate_gradients_if_a_line_has_fewer_rows_than_a_step(
    max_tokens: int, accumulates: bool
) -> None:
    config = config_of({"type": "pack", "max_tokens": max_tokens})
    assert training_shape(config, encoded(np.full(160, 5))).accumulates(config.trainer) is accumulates


def test_auto_batching_is_chosen_by_the_lengths() -> None:
    config = config_of({"type": "auto"})

    same = training_shape(config, encoded(np.full(50, 9)))
    skewed = training_shape(config, encoded(np.arange(1, 500)))

    assert (same.batching.type, skewed.batching.type) == ("fixed", "bucket")
    assert same.reason.startswith("batching fixed: rows have 9 tokens, ")
    assert shape_of(np.arange(1, 9), BucketBatching(type="bucket")).reason == ""


def test_the_first_rows_of_a_stream_represent_all_later_rows() -> None:
    settings = config_of({"type": "auto"}, max_steps=5).model_dump()
    settings["data"]["source"] = {"type": "jsonl", "path": "a.jsonl", "streaming": True}
    settings["preprocessing"] = {"global_max_sequence_length": 900}
    config = Config.model_validate(settings)

    shape = training_shape(config, encoded(np.arange(1, 500)), more_rows=True)

    assert shape.batching == BucketBatching(type="bucket"), "many rows follow, so no noise is needed"
    assert shape.longest == 900
    assert shape.max_rows == 2048
