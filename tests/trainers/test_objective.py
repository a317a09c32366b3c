"""Tests of a custom objective, written with public names only, in the training loop."""

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.distributed.thread_group import ThreadGroup
from partita_schema.errors import TrainingError
from partita_schema.sections.trainer import FinetuneTrainer, NoTrainer
from partita_trainers.base import Batch
from partita_trainers.finetune import Finetune
from partita_trainers.objective import (
    CROSS_ENTROPY,
    LossSums,
    ObjectiveContext,
    WeightedMean,
    metric_values,
    objective_of,
)
from partita_trainers.objectives.of_config import evaluation_objective
from partita_trainers.registry import TRAINERS, build_trainer
from partita_trainers.steps.micro_batches import split_batch

from .conftest import comparable, make_config
from .steps.test_step import limit_memory
from .test_training_probe import probe_context


class HardRows:
    """Mean log-probability per row; rows below the mean of the step over all ranks have a higher weight."""

    def __init__(self) -> None:
        self.weights: dict[str, float] = {}
        self.prepared: list[list[int]] = []

    def denominator(self, batch: Batch) -> float:
        return len(batch.loss_token_rows.unique())

    @torch.no_grad()
    def prepare(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        assert not context.module.training
        self.prepared.append([batch.rows for batch in batches])
        means = {key: mean for batch in batches for key, mean in self.row_means(context, batch)[0].items()}
        of_ranks = context.process_group.all_gather_object({key: float(mean) for key, mean in means.items()}, "means")
        whole = {key: mean for of_rank in of_ranks for key, mean in of_rank.items()}
        middle = math.fsum(whole.values()) / len(whole)
        self.weights = {key: 2.0 if mean < middle else 1.0 for key, mean in whole.items()}

    def loss(self, context: ObjectiveContext, batch: Batch) -> tuple[torch.Tensor, Mapping[str, WeightedMean]]:
        means, counts = self.row_means(context, batch)
        weights = torch.tensor([self.weights[key] for key in means])
        values = torch.stack(list(means.values()))
        short = [mean for mean, count in zip(values, counts, strict=True) if count < 4]
        return -(weights * values).sum(), {
            "rows/log_prob": WeightedMean(values.sum(), len(values)),
            "rows/short_log_prob": WeightedMean(sum(short, torch.tensor(0.0)), len(short)),
            "rows/hard": WeightedMean(float((weights == 2.0).sum()), len(values)),
        }

    def row_means(self, context: ObjectiveContext, batch: Batch) -> tuple[dict[str, torch.Tensor], list[int]]:
        """Return the mean log-probability of each row with loss tokens, by key, and the numbers of loss tokens."""
        log_probs, rows = context.token_log_probs(batch), batch.loss_token_rows
        places = rows.unique().tolist()
        parts = [log_probs[rows == row] for row in places]
        return {batch.keys[row]: part.mean() for row, part in zip(places, parts, strict=True)}, list(map(len, parts))


STEPS = {"optimizer": {"type": "sgd"}, "learning_rate": 0.5, "gradient_clipping": {}, "max_steps": 3, "epochs": 1}


def trained(work: Any, objective: Any = None) -> Any:
    """Train; return the context."""
    Finetune(work.config.trainer, objective=objective or HardRows()).train(work)
    return work


def weights(work: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in work.lm.module.parameters()])


def assert_same_run(one: Any, other: Any) -> None:
    for mine, theirs in zip(comparable(one.run.log), comparable(other.run.log), strict=True):
        numbers = {name: value for name, value in theirs.items() if name not in ("batch_hash", "padding")}
        assert {name: mine[name] for name in numbers} == pytest.approx(numbers, rel=1e-5)
        assert mine.keys() == theirs.keys()
    torch.testing.assert_close(weights(one), weights(other), rtol=1e-5, atol=1e-6)


@pytest.fixture
def make(make_work: Any, tmp_path: Path) -> Any:
    """Return a function that creates a trainer context without dropout, in a named folder."""

    def made(name: str, *, micro: int = 2, **options: Any) -> Any:
        lm, batches = make_work.model(dropout=0.0), make_work.batches(step_rows=16, micro=micro)
        recorder = make_work.recorder(tmp_path / name)
        return make_work(run=recorder, lm=lm, **{"batches": batches, **STEPS, **options})

    return made


