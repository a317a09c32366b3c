"""Tests of training on pairs in the loop of fine-tuning, with a small model of which the losses can be written out."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.distributed.thread_group import ThreadGroup
from partita_schema.errors import ConfigError, ResumeError, TrainingError
from partita_schema.sections.objectives import DpoLoss
from partita_trainers.base import ProbeContext, TrainerContext
from partita_trainers.batch_size.probe import Volume
from partita_trainers.objective import ObjectiveContext, metric_values
from partita_trainers.objectives.preference import PairObjective, Preference
from partita_trainers.registry import build_trainer

from ..conftest import VOCABULARY, Killed, Recorder, comparable
from ..pairs import PairBatches, PairModel, pair_batch, pair_config, pair_row
from ..steps.test_step import limit_memory

STEPS = {"optimizer": {"type": "sgd"}, "learning_rate": 0.5, "gradient_clipping": {}, "max_steps": 4, "epochs": 2}
LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {"type": "dpo", "beta": 0.5, "rpo_alpha": 0.2},
    "ipo": {"type": "dpo", "variant": "ipo", "beta": 0.5},
    "orpo": {"type": "orpo", "beta": 0.5},
    "simpo": {"type": "simpo"},
}
HELD_OUT = list(range(100, 112))


class Work:
    """A run on pairs, and its trainer."""

    model: Any = PairModel
    configure: Any = staticmethod(pair_config)
    held_out: Any = staticmethod(pair_batch)

    def __init__(self, folder: Path, *, batches: Any = None, group: Any = None, **trainer: Any) -> None:
        self.config = self.configure(**{**STEPS, **trainer})
        self.trainer: Any = build_trainer(self.config.trainer)
        self.lm, self.run, self.group = self.model(), Recorder(folder), group
        folder.mkdir(exist_ok=True)
        self.context = TrainerContext(
            config=self.config,
            lm=self.lm,
            batches=batches or PairBatches(),
            evaluate=self.evaluate,
            splits=("training", "validation"),
            run=self.run,
            device=torch.device("cpu"),
        )
        if group is not None:
            self.context = replace(self.context, process_group=group)

    @torch.no_grad()
    def evaluate(
        self, split: str, *, generated: bool = True, max_rows: Any = None, step: Any = None
    ) -> dict[str, float]:
        """Evaluate as the framework does, on pairs of which each rank has the same."""
        assert not generated or step is not None
        objective, batch = self.trainer.objective, self.held_out(HELD_OUT)
        context = ObjectiveContext(self.lm, self.lm.module)
        objective.prepare(context, [batch])
        loss, metrics = objective.loss(context, batch)
        return {"loss": float(loss) / objective.denominator(batch), **metric_values(metrics, reserved=())}

    def train(self) -> "Work":
        self.result = self.trainer.train(self.context)
        return self

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.lm.module.parameters()])


class Stream:
    """Rows whose number is unknown."""

    num_rows = None

    def __init__(self) -> None:
        self.batches = PairBatches()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


def sums(module: Any, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of both answers of a row, each after its prompt in a separate row."""
    prompt, *answers = pair_row(index)
    results = []
    for answer in answers:
        ids = torch.tensor(prompt + answer)
        log_probs = module(ids[None])[0].log_softmax(-1)
        results.append(sum(log_probs[place - 1, ids[place]] for place in range(len(prompt), len(ids))))
    return results[0], results[1]  # type: ignore[return-value]


def assert_same_run(one: Work, other: Work, *, rel: float = 1e-5) -> None:
    for mine, theirs in zip(comparable(one.run.log), comparable(other.run.log), strict=True):
        numbers = {name: value for name, value in theirs.items() if name not in ("batch_hash", "padding")}
        assert {name: mine[name] for name in numbers} == pytest.approx(numbers, rel=rel, abs=1e-6)
        assert mine.keys() == theirs.keys()
    assert one.run.metrics.keys() == other.run.metrics.keys()
    for name, metrics in one.run.metrics.items():
        assert metrics == pytest.approx(other.run.metrics[name], rel=rel, abs=1e-6)
    torch.testing.assert_close(one.weights, other.weights, rtol=1e-5, atol=1e-6)


