"""Tests that training after a batch-size probe equals training without one bit for bit, on real models."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from partita.lm.base import GenerationOptions
from partita_schema.sections.trainer import FinetuneTrainer
from partita_trainers.base import GlobalBatch, ProbeContext, TrainerContext
from partita_trainers.batch_size.probe import Volume
from partita_trainers.checkpoints.checkpoint import random_state
from partita_trainers.finetune import Finetune
from partita_trainers.steps.micro_batches import split_batch

from ...properties import ends

LORA = {"type": "lora", "r": 4, "dropout": 0.1}
ADALORA = {"type": "adalora", "init_r": 6, "target_r": 5, "tfinal": 1}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full, schedule-free": ({}, {"optimizer": {"type": "schedule_free_adamw"}}),
    "full, bf16, muon": ({}, {"mixed_precision": "bf16", "optimizer": {"type": "muon"}}),
    "full, NEFTune, recomputed": (
        {"model_parameters": {"neftune_noise_alpha": 5.0}},
        {"gradient_checkpointing": True, "optimizer": {"type": "adafactor"}},
    ),
    "lora, 8-bit AdamW": ({"adapter": LORA}, {"optimizer": {"type": "adamw_8bit"}}),
    "lora on 4 bits, paged": (
        {"adapter": LORA, "quantization": {"bits": 4}},
        {"optimizer": {"type": "paged_adamw_8bit"}},
    ),
    "lora on 8 bits": ({"adapter": LORA, "quantization": {"bits": 8}}, {}),
    "adalora": ({"adapter": ADALORA}, {"optimizer": {"type": "adamw"}}),
}


class Rows:
    """Data with four seeded rows per step, in two batches."""

    num_rows, steps_per_epoch = 20, 5

    def __init__(self, small: Any) -> None:
        self.small = small

    def total_steps(self, epochs: float) -> int:
        return round(5 * epochs)

    def load_data_position(self, data_position: Mapping[str, Any]) -> None:
        raise AssertionError("nothing is resumed here")

    def merge_data_positions(self, data_positions: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return data_positions[0]

    def steps(self) -> Iterator[GlobalBatch]:
        number = 0
        while True:
            number += 1
            yield GlobalBatch(tuple(split_batch(self.small.batch(number), 2)), {"step": number}, number / 5)


class Recorder:
    """A run that records its log."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        folder.mkdir()
        self.log: list[dict[str, Any]] = []

    def log_step(self, record: Mapping[str, Any]) -> None:
        self.log.append({key: value for key, value in record.items() if key != "seconds"})

    def truncate_log(self, step: int) -> None:
        self.log.clear()

    def report(self, metrics: Mapping[str, float], *, step: int, split: str) -> None:
        raise AssertionError("nothing is evaluated here")

    def note(self, **values: Any) -> None:
        self.noted = values

    def progress(self, total: int, description: str, *, completed: int = 0) -> Any:
        return nullcontext(SimpleNamespace(advance=lambda *_, **__: None))


def load(small: Any, base_folder: Path, sections: dict[str, Any], trainer: dict[str, Any]) -> Any:
    given = {"type": "finetune", "epochs": 1, "learning_rate": 0.01, "skip_all_evaluation": True, **trainer}
    plain = {} if "quantization" not in sections else {"base_model": str(base_folder)}
    torch.manual_seed(5)
    return small.load(small.config(trainer=given, **plain, **sections))


def train(small: Any, lm: Any, folder: Path) -> list[dict[str, Any]]:
    run = Recorder(folder)
    work = TrainerContext(
        config=lm.config,
        lm=lm,
        batches=Rows(small),
        evaluate=lambda split, **options: {},
        splits=("training",),
        run=run,
        device=lm.device,
    )
    assert isinstance(lm.config.trainer, FinetuneTrainer)
    Finetune(lm.config.trainer).train(work)
    return run.log


def probe_context(lm: Any, *, max_row_tokens: int) -> ProbeContext:
    return ProbeContext(
        config=lm.config,
        lm=lm,
        device=lm.device,
        max_row_tokens=max_row_tokens,
        max_loss_tokens=12,
        token_ids=range(2, 250),
        max_rows=20,
        volume=lambda rows: Volume(batches=1, tokens=800),
        estimated_bytes=lambda rows: rows,
    )


def try_sizes(small: Any, lm: Any) -> list[torch.Tensor]:
    """Run a probe that also generates and evaluates; return the trained weights during the probe."""
    with Finetune(lm.config.trainer).probe(probe_context(lm, max_row_tokens=40)) as probe:
        for rows in (1, 4, 6):
            assert probe.run(rows).prefill_seconds > 0
        lm.generate(small.requests((5, 3), (9, 2)), GenerationOptions({"do_sample": True}), seed=3)
        small.held_out_loss(lm)
        return weights(lm)


def weights(lm: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in lm.module.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ends(KINDS))
@pytest.mark.long
def test_training_after_a_probe_equals_training_without_one(
    small: Any, base_folder: Path, tmp_path: Path, kind: str
) -> None:
    sections, trainer = KINDS[kind]
    plain = load(small, base_folder, sections, trainer)
    log = train(small, plain, tmp_path / "plain")

    tried = load(small, base_folder, sections, trainer)
    before, state = weights(tried), random_state()
    extra = tried.budget.tensors() if tried.budget is not None else {}
    try_sizes(small, tried)
    assert same(weights(tried), before)
    assert all(parameter.grad is None for parameter in tried.module.parameters())
    assert not tried.module.training
    after = random_state()
    assert torch.equal(after.pop("torch"), state.pop("torch"))
    assert after == state
    if tried.budget is not None:
        assert tried.budget.tensors().keys() == extra.keys() == set()
        assert tried.budget.ranks() is None

    assert train(small, tried, tmp_path / "tried") == log
    assert same(weights(tried), weights(plain))
    requests = small.requests((6, 8), (3, 8))
    assert tried.generate(requests, GenerationOptions({}), seed=1) == plain.generate(
        requests, GenerationOptions({}), seed=1
    )


def test_growing_rotary_positions_are_restored_after_a_probe(small: Any) -> None:
    scaled = {"rope_scaling": {"type": "dynamic", "factor": 4.0}}
    lm = small.load(small.config(model_parameters=scaled))
    before = {name: buffer.clone() for name, buffer in lm.module.named_buffers()}
    with Finetune(lm.config.trainer).probe(probe_context(lm, max_row_tokens=200)) as probe:
        probe.run(2)
        stretched = dict(lm.module.named_buffers())
        assert any(not torch.equal(stretched[name], buffer) for name, buffer in before.items())
    after = dict(lm.module.named_buffers())
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())
    rotary = lm.base.model.rotary_emb
    assert rotary.max_seq_len_cached == rotary.original_max_seq_len