def test_a_step_follows_the_gradient_of_the_whole_batch(make: Any, make_work: Any) -> None:
    work = make("run", micro=4, max_steps=1, skip_all_evaluation=True, learning_rate_scheduler={"decay": "none"})
    lm, before = make_work.model(dropout=0.0), weights(work)
    whole = next(make_work.batches(step_rows=16, micro=1).steps()).micro_batches[0]
    log_probs = lm.module(whole.input_ids_BT).log_softmax(-1)
    rows = [
        torch.stack([log_probs[row, place - 1, label] for place, label in enumerate(labels) if label != -100]).mean()
        for row, labels in enumerate(whole.labels_BT.tolist())
    ]
    middle = sum(rows).item() / 16
    loss = -sum((2 if row.item() < middle else 1) * row for row in rows) / 16
    gradient = torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(lm.module.parameters()))])

    record = trained(work).run.log[0]

    torch.testing.assert_close(before - weights(work), 0.5 * gradient, rtol=1e-4, atol=1e-6)
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert record["rows/log_prob"] == pytest.approx(middle, rel=1e-5)
    assert record["rows/hard"] == sum(row.item() < middle for row in rows) / 16
    lengths = (whole.labels_BT != -100).sum(1).tolist()
    short = [row.item() for row, length in zip(rows, lengths, strict=True) if length < 4]
    assert 0 < len(short) < 16
    assert record["rows/short_log_prob"] == pytest.approx(sum(short) / len(short), rel=1e-5)


@pytest.mark.parametrize("micro", [1, 16])
def test_the_number_of_micro_batches_does_not_change_training(make: Any, micro: int) -> None:
    assert_same_run(trained(make(str(micro), micro=micro)), trained(make("two")))


def test_two_ranks_train_the_same_model_as_one(make: Any, make_work: Any) -> None:
    class Half(make_work.batches):
        """The micro-batches of one of two ranks."""

        rank = 0

        def steps(self) -> Any:
            for step in super().steps():
                yield replace(step, micro_batches=step.micro_batches[self.rank :: 2])

    works = []
    for group in ThreadGroup.of(2, timeout_seconds=20):
        batches = Half(step_rows=16, micro=4)
        batches.rank = group.rank
        works.append(replace(make(f"rank {group.rank}", batches=batches), process_group=group))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(trained, works))

    one = trained(make("one", micro=4))
    for work in works:
        assert_same_run(work, one)
        assert [record["batch_hash"] for record in work.run.log] == [record["batch_hash"] for record in one.run.log]


@pytest.mark.parametrize("where", ["the loss", "the preparation"])
def test_a_step_without_enough_memory_is_split_and_gives_the_same_result(make: Any, where: str) -> None:
    free, full, objective = trained(make("free")), make("full"), HardRows()
    if where == "the loss":
        limit_memory(full, 45)
    else:
        limit_memory_of_evaluation(full, 45)
    trained(full, objective)
    assert_same_run(full, free)
    assert full.run.noted["out_of_memory"][0] == {"step": 1, "rows": 8, "tokens": 10, "now": 4}
    assert objective.prepared[-1] == [4, 4, 4, 4]


def limit_memory_of_evaluation(work: Any, places: int) -> None:
    def check(layer: Any, inputs: tuple[torch.Tensor]) -> None:
        rows, tokens = inputs[0].shape[:2]
        if not layer.training and rows * tokens > places and rows < 16:  # the 16 are the validation rows
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    work.lm.module.head.register_forward_pre_hook(check)


def test_a_resumed_run_equals_an_uninterrupted_one(make: Any, tmp_path: Path) -> None:
    straight = trained(make("straight", max_steps=6, epochs=2, learning_rate_scheduler={"decay": "none"}))
    decay = {"learning_rate_scheduler": {"decay": "none"}, "epochs": 2}
    trained(make("broken", max_steps=2, **decay))
    resumed = trained(make("broken", max_steps=6, **decay))
    assert comparable(resumed.run.log) == comparable(straight.run.log)[2:]
    assert torch.equal(weights(resumed), weights(straight))


def test_batch_sizes_are_probed_with_the_objective(make: Any) -> None:
    work, objective = make("run"), HardRows()
    with Finetune(work.config.trainer, objective=objective).probe(probe_context(work)) as probe:
        probe.run(3)
    assert objective.prepared == [[1], [3]]


def test_packed_rows_have_the_loss_of_single_rows(make_work: Any) -> None:
    lm, objective = make_work.model(dropout=0.0), HardRows()
    alone = make_work.batches().batch(torch.tensor([0, 3, 4]))
    lengths = alone.lengths_B.tolist()
    rows = [torch.arange(length) for length in lengths]
    packed = Batch(
        input_ids_BT=torch.cat([ids[:length] for ids, length in zip(alone.input_ids_BT, lengths, strict=True)])[None],
        labels_BT=torch.cat([ids[:length] for ids, length in zip(alone.labels_BT, lengths, strict=True)])[None],
        lengths_B=torch.tensor([sum(lengths)]),
        keys=alone.keys,
        position_ids_BT=torch.cat(rows)[None],
    )
    context = ObjectiveContext(lm, lm.module)
    objective.prepare(context, [alone])
    whole, _ = objective.loss(context, alone)
    torch.testing.assert_close(objective.loss(context, packed)[0], whole)
    parts = split_batch(packed, 4)
    assert [part.rows for part in parts] == [1, 1, 1]
    torch.testing.assert_close(sum(objective.loss(context, part)[0] for part in parts), whole)
    assert sum(objective.denominator(part) for part in parts) == objective.denominator(packed) == 3