def test_two_steps_follow_the_gradient_of_dpo_on_separate_rows(tmp_path: Path) -> None:
    constant = {"learning_rate_scheduler": {"decay": "none", "warmup_steps": 0}, "max_steps": 2}
    work = Work(tmp_path / "run", loss={"type": "dpo", "beta": 0.5}, skip_all_evaluation=True, **constant)
    model = PairModel().module
    start = {index: [one.item() for one in sums(model, index)] for index in range(24)}
    losses, falls, accuracies = [], [], []
    for step in list(zip(range(2), PairBatches().steps(), strict=False)):
        rows = [int(key[4:]) for batch in step[1].micro_batches for key in batch.keys]
        terms = []
        for row in rows:
            chosen, rejected = sums(model, row)
            chosen_ratio, rejected_ratio = chosen - start[row][0], rejected - start[row][1]
            terms.append(-torch.log(torch.sigmoid(0.5 * (chosen_ratio - rejected_ratio))))
            falls.append((step[0], chosen_ratio.item() < 0))
            accuracies.append((step[0], chosen_ratio.item() > rejected_ratio.item()))
        loss = sum(terms) / 8
        losses.append(loss.item())
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.data -= 0.5 * gradient

    work.train()

    assert [record["loss"] for record in work.run.log] == pytest.approx(losses, rel=1e-5)
    assert losses[0] == pytest.approx(math.log(2))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    torch.testing.assert_close(work.weights, weights, rtol=1e-5, atol=1e-6)
    second = work.run.log[1]
    assert second["chosen_falls"] == sum(fall for step, fall in falls if step == 1) / 8
    assert second["rewards/accuracies"] == sum(right for step, right in accuracies if step == 1) / 8
    assert second["rewards/margins"] == pytest.approx(second["rewards/chosen"] - second["rewards/rejected"])
    assert {"logps/chosen", "logps/rejected"} < second.keys()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("micro", [1, 8])
def test_the_number_of_micro_batches_does_not_change_training(tmp_path: Path, name: str, micro: int) -> None:
    two = Work(tmp_path / "2", loss=LOSSES[name]).train()
    other = Work(tmp_path / str(micro), batches=PairBatches(micro=micro), loss=LOSSES[name]).train()
    assert_same_run(two, other)
    assert len({record["loss"] for record in two.run.log}) == 4


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("references", ["before", "in_step"])
def test_ranks_train_the_same_model_as_one(tmp_path: Path, ranks: int, references: str) -> None:
    works = []
    for group in ThreadGroup.of(ranks, timeout_seconds=20):
        batches = PairBatches(micro=8)
        batches.rank, batches.ranks = group.rank, ranks
        # Every rank has a separate folder, to show that only rank 0 writes and reads.
        works.append(Work(tmp_path / f"rank-{group.rank}", batches=batches, group=group, references=references))
    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(Work.train, works))
    one = Work(tmp_path / "one", batches=PairBatches(micro=8)).train()
    for work in works:
        assert_same_run(work, one)
    files = [work.run.folder / "references.jsonl" for work in works]
    assert [file.exists() for file in files] == [references == "before" and rank == 0 for rank in range(ranks)]
    if references == "before":
        records = [dict_of(file) for file in (files[0], one.run.folder / "references.jsonl")]
        assert records[0].keys() == records[1].keys()
        for digest, values in records[0].items():
            assert values == pytest.approx(records[1][digest], rel=1e-6)


def dict_of(file: Path) -> dict[str, list[float]]:
    records = map(json.loads, file.read_text(encoding="utf8").splitlines()[1:])
    return {record["row"]: record["log_probs"] for record in records}


def test_references_in_steps_are_those_computed_before(tmp_path: Path) -> None:
    before, in_step = (Work(tmp_path / name, references=name).train() for name in ("before", "in_step"))
    assert_same_run(before, in_step, rel=1e-6)
    assert before.lm.starting is None
    assert before.run.noted["references"]["rows"] == 24 + len(HELD_OUT)
    assert before.lm.passes[: 6 + 2] == ["evaluation"] * 8
    assert before.lm.passes[8] == "training"


