"""Tests of the parts of a step: gradients of several batches, and clipping."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import partita_trainers.engine
from partita.distributed.thread_group import ThreadGroup
from partita_schema.errors import TrainingError
from partita_trainers.engine import TrainEngine, begin_scaler_step, dry_run
from partita_trainers.process_group import SingleProcess

from .conftest import run

STEP = {
    "max_steps": 1,
    "learning_rate": 1.0,
    "optimizer": {"type": "sgd"},
    "learning_rate_scheduler": {"decay": "none"},
    "skip_all_evaluation": True,
}
"""One step in which the change of the weights equals the gradient."""


def weights(work: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in work.lm.module.parameters()])


def change_of(work: Any) -> torch.Tensor:
    """Train; return the change of the weights."""
    before = weights(work)
    run(work)
    return weights(work) - before


@pytest.mark.long
def test_the_penalty_of_an_adapter_has_the_same_weight_with_any_accumulation(make_work: Any, tmp_path: Path) -> None:
    def change(micro: int, weight: float) -> torch.Tensor:
        lm = make_work.model(dropout=0.0)
        lm.auxiliary_loss = lambda: weight * lm.module.head.weight.square().sum()
        batches = make_work.batches(micro=micro)
        return change_of(
            make_work(run=make_work.recorder(tmp_path / f"{micro} {weight}"), lm=lm, batches=batches, **STEP)
        )

    whole = change(1, 0.01)
    assert not torch.allclose(whole, change(1, 0.0), atol=1e-3)
    torch.testing.assert_close(change(8, 0.01), whole, rtol=1e-4, atol=1e-6)


def test_gradient_values_are_clipped(make_work: Any, tmp_path: Path) -> None:
    free = change_of(make_work(run=make_work.recorder(tmp_path / "free"), gradient_clipping={}, **STEP))
    limits = {"clipglobalnorm": None, "clipvalue": 0.01}
    clipped = change_of(make_work(run=make_work.recorder(tmp_path / "clipped"), gradient_clipping=limits, **STEP))
    assert float(free.abs().max()) > 0.05
    assert float(clipped.abs().max()) == pytest.approx(0.01, rel=1e-4)


def test_the_gradient_norm_is_clipped_and_the_original_norm_is_logged(make_work: Any, tmp_path: Path) -> None:
    def work_in(name: str, limit: float | None) -> Any:
        clipping = {"clipglobalnorm": limit}
        return make_work(run=make_work.recorder(tmp_path / name), gradient_clipping=clipping, **STEP)

    free, clipped = work_in("free", None), work_in("clipped", 0.125)
    norm = float(change_of(free).norm())
    assert norm > 0.25
    assert float(change_of(clipped).norm()) == pytest.approx(0.125, rel=1e-4)
    assert [work.run.log[0]["gradient_norm"] for work in (free, clipped)] == pytest.approx([norm, norm], rel=1e-4)


def test_a_gradient_on_only_one_rank_is_applied_on_all(make_work: Any) -> None:
    work, teams = make_work(), ThreadGroup.of(2, timeout_seconds=20)
    models = [make_work.model(), make_work.model()]
    learners = [
        TrainEngine(work.config.trainer, lm, device=torch.device("cpu"), process_group=process_group)
        for lm, process_group in zip(models, teams, strict=True)
    ]
    for rank, lm in enumerate(models):
        lm.module.head.bias.grad = torch.full((23,), 1.0 + rank)
    models[1].module.embed.weight.grad = torch.ones(23, 16)

    def add_up(engine: TrainEngine) -> None:
        engine.all_reduce_gradients(engine.process_group.all_gather_object(engine.has_gradients(), "gradients"))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(add_up, learners))
    for lm in models:
        assert lm.module.head.bias.grad.tolist() == [3.0] * 23
        assert torch.equal(lm.module.embed.weight.grad, torch.ones(23, 16))
        assert lm.module.hidden.weight.grad is None


@pytest.mark.parametrize("stage", ["before the loss", "after the loss", "after the gradients"])
def test_a_loss_scaler_interrupted_in_a_step_accepts_the_next_one(stage: str) -> None:
    scaler, weight = torch.amp.GradScaler("cpu", init_scale=8.0), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    if stage != "before the loss":
        scaler.scale(weight.sum()).backward()
    if stage == "after the gradients":
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
    optimizer.zero_grad()
    begin_scaler_step(scaler, device=torch.device("cpu"))
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    assert weight.tolist() == [0.0, 0.0]


class SecondOfTwo(SingleProcess):
    """The second of two processes, which exchange nothing."""

    rank, world_size = 1, 2


def test_a_first_step_out_of_memory_with_shared_weights_says_on_which_rank(
    make_work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    work = make_work()
    shards = SimpleNamespace(unshard=lambda: None, reshard=lambda: None, unwrap=lambda: None)
    monkeypatch.setattr(partita_trainers.engine, "Shards", lambda *_, **__: shards)
    monkeypatch.setattr(work.lm, "loss", fail)
    with (
        pytest.raises(TrainingError) as caught,
        dry_run(
            work.config.trainer, work.lm, device=work.device, process_group=SecondOfTwo(), sharded=True
        ) as take_step,
    ):
        take_step([work.batches.batch(torch.arange(2))])
    assert str(caught.value) == (
        "rank 1 ran out of memory in a first step on a short row, with the weights shared by 2 processes; take more "
        "processes, an adapter, or a smaller base_model"
    )