def test_means_are_merged_by_weight_and_means_without_weight_are_ignored() -> None:
    parts = [
        {"a": WeightedMean(6.0, 2), "b": WeightedMean(0.0, 0)},
        {"a": WeightedMean(torch.tensor(1.0), 3)},
        {"c": WeightedMean(1.5, 0.5)},
    ]
    merged = LossSums.merge([LossSums(1.0, part) for part in parts])
    assert merged.loss == 3.0
    assert metric_values(merged.metrics, reserved=()) == {"a": 1.4, "c": 3.0}


class Named:
    """Cross-entropy with another denominator, and a metric with the name of a value that partita reports."""

    def __init__(self, denominator: float = 1.0) -> None:
        self.value = denominator

    def denominator(self, batch: Batch) -> float:
        return self.value

    def prepare(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        pass

    def loss(self, context: ObjectiveContext, batch: Batch) -> tuple[torch.Tensor, Mapping[str, WeightedMean]]:
        return CROSS_ENTROPY.loss(context, batch)[0], {"gradient_norm": WeightedMean(1.0, 1)}


def test_a_metric_with_the_name_of_another_value_is_refused(make: Any) -> None:
    with pytest.raises(TrainingError) as caught:
        trained(make("run"), Named())
    assert str(caught.value) == (
        "the objective reports a metric named gradient_norm, which partita reports itself: rename it"
    )


@pytest.mark.parametrize(("value", "shown"), [(0.0, "0"), (-1.0, "-2"), (math.nan, "nan")])
def test_a_denominator_that_is_not_positive_is_refused_before_the_first_step(
    make: Any, value: float, shown: str
) -> None:
    work = make("run")
    before = weights(work)
    with pytest.raises(TrainingError) as caught:
        trained(work, Named(value))
    assert str(caught.value) == (
        f"step 1: the objective's denominator is {shown}; it must be a positive number: let Objective.denominator "
        "count what the loss is averaged over"
    )
    assert torch.equal(weights(work), before)


class Wrong(Named):
    """Cross-entropy, and a function that changes what `loss` returns."""

    def __init__(self, change: Callable[[torch.Tensor], object], denominator: Any = 1.0) -> None:
        super().__init__(denominator)
        self.change = change

    def loss(self, context: ObjectiveContext, batch: Batch) -> Any:
        return self.change(CROSS_ENTROPY.loss(context, batch)[0])


RETURN = "; return (sum, metrics): a tensor with one number, and a dict of WeightedMean"


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Wrong(lambda total: (total, {}), None), "Wrong.denominator returned None; return a number"),
        (Wrong(lambda total: "loss"), f"Wrong.loss returned 'loss'{RETURN}"),
        (Wrong(lambda total: (0.5, {})), f"Wrong.loss returned 0.5 as the sum{RETURN}"),
        (Wrong(lambda total: (torch.ones(2), {})), f"Wrong.loss returned tensor([1., 1.]) as the sum{RETURN}"),
        (Wrong(lambda total: (total, None)), f"Wrong.loss returned None as the metrics{RETURN}"),
        (
            Wrong(lambda total: (total, {"x": 0.5})),
            f"Wrong.loss returned 0.5, which is no WeightedMean, as the metric x{RETURN}",
        ),
        (
            Wrong(lambda total: (total.detach(), {})),
            "Wrong.loss returned a sum that does not depend on the weights of the model",
        ),
    ],
)
def test_what_an_objective_returns_wrongly_is_named_with_its_class(make: Any, objective: Any, message: str) -> None:
    with pytest.raises(TrainingError) as caught:
        trained(make("run"), objective)
    assert str(caught.value) == message


class OfHardRows(Finetune):
    """A trainer with an objective."""

    def __init__(self, config: FinetuneTrainer) -> None:
        super().__init__(config, objective=HardRows())


def test_a_finished_run_is_evaluated_with_the_objective_of_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    assert evaluation_objective(config, undesirable_weight=None) is CROSS_ENTROPY
    monkeypatch.setitem(TRAINERS, "finetune", f"{__name__}:OfHardRows")
    assert isinstance(evaluation_objective(config, undesirable_weight=None), HardRows)


def test_a_trainer_without_an_objective_is_evaluated_with_cross_entropy() -> None:
    objective = HardRows()
    section = make_config().trainer
    assert objective_of(Finetune(section, objective=objective)) is objective
    assert objective_of(build_trainer(section)) is CROSS_ENTROPY
    assert objective_of(build_trainer(NoTrainer(type="none"))) is CROSS_ENTROPY
