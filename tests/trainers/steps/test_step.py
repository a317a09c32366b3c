"""Tests of steps that run out of memory: repeated in smaller parts with the same results."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partita_schema.errors import TrainingError
from partita_trainers.base import Batch
from partita_trainers.checkpoints.checkpoint import checkpoint_name, list_checkpoints
from partita_trainers.steps.gradients import seed_generators
from partita_trainers.steps.micro_batches import MicroBatchSplitter, split_batch
from partita_trainers.steps.step_stats import batch_digest

from ...properties import first
from ..conftest import Killed, comparable, run


def limit_memory(work: Any, places: int) -> list[tuple[int, int]]:
    """Make training passes with more than `places` tokens fail, after dropout; return the shapes of the others."""
    shapes: list[tuple[int, int]] = []

    def check(layer: Any, inputs: tuple[torch.Tensor]) -> None:
        rows, tokens = inputs[0].shape[:2]
        if layer.training and rows * tokens > places:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if layer.training:
            shapes.append((rows, tokens))

    work.lm.module.head.register_forward_pre_hook(check)
    return shapes


def weights(work: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in work.lm.module.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def batch_of(lengths: list[int]) -> Batch:
    ids = torch.arange(len(lengths) * max(lengths)).reshape(len(lengths), max(lengths))
    labels = ids.clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return Batch(ids, labels, torch.tensor(lengths), tuple(f"row {row}" for row in range(len(lengths))))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_random_numbers_are_those_of_a_seeded_torch(device: str) -> None:
    torch.manual_seed(7)
    wanted = torch.rand(5)
    seed_generators(7, device=torch.device(device))
    assert torch.equal(torch.rand(5), wanted)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=17), power=st.integers(0, 5))
def test_a_split_batch_has_every_row_once_in_order_with_all_loss_tokens(lengths: list[int], power: int) -> None:
    batch = batch_of(lengths)
    parts = split_batch(batch, 2**power)
    assert [key for part in parts for key in part.keys] == list(batch.keys)
    assert len(parts) == min(2**power, batch.rows)
    assert max(part.rows for part in parts) - min(part.rows for part in parts) <= 1
    assert sum(part.loss_tokens for part in parts) == batch.loss_tokens
    assert sum(part.tokens for part in parts) == batch.tokens
    start = 0
    for part in parts:
        width = part.input_ids_BT.shape[1]
        assert torch.equal(part.input_ids_BT, batch.input_ids_BT[start : start + part.rows, :width])
        if power and batch.rows > 1:
            assert width == int(part.lengths_B.max())
        start += part.rows


@pytest.mark.long
def test_out_of_memory_halves_the_batches_and_does_not_change_the_steps(
    make_work: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work_in(name: str) -> Any:
        return make_work(
            run=make_work.recorder(tmp_path / name),
            lm=make_work.model(dropout=0.0),
            batches=make_work.batches(step_rows=16),
            epochs=2,
        )

    free, full = work_in("free"), work_in("full")
    run(free)
    shapes = limit_memory(full, 25)
    with caplog.at_level(logging.WARNING):
        run(full)
    assert {rows for rows, _ in shapes} == {2}
    assert sum(rows for rows, _ in shapes) == 2 * 48
    assert [record["batch_hash"] for record in full.run.log] == [record["batch_hash"] for record in free.run.log]
    for one, other in zip(comparable(full.run.log), comparable(free.run.log), strict=True):
        assert one == {
            **other,
            "loss": pytest.approx(other["loss"], rel=1e-5),
            "gradient_norm": pytest.approx(other["gradient_norm"], rel=1e-4),
        }
    assert full.run.noted["out_of_memory"] == [
        {"step": 1, "rows": 8, "tokens": 10, "now": 4},
        {"step": 1, "rows": 4, "tokens": 10, "now": 2},
    ]
    assert "out_of_memory" not in free.run.noted
    assert [record.getMessage() for record in caplog.records] == [
        "step 1: out of memory with 8 rows of 10 tokens; retrying with 4 rows at a time",
        "step 1: out of memory with 4 rows of 10 tokens; retrying with 2 rows at a time",
    ]


def test_a_halved_step_uses_the_same_random_numbers_as_one_planned_with_halves(make_work: Any, tmp_path: Path) -> None:
    class Halves(make_work.batches):
        def steps(self) -> Any:
            for step in super().steps():
                yield replace(
                    step, micro_batches=tuple(part for batch in step.micro_batches for part in split_batch(batch, 2))
                )

    planned = make_work(run=make_work.recorder(tmp_path / "planned"), batches=Halves(), epochs=1)
    run(planned)
    halved = make_work(run=make_work.recorder(tmp_path / "halved"), epochs=1)
    limit_memory(halved, 20)
    run(halved)
    assert [r["loss"] for r in halved.run.log] == [r["loss"] for r in planned.run.log]
    assert same(weights(halved), weights(planned))


def random_states(work: Any) -> list[bytes]:
    """Train; return the state of torch's random numbers before each forward pass."""
    results: list[bytes] = []

    def note(module: torch.nn.Module, inputs: Any) -> None:
        if module.training:
            results.append(torch.get_rng_state().numpy().tobytes())

    work.lm.module.register_forward_pre_hook(note)
    run(work)
    return results


