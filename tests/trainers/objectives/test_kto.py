"""Tests of training on labelled answers, whose KL term depends on all rows of a step."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import partita_trainers.objectives.kto
from partita.distributed.thread_group import ThreadGroup
from partita_schema.config import Config
from partita_schema.errors import ConfigError, DataError, TrainingError
from partita_trainers.base import Batch
from partita_trainers.objective import ObjectiveContext, metric_values, prepare
from partita_trainers.objectives.kto import KtoObjective, kto, labelled_rows, mismatched_batches

from ..conftest import Killed, comparable
from ..pairs import PairBatches, PairModel, pair_row
from ..steps.test_step import limit_memory
from .test_preference import Stream, Work, assert_same_run, probed

RATIOS = [0.5, -1.5, 1.75, 0.25, 0.125]
GOOD = [True, False, True, True, False]
KL = (1.0 + 0.5 - 0.5 + 0.5 + 0.5) / 5
# Beta, both weights, and what the trainer of TRL 1.16 computes: the mean loss, and its gradient.
OF_TRL = [
    (0.1, (1.0, 1.0), 0.4826637804, [-0.00499988, 0.00495515, -0.00497729, -0.00499972, 0.00499905]),
    (0.4, (1.5, 0.5), 0.4910727441, [-0.02998801, 0.00868443, -0.02791506, -0.02997302, 0.00996981]),
]


@pytest.mark.parametrize(("beta", "weights", "loss", "gradient"), OF_TRL)
def test_losses_and_gradients_are_those_of_trl(
    beta: float, weights: tuple[float, float], loss: float, gradient: list[float]
) -> None:
    ratios = torch.tensor(RATIOS, dtype=torch.float64, requires_grad=True)
    mean = kto(ratios, torch.tensor(GOOD), kl=KL, beta=beta, weights=weights).mean()
    mean.backward()
    assert mean.item() == pytest.approx(loss, rel=1e-6)
    assert ratios.grad is not None
    assert ratios.grad.tolist() == pytest.approx(gradient, rel=1e-5, abs=1e-8)


class LabelledModel(PairModel):
    """`PairModel` for rows without branches."""

    def token_log_probs(self, module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        self.passes.append("training" if module.training else "evaluation")
        log_probs = module(batch.input_ids_BT)[:, :-1].float().log_softmax(-1)
        rows, columns = (batch.labels_BT[:, 1:] != -100).nonzero(as_tuple=True)
        return log_probs[rows, columns, batch.labels_BT[:, 1:][rows, columns]]


def is_good(index: int) -> bool:
    return index % 3 != 0


def labelled_batch(indices: list[int]) -> Batch:
    rows = [(pair_row(index)[0], pair_row(index)[1]) for index in indices]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = [[*prompt, *answer, *[0] * (width - len(prompt) - len(answer))] for prompt, answer in rows]
    labels = [[*[-100] * len(p), *answer, *[-100] * (width - len(p) - len(answer))] for p, answer in rows]
    return Batch(
        input_ids_BT=torch.tensor(ids),
        labels_BT=torch.tensor(labels),
        lengths_B=torch.tensor([len(prompt) + len(answer) for prompt, answer in rows]),
        keys=tuple(f"row:{index:03d}" for index in indices),
        row_values_NK=torch.tensor([[float(is_good(index))] for index in indices]),
    )


class LabelledBatches(PairBatches):
    def batch(self, chosen: torch.Tensor) -> Batch:
        return labelled_batch(chosen.tolist())


class KtoWork(Work):
    model = LabelledModel
    held_out = staticmethod(labelled_batch)

    @staticmethod
    def configure(**trainer: Any) -> Config:
        return Config.model_validate(
            {
                "base_model": {"type": "scratch"},
                "input_features": [{"name": "q", "type": "text"}],
                "output_features": [{"name": "a", "type": "text", "label": "liked"}],
                "trainer": {"type": "kto", "beta": 0.5, **trainer},
            }
        )

    def __init__(self, folder: Path, *, batches: Any = None, **options: Any) -> None:
        super().__init__(folder, batches=batches or LabelledBatches(), **options)


def log_prob(module: Any, prompt: list[int], answer: list[int]) -> float:
    ids = torch.tensor(prompt + answer)
    log_probs = module(ids[None])[0].log_softmax(-1)
    return sum(log_probs[place - 1, ids[place]].item() for place in range(len(prompt), len(ids)))


def test_the_loss_of_a_step_compares_with_mismatched_pairs_of_the_whole_step() -> None:
    lm, rows = LabelledModel(), [4, 6, 7, 9, 11]
    lm.keep_reference()
    generator = torch.Generator().manual_seed(0)
    for parameter in lm.module.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    start, config = PairModel().module, KtoWork.configure(undesirable_weight=2.0).trainer
    data = {row: pair_row(row)[:2] for row in rows}

    def ratio(prompt: list[int], answer: list[int]) -> float:
        return log_prob(lm.module, prompt, answer) - log_prob(start, prompt, answer)

    longest = max(len(prompt) + len(answer) for prompt, answer in data.values())
    mixed = [(data[row][0], data[before][1]) for row, before in zip(rows, [rows[-1], *rows], strict=False)]
    kl = max(0.0, sum(ratio(prompt, answer[: longest - len(prompt)]) for prompt, answer in mixed) / 5)
    losses = {row: 1 - 1 / (1 + math.exp(-0.5 * (ratio(*data[row]) - kl))) for row in rows if is_good(row)}
    losses |= {row: 2 - 2 / (1 + math.exp(-0.5 * (kl - ratio(*data[row])))) for row in rows if not is_good(row)}

    objective = KtoObjective(config)  # type: ignore[arg-type]
    objective.references.started = objective.references.in_step = True
    context, batches = ObjectiveContext(lm, lm.module), [labelled_batch([11, 6]), labelled_batch([4, 9, 7])]
    prepare(objective, context, batches)
    results = [objective.loss(context, batch) for batch in batches]

    assert kl > 0.01
    assert float(objective.step.kl) == pytest.approx(kl, rel=1e-4)
    assert sum(loss.item() for loss, _ in results) == pytest.approx(sum(losses.values()), rel=1e-5)
    assert sum(objective.denominator(batch) for batch in batches) == 5


@pytest.mark.parametrize("indices", [[1], [1, 1, 1]])
def test_a_single_answer_has_no_kl_term(indices: list[int]) -> None:
    lm, objective = LabelledModel(), KtoObjective(KtoWork.configure().trainer)  # type: ignore[arg-type]
    lm.keep_reference()
    objective.references.started = objective.references.in_step = True
    context, batches = ObjectiveContext(lm, lm.module), [labelled_batch(indices)]
    assert list(objective.reference_batches(context, batches)) == batches
    prepare(objective, context, batches)
    assert objective.step.kl == 0.0


@pytest.mark.parametrize("keys", [("row:006", "row:006"), ("row:006", "row:007")], ids=["the same row", "equal rows"])
@pytest.mark.parametrize(
    ("others", "partners"), [([4], [6, 4, 4]), ([9], [6, 9, 9]), ([4, 9], [9, 6, 4, 4])], ids=["first", "last", "both"]
)
def test_a_copy_of_a_row_is_passed_over_in_mismatched_pairs(
    keys: tuple[str, str], others: list[int], partners: list[int]
) -> None:
    batches = [labelled_batch(others), replace(labelled_batch([6, 6]), keys=keys)]
    rows = sorted(row for batch in batches for row in labelled_rows(batch))
    mixed = [
        tuple(ids[:length])
        for batch in mismatched_batches(rows, batches)
        for ids, length in zip(batch.input_ids_BT.tolist(), batch.lengths_B.tolist(), strict=True)
    ]
    longest = max(len(row.ids) for row in rows)
    whole = [(*pair_row(row)[0], *pair_row(partner)[1]) for row, partner in zip([*others, 6, 6], partners, strict=True)]
    assert mixed == [ids[:longest] for ids in whole]


@pytest.mark.parametrize("micro", [1, 8])
def test_the_number_of_micro_batches_does_not_change_training(tmp_path: Path, micro: int) -> None:
    two = KtoWork(tmp_path / "two").train()
    assert_same_run(two, KtoWork(tmp_path / str(micro), batches=LabelledBatches(micro=micro)).train())
    kl = [record["kl"] for record in two.run.log]
    assert kl[0] == 0.0 < max(kl)
    record = two.run.log[-1]
    assert record["rewards/margins"] == pytest.approx(record["rewards/chosen"] - record["rewards/rejected"], rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_the_same_model_as_one(tmp_path: Path, ranks: int) -> None:
    options = {"undesirable_weight": "auto", "restore_best": False}  # rank 1 has no checkpoint in its folder
    works = []
    for group in ThreadGroup.of(ranks, timeout_seconds=20):
        batches = LabelledBatches(micro=8)
        batches.rank, batches.ranks = group.rank, ranks
        folder = tmp_path / f"rank-{group.rank}"
        works.append(KtoWork(folder, batches=batches, group=group, **options))
    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(KtoWork.train, works))
    one = KtoWork(tmp_path / "one", batches=LabelledBatches(micro=8), **options).train()
    for work in works:
        assert_same_run(work, one)
    assert one.run.noted["undesirable_weight"] == works[-1].run.noted["undesirable_weight"] == 16 / 8


def test_a_step_without_enough_memory_is_split(tmp_path: Path) -> None:
    free, full = KtoWork(tmp_path / "free").train(), KtoWork(tmp_path / "full")
    limit_memory(full, 20)
    full.train()
    assert_same_run(free, full)
    assert full.run.noted["out_of_memory"][0]["now"] == 2


def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    options = {"steps_per_checkpoint": 1, "undesirable_weight": "auto"}
    straight, broken = KtoWork(tmp_path / "straight", **options).train(), KtoWork(tmp_path / "broken", **options)

    def die(record: Any) -> None:
        if record["step"] == 3:
            raise Killed

    broken.run.log_step = die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        broken.train()
    resumed = KtoWork(tmp_path / "broken", **options).train()
    assert resumed.result.resumed_from == 2
    assert comparable(resumed.run.log) == comparable(straight.run.log)[2:]
    assert torch.equal(resumed.weights, straight.weights)


def test_an_unchanged_model_has_no_rewards_with_mixed_precision(tmp_path: Path) -> None:
    options = {"mixed_precision": "bf16", "steps_per_evaluation": 4, "restore_best": False}
    work = KtoWork(tmp_path / "run", **options, learning_rate=1e-30).train()
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "kl")
    after = work.result.metrics["validation"]
    assert {name: after[name] for name in names} == dict.fromkeys(names, 0.0)
    assert [record["kl"] for record in work.run.log] == [0.0] * 4


def test_the_margin_of_an_evaluation_is_that_of_its_means() -> None:
    lm, objective = LabelledModel(), KtoObjective(KtoWork.configure().trainer)  # type: ignore[arg-type]
    context, batches = ObjectiveContext(lm, lm.module), [labelled_batch([1, 2, 3]), labelled_batch([4, 6])]
    prepare(objective, context, batches)
    objective.references.log_probs = dict.fromkeys(objective.references.log_probs, (-1.0,))
    metrics = [objective.loss(context, batch)[1] for batch in batches]
    whole = {name: sum(float(one[name].total) for one in metrics) for name in metrics[0]}
    good, bad = whole["rewards/chosen"] / 3, whole["rewards/rejected"] / 2
    assert whole["rewards/margins"] == pytest.approx(good - bad)
    assert sum(one["rewards/margins"].weight for one in metrics) == pytest.approx(1.0)
    assert metric_values(metrics[0], reserved=())["kl"] == 0.0


def test_a_killed_run_chooses_the_same_balanced_weight(tmp_path: Path) -> None:
    constant = {
        "learning_rate_scheduler": {"decay": "none", "warmup_steps": 0},
        "undesirable_weight": "auto",
        "skip_all_evaluation": True,
    }
    straight = KtoWork(tmp_path / "straight", **constant).train()
    KtoWork(tmp_path / "broken", **constant, max_steps=2).train()
    resumed = KtoWork(tmp_path / "broken", **constant).train()
    assert resumed.run.noted["undesirable_weight"] == straight.run.noted["undesirable_weight"]
    assert resumed.result.resumed_from == 2
    assert torch.equal(resumed.weights, straight.weights)


def test_a_balanced_weight_needs_rows_that_can_be_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        KtoWork(tmp_path / "run", batches=Stream(), undesirable_weight="auto").train()
    assert str(caught.value) == (
        "trainer.undesirable_weight: auto needs data of a known size, not a stream; write a number"
    )


def test_a_balanced_weight_needs_both_labels(tmp_path: Path) -> None:
    class Liked(LabelledBatches):
        def batch(self, chosen: torch.Tensor) -> Batch:
            return labelled_batch([index * 3 + 1 for index in chosen.tolist()])

    with pytest.raises(DataError) as caught:
        KtoWork(tmp_path / "run", batches=Liked(), undesirable_weight="auto").train()
    assert str(caught.value) == "all 24 answers are good; kto needs both"


@pytest.mark.parametrize(("first", "only", "other"), [(1, "good", "bad"), (0, "bad", "good")])
def test_a_stream_of_answers_with_one_label_ends_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, only: str, other: str
) -> None:
    class OneLabel(Stream):
        def __init__(self) -> None:
            self.batches = LabelledBatches()
            self.batches.batch = lambda chosen: labelled_batch([3 * index + first for index in chosen.tolist()])  # type: ignore[method-assign]

    assert {is_good(3 * index + first) for index in range(24)} == {only == "good"}
    monkeypatch.setattr(partita_trainers.objectives.kto, "ANSWERS_OF_ONE_LABEL", 20)
    work = KtoWork(tmp_path / "run", batches=OneLabel(), skip_all_evaluation=True)
    with pytest.raises(DataError) as caught:
        work.train()
    assert str(caught.value) == (
        f"all 24 answers read so far are {only}, and good ones are compared with bad ones; mix in {other} ones "
        "(data.mix), or shuffle the rows of the stream"
    )
    assert len(work.run.log) == 2


@pytest.mark.parametrize("references", ["auto", "before", "in_step"])
def test_a_probe_holds_the_copy_of_the_weights_for_the_kl_term(tmp_path: Path, references: str) -> None:
    assert probed(KtoWork(tmp_path, references=references)) == [False, True, False]


def test_a_finished_run_has_the_kl_term_of_training_without_the_weights_before_it() -> None:
    lm, batches = LabelledModel(), [labelled_batch([11, 6]), labelled_batch([4, 9, 7])]
    start, config = LabelledModel(), KtoWork.configure().trainer
    lm.keep_reference()
    for parameter in lm.module.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    training, finished = KtoObjective(config), KtoObjective(config)  # type: ignore[arg-type]
    training.references.started = training.references.in_step = True
    prepare(training, ObjectiveContext(lm, lm.module), batches)

    finished.references.read(None)
    lm.drop_reference()
    context = ObjectiveContext(lm, lm.module)
    finished.references.compute(ObjectiveContext(start, start.module), finished.reference_batches(context, batches))
    finished.references.started = True
    prepare(finished, context, batches)

    assert float(finished.step.kl) == pytest.approx(float(training.step.kl), rel=1e-5)
    assert finished.step.kl > 0.01
    losses = [one.loss(context, batches[1])[0].item() for one in (training, finished)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)

    def prepared_with(group: ThreadGroup) -> float:
        objective = KtoObjective(config)  # type: ignore[arg-type]
        objective.references = finished.references
        prepare(objective, ObjectiveContext(lm, lm.module, group), [] if group.rank else batches)
        return float(objective.step.kl)

    with ThreadPoolExecutor(2) as threads:  # rank 1 has no rows
        of_ranks = list(threads.map(prepared_with, ThreadGroup.of(2, timeout_seconds=20)))
    assert of_ranks == [float(finished.step.kl)] * 2
    with pytest.raises(TrainingError, match="such as row:001, cannot be compared with the model before"):
        prepare(finished, context, [labelled_batch([1, 2])])