@pytest.mark.parametrize("references", ["before", "in_step"])
def test_an_unchanged_model_has_no_rewards_with_mixed_precision(tmp_path: Path, references: str) -> None:
    options = {"mixed_precision": "bf16", "references": references, "steps_per_evaluation": 4, "restore_best": False}
    work = Work(tmp_path / "run", **options, learning_rate=1e-30)
    asked = []
    evaluate = work.context.evaluate

    def recorded(*values: Any, **options: Any) -> Any:
        asked.append(evaluate(*values, **options))
        return asked[-1]

    work.context = replace(work.context, evaluate=recorded)  # type: ignore[arg-type]
    work.train()
    during, after = asked[-2:]
    for metrics in (during, after):
        names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "chosen_falls")
        assert {name: metrics[name] for name in names} == dict.fromkeys(names, 0.0)
    assert during["logps/chosen"] != after["logps/chosen"]
    files = {path.name: dict_of(path) for path in work.run.folder.glob("references*")}
    if references == "before":
        assert {name: len(rows) for name, rows in files.items()} == {
            "references.jsonl": len(HELD_OUT),
            "references-bf16.jsonl": 24 + len(HELD_OUT),
        }
        assert work.run.noted["references"]["rows"] == 24 + len(HELD_OUT)
    else:
        assert not files


def test_a_killed_run_with_mixed_precision_reads_both_files(tmp_path: Path) -> None:
    options = {"mixed_precision": "bf16", "steps_per_checkpoint": 1, "learning_rate_scheduler": {"decay": "none"}}
    straight = Work(tmp_path / "straight", **options).train()
    Work(tmp_path / "broken", **options, max_steps=2).train()
    resumed = Work(tmp_path / "broken", **options).train()
    assert resumed.result.resumed_from == 2
    assert resumed.result.metrics == straight.result.metrics
    names = ("references.jsonl", "references-bf16.jsonl")
    files = [[(work.run.folder / name).read_text() for name in names] for work in (straight, resumed)]
    assert files[0] == files[1]


def test_losses_without_a_reference_compute_none(tmp_path: Path) -> None:
    work = Work(tmp_path / "run", loss=LOSSES["orpo"]).train()
    assert not (work.run.folder / "references.jsonl").exists()
    assert work.lm.passes[0] == "training"
    assert "chosen_falls" not in work.run.log[0]


def test_a_step_without_enough_memory_is_split_between_pairs(tmp_path: Path) -> None:
    free, full = Work(tmp_path / "free").train(), Work(tmp_path / "full")
    shapes = limit_memory(full, 30)
    full.train()
    assert_same_run(free, full)
    assert full.run.noted["out_of_memory"][0]["now"] == 2
    assert max(rows for rows, _ in shapes) == 2


@pytest.mark.long
def test_references_without_enough_memory_are_computed_in_parts(tmp_path: Path, caplog: Any) -> None:
    free = Work(tmp_path / "free", skip_all_evaluation=True).train()
    full = Work(tmp_path / "full", skip_all_evaluation=True)

    def check(layer: Any, inputs: tuple[torch.Tensor]) -> None:
        if not layer.training and inputs[0].shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    full.lm.module.head.register_forward_pre_hook(check)
    full.train()
    assert_same_run(free, full)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "step 0: out of memory with 4 rows of 10 tokens; retrying with 2 rows at a time"
    ]


@pytest.mark.parametrize("references", ["before", "in_step"])
def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path, references: str) -> None:
    straight = Work(tmp_path / "straight", references=references, steps_per_checkpoint=1).train()
    broken = Work(tmp_path / "broken", references=references, steps_per_checkpoint=1)

    def die(record: Any) -> None:
        if record["step"] == 3:
            raise Killed

    broken.run.log_step = die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        broken.train()
    resumed = Work(tmp_path / "broken", references=references, steps_per_checkpoint=1).train()
    assert resumed.result.resumed_from == 2
    assert comparable(resumed.run.log) == comparable(straight.run.log)[2:]
    assert torch.equal(resumed.weights, straight.weights)
    if references == "before":
        assert resumed.lm.passes[0] == "training"