def test_dropout_differs_between_steps_rows_and_seeds(make_work: Any, tmp_path: Path) -> None:
    def work_in(name: str) -> Any:
        batches = make_work.batches(rows=2, step_rows=2, micro=2)  # the same two rows in each step, one per batch
        run = make_work.recorder(tmp_path / name)
        return make_work(run=run, batches=batches, epochs=3, skip_all_evaluation=True)

    states = random_states(work_in("one"))
    assert len(set(states)) == len(states) == 6
    assert random_states(work_in("again")) == states
    other = work_in("other")
    other = replace(other, config=other.config.model_copy(update={"seed": other.config.seed + 1}))
    assert not {*random_states(other)} & {*states}


def test_the_log_has_the_fraction_of_padding_in_a_step(make_work: Any) -> None:
    work = make_work(epochs=1)
    steps = make_work.batches().steps()
    run(work)
    for record in work.run.log:
        batches = next(steps).micro_batches
        padded = sum(batch.input_ids_BT.numel() - int(batch.lengths_B.sum()) for batch in batches)
        cells = sum(batch.input_ids_BT.numel() for batch in batches)
        assert 0 < record["padding"] == pytest.approx(padded / cells, abs=1e-6)


def test_out_of_memory_in_the_backward_pass_leaves_no_partial_gradient(make_work: Any, tmp_path: Path) -> None:
    def work_in(name: str) -> Any:
        lm = make_work.model(dropout=0.0)
        return make_work(run=make_work.recorder(tmp_path / name), lm=lm, epochs=1, optimizer={"type": "sgd"})

    free, full = work_in("free"), work_in("full")
    run(free)
    calls = []

    def fail_once(gradient: torch.Tensor) -> None:
        calls.append(gradient.shape)
        if len(calls) == 4:  # the second batch of the second step; its output layer already has its gradient
            raise torch.OutOfMemoryError("CUDA out of memory")

    def watch(module: Any, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail_once)

    full.lm.module.hidden.register_forward_hook(watch)
    run(full)
    assert full.run.noted["out_of_memory"] == [{"step": 2, "rows": 4, "tokens": 10, "now": 2}]
    for one, other in zip(weights(full), weights(free), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_a_run_that_halved_and_was_killed_continues_bit_for_bit(make_work: Any, tmp_path: Path) -> None:
    options = {"epochs": 3, "steps_per_checkpoint": 4}

    def scarce_at_step_six(work: Any) -> None:
        starts = []

        def check(module: Any, inputs: tuple[torch.Tensor]) -> None:
            starts.append(inputs[0].shape[0])
            if module.training and sum(starts) > 5 * 8 and inputs[0].shape[0] > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")

        work.lm.module.register_forward_pre_hook(check)

    def evaluate(
        split: str, *, generated: bool = True, max_rows: int | None = None, step: int | None = None
    ) -> dict[str, float]:
        return {"loss": 1.0}

    straight = make_work(run=make_work.recorder(tmp_path / "straight"), evaluate=evaluate, **options)
    scarce_at_step_six(straight)
    run(straight)
    killed = make_work(run=make_work.recorder(tmp_path / "killed"), evaluate=evaluate, **options)
    scarce_at_step_six(killed)
    log_step = killed.run.log_step

    def log_then_die(record: dict[str, Any]) -> None:
        log_step(record)
        if record["step"] == 11:
            raise Killed

    killed.run.log_step = log_then_die
    with pytest.raises(Killed):
        run(killed)
    assert list_checkpoints(killed.run.checkpoints)[-1] == 8
    recorder = make_work.recorder(tmp_path / "killed")
    recorder.log = killed.run.log
    saved = json.loads((recorder.checkpoints / checkpoint_name(8) / "trainer.json").read_text(encoding="utf8"))
    assert saved["splitter"] == {"parts": 2, "events": [{"step": 6, "rows": 4, "tokens": 10, "now": 2}]}
    # Memory is free again, but the steps equal those of the run that was not killed.
    resumed = make_work(run=recorder, evaluate=evaluate, **options)
    assert run(resumed).resumed_from == 8
    assert straight.run.noted["out_of_memory"] == [{"step": 6, "rows": 4, "tokens": 10, "now": 2}]
    assert comparable(resumed.run.log) == comparable(straight.run.log)
    assert same(weights(resumed), weights(straight))


@pytest.mark.parametrize(
    "full",
    first([RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError("CUDA"), MemoryError()]),
)
def test_one_row_that_does_not_fit_is_reported_with_what_to_change(make_work: Any, full: BaseException) -> None:
    work = make_work(epochs=1)
    rows = []

    def loss(module: torch.nn.Module, batch: Any) -> torch.Tensor:
        rows.append(batch.rows)
        raise full

    work.lm.loss = loss
    before = weights(work)
    with pytest.raises(TrainingError) as error:
        run(work)
    tokens = int(next(make_work.batches().steps()).micro_batches[0].lengths_B[0])
    assert str(error.value) == (
        f"step 1: out of memory with 1 row of {tokens} tokens; lower preprocessing.global_max_sequence_length, write "
        "trainer.gradient_checkpointing: true or quantization: {bits: 4}, or take a smaller base_model"
    )
    assert rows == [4, 2, 1]
    assert same(weights(work), before)


def test_out_of_memory_in_an_update_stops_and_reports_partially_changed_weights(make_work: Any) -> None:
    work = make_work(epochs=2, steps_per_checkpoint=2)
    work.lm.after_step = lambda step: throw(torch.OutOfMemoryError("CUDA out of memory")) if step == 4 else None
    with pytest.raises(TrainingError) as error:
        run(work)
    assert str(error.value) == (
        "step 4: out of memory while the weights were updated; some of them may have changed already. The last "
        "checkpoint is intact: free memory on the device and start the run again, or begin a new one with an adapter "
        "or optimizer: {type: adamw_8bit}"
    )
    assert list_checkpoints(work.run.checkpoints) == [2]
    assert len(work.run.log) == 3


def throw(error: BaseException) -> None:
    raise error


@pytest.mark.long
def test_the_range_test_does_not_treat_out_of_memory_as_divergence(make_work: Any) -> None:
    work = make_work(learning_rate="auto", epochs=1)
    limit_memory(work, 5)
    with pytest.raises(TrainingError, match="step 1: out of memory with 1 row of"):
        run(work)


def packed_batch(lines: list[list[int]]) -> Batch:
    """Return packed rows of these lengths; every token but the first of a row is in the loss."""
    lengths = [sum(line) for line in lines]
    shape = len(lines), max(lengths)
    ids = torch.arange(shape[0] * shape[1]).reshape(shape)
    labels, positions = torch.full(shape, -100), torch.zeros(shape, dtype=torch.int64)
    for number, line in enumerate(lines):
        start = 0
        for length in line:
            positions[number, start : start + length] = torch.arange(length)
            labels[number, start + 1 : start + length] = ids[number, start + 1 : start + length]
            start += length
    keys = tuple(f"row {row}" for row in range(sum(map(len, lines))))
    return Batch(ids, labels, torch.tensor(lengths), keys, positions)


def rows_of(batch: Batch) -> dict[str, tuple[list[int], list[int]]]:
    """Return the ids and labels of each packed row by key."""
    results: dict[str, tuple[list[int], list[int]]] = {}
    keys = iter(batch.keys)
    for line, length in enumerate(batch.lengths_B.tolist()):
        positions = batch.position_ids_BT[line, :length].tolist()
        starts = [place for place, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            assert positions[start:end] == list(range(end - start))
            ids, labels = batch.input_ids_BT[line, start:end], batch.labels_BT[line, start:end]
            results[next(keys)] = ids.tolist(), labels.tolist()
    assert next(keys, None) is None
    return results


@settings(deadline=None)
@given(
    lines=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=6), min_size=1, max_size=7), power=st.integers(0, 6)
)
def test_a_split_batch_of_packed_rows_keeps_every_row_complete_with_its_key(lines: list[list[int]], power: int) -> None:
    batch = packed_batch(lines)
    assert batch.rows == sum(map(len, lines))
    parts = split_batch(batch, 2**power)
    results: dict[str, tuple[list[int], list[int]]] = {}
    for part in parts:
        results |= rows_of(part)
        assert part.input_ids_BT.shape == part.labels_BT.shape == part.position_ids_BT.shape
        if power and batch.rows > 1:
            assert part.input_ids_BT.shape[1] == int(part.lengths_B.max())
    assert results == rows_of(batch)
    assert [key for part in parts for key in part.keys] == list(batch.keys)
    assert sum(part.loss_tokens for part in parts) == batch.loss_tokens
    if 2**power <= len(lines):
        assert len(parts) == 2**power
    else:
        assert all(part.sequences == 1 for part in parts)
    if 2**power >= len(lines) * max(map(len, lines)):
        assert all(part.rows == 1 for part in parts)


