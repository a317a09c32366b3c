"""Tests of how often an optimizer step waits for an accelerator, counted on a device without values."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.lm.branches.masks import probe_rows
from partita_trainers.base import Batch, GlobalBatch
from partita_trainers.device_copies import Prefetch, fetch_scalars, to_device
from partita_trainers.engine import TrainEngine
from partita_trainers.objective import CROSS_ENTROPY, Objective, ObjectiveContext, prepare
from partita_trainers.objectives.kto import KtoObjective
from partita_trainers.objectives.preference import PairObjective
from partita_trainers.objectives.reward import RewardObjective
from partita_trainers.steps.micro_batches import MicroBatchSplitter
from partita_trainers.steps.step import take_step

from ...classifiers import LABELS, OUTPUTS, make_rows, settings, write_classifier
from ...device_watch import DEVICE, DeviceWatch
from ...encoder_decoders import SIZES, save_encoder_decoder
from ...head_models import LoadedHead
from .test_reward_model import Setup

LORA = {"type": "lora"}
BASE = {
    "type": "scratch",
    "architecture": "llama",
    "size": "nano",
    "num_hidden_layers": 1,
    "tokenizer": "byte",
    "context_length": 64,
}
OPTIMIZER = {"optimizer": {"type": "adamw", "fused": False}}  # the fused one does not run without values

KINDS = [
    (None, 1),
    (LORA, 4),
    pytest.param(None, 4, marks=pytest.mark.long),
    pytest.param(LORA, 1, marks=pytest.mark.long),
]
"""Adapter and micro-batches of a step."""


def watched_step(lm: Any, objective: Objective, batches: list[Batch]) -> DeviceWatch:
    """Take two steps on the device, and return what was noted in the second."""
    lm.prepare_training(10)
    lm.module.to(DEVICE)
    lm.base.tie_weights()  # parameters are replaced when they are moved
    lm.device = DEVICE
    lm.keep_reference()
    engine = TrainEngine(lm.config.trainer, lm, device=DEVICE, objective=objective)
    for number in (1, 2):
        with DeviceWatch() as watch:
            take_step(
                GlobalBatch(tuple(batches), {}, 0.0),
                number=number,
                learning_rate=1e-3,
                engine=engine,
                splitter=MicroBatchSplitter(),
                seed=0,
            )
    return watch


def named(batch: Batch, seed: int) -> Batch:
    """Return a batch whose row keys differ from those of other seeds."""
    return replace(batch, keys=tuple(f"{seed}/{key}" for key in batch.keys))


def assert_one_wait(watch: DeviceWatch) -> None:
    assert len(watch.waits) == 1, watch.waits
    assert "together.tolist()" in watch.waits[0]
    assert "device_copies.py" in watch.waits[0]
    assert watch.copies > 0


@pytest.mark.parametrize(("adapter", "accumulation"), KINDS)
def test_a_step_of_fine_tuning_waits_once(small: Any, adapter: dict[str, Any] | None, accumulation: int) -> None:
    lm = small.load(small.config(base_model=BASE, adapter=adapter, trainer={"type": "finetune", **OPTIMIZER}))
    watch = watched_step(lm, CROSS_ENTROPY, [small.batch(seed) for seed in range(accumulation)])
    assert_one_wait(watch)
    assert watch.copies == 3 * accumulation  # ids, the indices of labels, and labels


@pytest.mark.parametrize(
    "changes",
    [{"base_model": {**BASE, "architecture": "gpt2"}}, {"model_parameters": {"neftune_noise_alpha": 5}}],
)
def test_a_step_with_other_settings_waits_once(small: Any, changes: dict[str, Any]) -> None:
    lm = small.load(small.config(**{"base_model": BASE, **changes}, trainer={"type": "finetune", **OPTIMIZER}))
    assert_one_wait(watched_step(lm, CROSS_ENTROPY, [small.batch(0), small.batch(1)]))


def test_a_step_with_packed_rows_waits_once(small: Any) -> None:
    lm = small.load(small.config(base_model=BASE, trainer={"type": "finetune", **OPTIMIZER}))
    assert lm.isolation == "positions"
    batch, positions = small.batch(0, lengths=(9, 9)), torch.tensor([[*range(4), *range(5)]] * 2)
    labels = batch.input_ids_BT.masked_fill(positions == 0, -100)
    packed = replace(batch, labels_BT=labels, keys=tuple("abcd"), position_ids_BT=positions)
    assert_one_wait(watched_step(lm, CROSS_ENTROPY, [packed, named(packed, 1)]))


@pytest.mark.parametrize(("adapter", "accumulation"), KINDS)
@pytest.mark.parametrize("in_step", [False, True])
def test_a_step_of_dpo_waits_once(small: Any, in_step: bool, adapter: dict[str, Any] | None, accumulation: int) -> None:
    output = [{"name": "answer", "type": "preference"}]
    trainer = {"type": "preference", **OPTIMIZER}
    lm = small.load(small.config(base_model=BASE, adapter=adapter, trainer=trainer, output_features=output))
    assert lm.branch_support.reason is None
    objective = PairObjective(lm.config.trainer.loss)
    batches = [named(probe_rows(lm.token_ids), seed) for seed in range(accumulation)]
    assert objective.references is not None
    if not in_step:
        prepare(objective, ObjectiveContext(lm, lm.module), batches)
    objective.references.started, objective.references.in_step = True, in_step
    assert_one_wait(watched_step(lm, objective, batches))


@pytest.mark.parametrize(("adapter", "accumulation"), KINDS)
def test_a_step_of_kto_waits_once(small: Any, adapter: dict[str, Any] | None, accumulation: int) -> None:
    output = [{"name": "answer", "type": "text", "label": "liked"}]
    lm = small.load(
        small.config(base_model=BASE, adapter=adapter, trainer={"type": "kto", **OPTIMIZER}, output_features=output)
    )
    liked = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    objective = KtoObjective(lm.config.trainer)
    batches = [replace(named(small.batch(seed), seed), row_values_NK=liked) for seed in range(accumulation)]
    prepare(objective, ObjectiveContext(lm, lm.module), batches)
    objective.references.started = True
    assert_one_wait(watched_step(lm, objective, batches))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_step_of_a_reward_model_waits_once(tmp_path: Path, accumulation: int) -> None:
    setup = Setup(tmp_path, "llama", trainer={"type": "reward", **OPTIMIZER})
    lm: Any = setup.lm
    assert lm.branch_support.reason is None
    batches = [named(setup.batch(), seed) for seed in range(accumulation)]
    assert_one_wait(watched_step(lm, RewardObjective(), batches))


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_a_step_of_a_classifier_waits_once(tmp_path: Path, architecture: str, kind: str) -> None:
    folder, rows = write_classifier(tmp_path, architecture, kind), make_rows(8, seed=1, longest=24)
    labels = {OUTPUTS[kind]["name"]: () if kind == "number" else LABELS}
    config = settings(architecture, kind, base_model=str(folder), trainer={"type": "finetune", **OPTIMIZER})
    head = LoadedHead(config, rows, folder=tmp_path, labels=labels)
    padded = head.batch()
    assert padded.lengths_B.min() < padded.input_ids_BT.shape[1]
    full = replace(padded, lengths_B=torch.full_like(padded.lengths_B, padded.input_ids_BT.shape[1]))
    assert_one_wait(watched_step(head.lm, CROSS_ENTROPY, [named(padded, 0), named(full, 1)]))


@pytest.mark.parametrize("architecture", SIZES)
@pytest.mark.parametrize("adapter", [None, LORA])
def test_a_step_of_an_encoder_decoder_waits_once(
    small: Any, tmp_path: Path, architecture: str, adapter: dict[str, Any] | None
) -> None:
    folder = save_encoder_decoder(tmp_path, architecture)
    trainer = {"type": "finetune", **OPTIMIZER}
    lm = small.load(small.config(base_model=str(folder), adapter=adapter, trainer=trainer))
    padded = small.batch(0)
    ends = padded.labels_BT.ne(-100).int().argmax(1)
    assert ends.min() < ends.max()
    full = replace(padded, labels_BT=padded.labels_BT.clone())
    full.labels_BT[:, : ends.max()], full.labels_BT[:, ends.max()] = -100, 5
    assert_one_wait(watched_step(lm, CROSS_ENTROPY, [padded, named(full, 1)]))


@pytest.mark.parametrize(
    "wait",
    [
        lambda there, here: float(there.sum()),
        lambda there, here: there.tolist(),
        lambda there, here: there.cpu(),
        lambda there, here: bool(torch.isfinite(there).all()),
        lambda there, here: there.nonzero(),
        lambda there, here: there[there > 0],
        lambda there, here: here.to(DEVICE),
        lambda there, here: torch.tensor([1.0, 2.0], device=DEVICE),
        lambda there, here: there + here,
        lambda there, here: there[here.long()],
    ],
)
def test_each_kind_of_wait_is_noted(wait: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    there, here = torch.zeros(3, device=DEVICE), torch.ones(3)
    with DeviceWatch() as watch:
        wait(there, here)
    assert len(watch.waits) == 1, watch.waits
    assert "test_waiting_for_the_device.py" in watch.waits[0]


def test_work_on_the_host_and_queued_work_are_no_waits() -> None:
    there, here = torch.zeros(3, device=DEVICE), torch.ones(3)
    with DeviceWatch() as watch:
        assert here[here > 0].tolist() == [1, 1, 1]
        there[to_device(torch.tensor([0, 2]), DEVICE)].sum()
    assert (watch.waits, watch.copies) == ([], 1)


def test_numbers_are_read_as_float_reads_them() -> None:
    values = [
        torch.tensor(0.1),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([2**40 + 1]),
        0.3,
        torch.tensor(True),
    ]
    assert fetch_scalars(values) == [float(value) for value in values]
    with DeviceWatch() as watch:
        assert fetch_scalars([0.5, torch.zeros((), device=DEVICE), torch.zeros(1, device=DEVICE)]) == [0.5, 1.0, 1.0]
    assert len(watch.waits) == 1


def test_the_inputs_of_a_batch_are_copied_once_and_early_except_to_a_cpu(small: Any) -> None:
    lm, first, second = small.load(small.config()), small.batch(0), small.batch(1)
    copied = []

    def copy(batch: Batch) -> Any:
        copied.append(batch.keys)
        return lm.copy_inputs(batch)

    prefetch = Prefetch[Any](DEVICE)
    prefetch.begin(first, copy)
    assert len(copied) == 1
    assert prefetch.take(first, copy).batch is first
    assert len(copied) == 1
    prefetch.begin(first, copy)
    assert prefetch.take(second, copy).batch is second  # e.g. smaller parts after memory ran out
    assert len(copied) == 3

    on_cpu = Prefetch[Any](torch.device("cpu"))
    on_cpu.begin(first, copy)
    assert len(copied) == 3


def test_the_next_micro_batch_is_copied_before_the_present_one_ends(small: Any) -> None:
    lm = small.load(small.config(base_model=BASE, trainer={"type": "finetune", **OPTIMIZER}))
    events, copy_inputs = list[str](), lm.copy_inputs
    lm.copy_inputs = lambda batch: events.append(f"copy {batch.keys[0]}") or copy_inputs(batch)
    lm.module.register_forward_pre_hook(lambda module, inputs: events.append("forward"))
    watched_step(lm, CROSS_ENTROPY, [named(small.batch(seed), seed) for seed in range(3)])
    one_step = ["copy 0/row 0", "forward", "copy 1/row 0", "forward", "copy 2/row 0", "forward"]
    assert events == 2 * one_step