def test_a_resumed_run_without_its_file_computes_the_same_references(tmp_path: Path) -> None:
    straight = Work(tmp_path / "straight").train()
    constant = {"learning_rate_scheduler": {"decay": "none"}}
    Work(tmp_path / "broken", **constant, max_steps=2).train()
    file = tmp_path / "broken" / "references.jsonl"
    rows = dict_of(file)
    file.unlink()
    Work(tmp_path / "broken", **constant).train()
    assert dict_of(file).items() >= rows.items()
    assert straight.run.folder.joinpath("references.jsonl").read_text() == file.read_text()


@pytest.mark.parametrize("first", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_with_more_steps_than_before_computes_the_missing_references(tmp_path: Path, first: int) -> None:
    straight = Work(tmp_path / "straight").train()
    constant = {"learning_rate_scheduler": {"decay": "none"}}
    Work(tmp_path / "broken", **constant, max_steps=first).train()
    rows = dict_of(tmp_path / "broken" / "references.jsonl")
    resumed = Work(tmp_path / "broken", **constant).train()
    assert len(rows) == 8 * first + len(HELD_OUT)
    assert resumed.result.resumed_from == first
    assert resumed.lm.passes.index("training") == 2 * (3 - first) + 1  # of the evaluation, only the loss
    files = [work.run.folder.joinpath("references.jsonl").read_text() for work in (straight, resumed)]
    assert files[0] == files[1]
    assert files[0].startswith('{"steps": "all", "splits": ["validation"]}\n')


def test_a_damaged_file_of_references_is_named(tmp_path: Path) -> None:
    work = Work(tmp_path / "run")
    file = tmp_path / "run" / "references.jsonl"
    good, bad = '{"row": "a", "log_probs": [-1.0, -2.0]}', '{"row": "b", "log_probs": [-1.0]}'
    file.write_text(f'{{"steps": 4, "splits": []}}\n{good}\n{bad}\n', encoding="utf8")
    with pytest.raises(ResumeError) as caught:
        work.train()
    assert str(caught.value) == (
        f"line 3 of {file} is not a row's log-probabilities before training: remove the file, and they are computed "
        "again"
    )


def test_a_stream_cannot_be_read_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Work(tmp_path / "run", batches=Stream(), references="before").train()
    assert str(caught.value) == (
        "trainer.references: before needs data of a known size, not a stream; write in_step or auto"
    )


def test_references_of_a_stream_are_computed_in_steps(tmp_path: Path) -> None:
    work = Work(tmp_path / "stream", batches=Stream(), skip_all_evaluation=True).train()
    assert_same_run(Work(tmp_path / "rows", skip_all_evaluation=True).train(), work, rel=1e-6)
    assert not (work.run.folder / "references.jsonl").exists()
    assert len(work.trainer.objective.references.in_step_rows) == 8  # those of the last step


def test_a_row_without_a_reference_is_named() -> None:
    lm, objective = PairModel(), PairObjective(DpoLoss(type="dpo"))
    assert objective.references is not None
    objective.prepare(ObjectiveContext(lm, lm.module), [pair_batch([1, 2])])
    objective.references.started = True
    objective.prepare(ObjectiveContext(lm, lm.module), [pair_batch([2, 1])])
    with pytest.raises(TrainingError) as caught:
        objective.prepare(ObjectiveContext(lm, lm.module), [pair_batch([1, 3]), pair_batch([2, 4])])
    assert str(caught.value) == (
        "2 of 4 rows, such as row:003, cannot be compared with the model before training, because they were not in the "
        "data when training began: write trainer.references: in_step, and start a new run"
    )


@pytest.mark.parametrize("name", LOSSES)
def test_packed_pairs_have_the_losses_and_metrics_of_single_ones(name: str) -> None:
    lm = PairModel()
    objective = PairObjective(pair_config(loss=LOSSES[name]).trainer.loss)  # type: ignore[union-attr]
    context = ObjectiveContext(lm, lm.module)
    results = []
    for packed in (False, True):
        batch = pair_batch([3, 4, 5, 6], packed=packed)
        objective.prepare(context, [batch])
        assert objective.denominator(batch) == 4
        loss, metrics = objective.loss(context, batch)
        assert loss.dtype == torch.float32
        results.append({"loss": loss.item(), **metric_values(metrics, reserved=())})
    assert results[0] == pytest.approx(results[1])
    if objective.references is not None:
        assert len(objective.references.log_probs) == 4


@pytest.mark.parametrize("variant", ["sigmoid", "ipo", "sigmoid_norm"])
def test_rewards_are_means_per_token_if_the_loss_compares_these(variant: str) -> None:
    """In the row, the chosen answer has one token and the rejected one five."""
    lm, objective, batch = PairModel(), PairObjective(DpoLoss(type="dpo", variant=variant)), pair_batch([4])
    assert objective.references is not None
    objective.prepare(ObjectiveContext(lm, lm.module), [batch])
    chosen, rejected = sums(lm.module, 4)
    objective.references.log_probs = dict.fromkeys(objective.references.log_probs, (-7.0, -9.0))
    objective.references.started = True
    metrics = metric_values(objective.loss(ObjectiveContext(lm, lm.module), batch)[1], reserved=())
    assert metrics["rewards/chosen"] == pytest.approx(0.1 * (chosen.item() + 7))
    rejected_reward = 0.1 * (rejected.item() + 9) / (1 if variant == "sigmoid" else 5)
    assert metrics["rewards/rejected"] == pytest.approx(rejected_reward)
    assert metrics["rewards/margins"] == pytest.approx(metrics["rewards/chosen"] - rejected_reward)
    assert metrics["logps/rejected"] == pytest.approx(rejected.item())


def test_batch_sizes_are_probed_with_pairs_before_training_without_a_second_model(tmp_path: Path) -> None:
    work = Work(tmp_path / "run")
    objective = work.trainer.objective
    context = ObjectiveContext(work.lm, work.lm.module)
    objective.prepare(context, [pair_batch([7])])
    loss, _ = objective.loss(context, pair_batch([7]))
    assert loss.item() == pytest.approx(math.log(2))
    assert work.lm.starting is None


def test_checkpoints_can_be_chosen_by_a_metric_of_pairs_without_generated_answers(tmp_path: Path) -> None:
    work = Work(tmp_path / "run", validation_metric="rewards/margins", steps_per_evaluation=1)
    asked = []
    evaluate = work.context.evaluate

    def recorded(split: str, *, generated: bool = True, max_rows: Any = None, step: Any = None) -> Any:
        asked.append((step, generated))
        return evaluate(split, generated=generated, max_rows=max_rows, step=step)

    work.context = replace(work.context, evaluate=recorded)  # type: ignore[arg-type]
    work.train()
    margins = {step: work.run.metrics[f"validation@{step}"]["rewards/margins"] for step in range(1, 5)}
    assert work.run.noted["best_step"] == max(margins, key=lambda step: margins[step])
    assert asked[:5] == [(0, False), (1, False), (2, False), (3, False), (4, False)]


def test_the_registry_builds_the_trainer() -> None:
    assert isinstance(build_trainer(pair_config().trainer), Preference)


def probed(work: Work, *, streamed: bool = False) -> list[bool]:
    """Return whether a copy of the weights is in memory before, in each step of, and after a probe."""
    context = ProbeContext(
        config=work.config,
        lm=work.lm,
        device=torch.device("cpu"),
        max_row_tokens=12,
        max_loss_tokens=8,
        token_ids=tuple(range(VOCABULARY)),
        max_rows=16,
        volume=lambda rows: Volume(batches=-(-16 // rows), tokens=192),
        estimated_bytes=lambda rows: rows,
        streamed=streamed,
    )
    held = [work.lm.starting is not None]
    work.lm.module.register_forward_pre_hook(lambda *_: held.append(work.lm.starting is not None))
    with work.trainer.probe(context) as probe:
        probe.run(2)
    return [held[0], *dict.fromkeys(held[1:]), work.lm.starting is not None]


@pytest.mark.parametrize(
    ("trainer", "streamed", "held"),
    [
        ({"references": "in_step"}, False, True),
        ({"references": "auto"}, True, True),
        ({"references": "auto"}, False, False),
        ({"references": "before"}, False, False),
        ({"loss": LOSSES["simpo"]}, True, False),
    ],
)
def test_a_probe_holds_the_copy_of_the_weights_that_training_holds(
    tmp_path: Path, trainer: dict[str, Any], streamed: bool, held: bool
) -> None:
    assert probed(Work(tmp_path, **trainer), streamed=streamed) == [False, held, False]