def test_a_single_line_of_packed_rows_is_split_between_rows_down_to_one(caplog: Any) -> None:
    splitter, batch = MicroBatchSplitter(), packed_batch([[4, 2, 3]])
    with caplog.at_level(logging.WARNING):
        splitter.halve(batch, number=3, failure=MemoryError())
    assert caplog.messages == ["step 3: out of memory with 3 packed rows (1 x 9 tokens); retrying with half"]
    assert splitter.events == [{"step": 3, "rows": 1, "tokens": 9, "now": 1}]
    assert [part.rows for part in splitter.split([batch])] == [2, 1]
    splitter.halve(splitter.split([batch])[0], number=3, failure=MemoryError())
    parts = splitter.split([batch])
    assert [part.tokens for part in parts] == [4, 2, 3]
    with pytest.raises(TrainingError, match="out of memory with 1 row of 4 tokens"):
        splitter.halve(parts[0], number=3, failure=MemoryError())


def test_batch_hashes_depend_on_ids_labels_lengths_and_keys() -> None:
    batch = batch_of([4, 2])
    others = [
        replace(batch, input_ids_BT=batch.input_ids_BT + 1),
        replace(batch, labels_BT=batch.labels_BT.masked_fill(batch.labels_BT == 3, -100)),
        replace(batch, lengths_B=torch.tensor([4, 3])),
        replace(batch, keys=("row 0", "row 7")),
    ]
    assert len({batch_digest(one) for one in (batch, *others)}) == 5
    assert batch_digest(batch_of([4, 2])) == batch_digest(batch)


def test_batch_hashes_depend_on_positions() -> None:
    packed = packed_batch([[4, 2], [3, 3]])
    elsewhere = replace(packed, position_ids_BT=packed_batch([[2, 4], [3, 3]]).position_ids_BT)
    digests = {batch_digest(batch) for batch in (packed, elsewhere)}
    assert len(digests) == 2
    assert batch_digest(replace(packed, position_ids_BT=None)) not in digests
