"""Tests of training of reward models, with a small model of which the scores can be written out."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.distributed.thread_group import ThreadGroup
from partita_schema.config import Config
from partita_schema.load import load_config
from partita_trainers.base import Batch
from partita_trainers.objective import ObjectiveContext, RowObjective, metric_values
from partita_trainers.objectives.of_config import default_objective
from partita_trainers.objectives.reward import Reward, RewardObjective, reward_loss
from partita_trainers.registry import build_trainer

from ..conftest import Killed, comparable
from ..pairs import PairBatches, PairModel, pair_batch, pair_row
from ..steps.test_step import limit_memory
from .test_preference import STEPS, Stream, Work, assert_same_run

CHOSEN = [1.5, -0.25, 0.5, 2.0]
REJECTED = [0.5, 0.75, -1.0, 2.0]


@pytest.mark.parametrize("margins", [None, [0.5, 0.0, 1.5, 0.25]], ids=["plain", "margins"])
@pytest.mark.parametrize("center", [0.0, 0.01])
def test_losses_and_gradients_are_those_of_the_formula(margins: list[float] | None, center: float) -> None:
    losses, gradients = [], []
    for chosen, rejected, margin in zip(CHOSEN, REJECTED, margins or [0.0] * 4, strict=True):
        difference = chosen - rejected - margin
        losses.append(math.log1p(math.exp(-difference)) + center * (chosen + rejected) ** 2)
        gradients.append(-1 / (1 + math.exp(difference)) + 2 * center * (chosen + rejected))
    chosen_P = torch.tensor(CHOSEN, dtype=torch.float64, requires_grad=True)
    margin_P = 0.0 if margins is None else torch.tensor(margins, dtype=torch.float64)
    loss_P = reward_loss(chosen_P, torch.tensor(REJECTED, dtype=torch.float64), margin_P=margin_P, center=center)
    loss_P.sum().backward()

    assert loss_P.tolist() == pytest.approx(losses, rel=1e-9)
    assert chosen_P.grad is not None
    assert chosen_P.grad.tolist() == pytest.approx(gradients, rel=1e-9)


class ScoreModel(PairModel):
    """A model whose score of an answer is a number of its last token."""

    def answer_scores(self, module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        assert batch.position_ids_BT is not None
        self.passes.append("training" if module.training else "evaluation")
        scores_BT = module(batch.input_ids_BT).float()[..., 0]
        answers = 2 * batch.loss_token_rows + batch.loss_token_branches
        scores_N = scores_BT[:, 1:][batch.labels_BT[:, 1:] != -100]
        last = {int(answer): number for number, answer in enumerate(answers)}
        return scores_N[torch.tensor([last[answer] for answer in range(2 * batch.rows)])].view(-1, 2)


class MarginBatches(PairBatches):
    """`PairBatches` with a margin for each pair."""

    def batch(self, chosen: torch.Tensor) -> Batch:
        return with_margins(chosen.tolist())


def with_margins(indices: list[int]) -> Batch:
    return replace(pair_batch(indices), row_values_NK=torch.tensor([[index % 3 / 2] for index in indices]))


def reward_config(**trainer: Any) -> Config:
    output = {"name": "a", "type": "preference", "margin": "margin"}
    sections = {"base_model": {"type": "scratch"}, "input_features": [{"name": "q"}], "output_features": [output]}
    return load_config(sections | {"trainer": {"type": "reward", "learning_rate": 0.02, **trainer}}).config


class RewardWork(Work):
    """A run on pairs with margins."""

    model = ScoreModel
    configure = staticmethod(reward_config)
    held_out = staticmethod(with_margins)

    def __init__(self, folder: Path, *, batches: Any = None, group: Any = None, **trainer: Any) -> None:
        super().__init__(folder, batches=batches or MarginBatches(), group=group, **{"center": 0.02, **trainer})


def test_two_steps_follow_the_gradient_of_the_formula(tmp_path: Path) -> None:
    constant = {"learning_rate_scheduler": {"decay": "none", "warmup_steps": 0}, "max_steps": 2}
    work = RewardWork(tmp_path / "run", skip_all_evaluation=True, **constant)
    model, losses = ScoreModel().module, []
    for _, step in zip(range(2), MarginBatches().steps(), strict=False):
        terms, right = [], 0
        for row in [int(key[4:]) for batch in step.micro_batches for key in batch.keys]:
            _, *answers = pair_row(row)
            chosen, rejected = (model(torch.tensor([answer]))[0, -1, 0] for answer in answers)
            difference = torch.sigmoid(chosen - rejected - row % 3 / 2)
            terms.append(-torch.log(difference) + 0.02 * (chosen + rejected) ** 2)
            right += int(chosen > rejected)
        loss = sum(terms) / 8
        losses.append((loss.item(), right / 8))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.data -= 0.5 * gradient

    work.train()

    assert [record["loss"] for record in work.run.log] == pytest.approx([loss for loss, _ in losses], rel=1e-5)
    assert [record["rewards/accuracies"] for record in work.run.log] == [right for _, right in losses]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(work.weights, weights, rtol=1e-5, atol=1e-6)
    first = work.run.log[0]
    assert first["rewards/margins"] == pytest.approx(first["rewards/chosen"] - first["rewards/rejected"])


@pytest.mark.parametrize("micro", [1, 4, 8])
def test_the_number_of_micro_batches_does_not_change_training(tmp_path: Path, micro: int) -> None:
    two = RewardWork(tmp_path / "2").train()
    other = RewardWork(tmp_path / str(micro), batches=MarginBatches(micro=micro)).train()

    assert_same_run(two, other)
    assert len({record["loss"] for record in two.run.log}) == 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_the_same_model_as_one(tmp_path: Path, ranks: int) -> None:
    works = []
    for group in ThreadGroup.of(ranks, timeout_seconds=20):
        batches = MarginBatches(micro=8)
        batches.rank, batches.ranks = group.rank, ranks
        works.append(RewardWork(tmp_path / f"rank-{group.rank}", batches=batches, group=group))
    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(RewardWork.train, works))
    one = RewardWork(tmp_path / "one", batches=MarginBatches(micro=8)).train()

    for work in works:
        assert_same_run(work, one)


def test_a_step_without_enough_memory_is_split_between_pairs(tmp_path: Path) -> None:
    free, full = RewardWork(tmp_path / "free").train(), RewardWork(tmp_path / "full")
    shapes = limit_memory(full, 30)
    full.train()

    assert_same_run(free, full)
    assert max(rows for rows, _ in shapes) == 2


def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    straight = RewardWork(tmp_path / "straight", steps_per_checkpoint=1).train()
    broken = RewardWork(tmp_path / "broken", steps_per_checkpoint=1)

    def die(record: Any) -> None:
        if record["step"] == 3:
            raise Killed

    broken.run.log_step = die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        broken.train()
    resumed = RewardWork(tmp_path / "broken", steps_per_checkpoint=1).train()

    assert resumed.result.resumed_from == 2
    assert comparable(resumed.run.log) == comparable(straight.run.log)[2:]
    assert torch.equal(resumed.weights, straight.weights)


def test_a_stream_trains_the_same_model(tmp_path: Path) -> None:
    class MarginStream(Stream):
        def __init__(self) -> None:
            self.batches = MarginBatches()

    work = RewardWork(tmp_path / "stream", batches=MarginStream(), skip_all_evaluation=True).train()

    assert_same_run(RewardWork(tmp_path / "rows", skip_all_evaluation=True).train(), work, rel=1e-6)


def test_checkpoints_can_be_chosen_by_a_metric_of_pairs(tmp_path: Path) -> None:
    work = RewardWork(tmp_path / "run", validation_metric="rewards/margins", steps_per_evaluation=1).train()
    margins = {step: work.run.metrics[f"validation@{step}"]["rewards/margins"] for step in range(1, 5)}

    assert work.run.noted["best_step"] == max(margins, key=lambda step: margins[step])


def test_packed_pairs_have_the_loss_and_metrics_of_single_ones() -> None:
    objective, lm = RewardObjective(center=0.1), ScoreModel()
    results = []
    for packed in (False, True):
        batch = pair_batch([3, 4, 5, 6], packed=packed)
        assert objective.denominator(batch) == 4
        loss, metrics = objective.loss(ObjectiveContext(lm, lm.module), batch)
        assert loss.dtype == torch.float32
        results.append({"loss": loss.item(), **metric_values(metrics, reserved=())})

    assert results[0] == pytest.approx(results[1])


@torch.no_grad()
def test_an_evaluation_knows_the_loss_and_both_scores_of_each_pair() -> None:
    objective, lm = RewardObjective(), ScoreModel()
    assert isinstance(objective, RowObjective)
    batch = with_margins([1, 2, 5])
    loss, metrics = objective.loss(ObjectiveContext(lm, lm.module), batch)
    rows = objective.objective_rows(batch)

    assert sum(row.loss for row in rows) == pytest.approx(loss.item())
    chosen = sum(row.values["rewards/chosen"] for row in rows)
    assert chosen / 3 == pytest.approx(metric_values(metrics, reserved=())["rewards/chosen"])
    scores = lm.answer_scores(lm.module, batch)
    assert [(row.values["rewards/chosen"], row.values["rewards/rejected"]) for row in rows] == [
        tuple(pair) for pair in scores.tolist()
    ]


def test_the_registry_builds_the_trainer_and_the_objective_of_evaluations() -> None:
    config = reward_config(center=0.25, **STEPS)
    trainer, objective = build_trainer(config.trainer), default_objective(config)

    assert isinstance(trainer, Reward)
    assert isinstance(objective, RewardObjective)
    assert trainer.objective.center == objective.center == 0.25
