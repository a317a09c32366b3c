import itertools
import json
import logging
import math
import statistics
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from partita import Model
from partita.backends.context import RunContext
from partita.backends.local import LocalBackend
from partita.data.batching.collate import EvaluationBatches
from partita.data.ledger import Ledger
from partita.data.sources.sources import open_rows
from partita.distributed.thread_group import ThreadGroup
from partita.generation.oom_backoff import BatchBudget
from partita.lm.scripted import ScriptedModel
from partita.outputs.scorer import Scorer
from partita.pipeline.dataset_loss import dataset_loss
from partita.pipeline.eval_dataset import EvalDataset, build_eval_dataset
from partita.pipeline.evaluate import score
from partita_schema.errors import DataError, OutOfMemory
from partita_schema.load import load_config
from partita_trainers.base import Batch
from partita_trainers.objective import ObjectiveContext, WeightedMean


def build_pipeline(colours: Any) -> Any:
    outputs = [
        {"name": "colour", "type": "category", "decoder": {"labels": ["red", "blue", "green"]}},
        {"name": "number", "type": "number"},
    ]
    config = colours.config(trainer={"type": "none", "batch_size": 8}, output_features=outputs)
    return LocalBackend(RunContext(load_config(config), quiet=True)).pipeline()


@pytest.fixture(scope="module")
def pipeline(colours: Any) -> Any:
    return build_pipeline(colours)


@pytest.fixture(scope="module")
def rows(colours: Any, pipeline: Any) -> EvalDataset:
    table = colours.rows(30)
    return build_eval_dataset(
        pipeline, open_rows(table, folder=Path()), split="test", ledger=Ledger(None, max_bad_rows=0)
    )


def test_the_loss_does_not_depend_on_out_of_memory_errors(
    pipeline: Any, rows: EvalDataset, memory_ceiling: Any, caplog: Any
) -> None:
    free = dataset_loss(pipeline, rows.encoded, budget=BatchBudget(8)).metrics["loss"]
    longest = int(rows.encoded.lengths.max())
    limit = BatchBudget(8)
    with memory_ceiling(pipeline.lm.module, 3 * longest) as passes, caplog.at_level(logging.INFO):
        cut = dataset_loss(pipeline, rows.encoded, budget=limit).metrics["loss"]
    assert math.isclose(cut, free, rel_tol=1e-6)
    assert (limit.current_limit, limit.out_of_memory) == (2, 2)
    # Thirty rows are split into 8, 8, 8 and 6, and a part of 3 is split again.
    assert [number for number, _ in passes] == [8, 4, *[2] * 12, 2, 1, 2, 1]
    assert caplog.messages == [
        f"out of memory with 8 rows of {longest} tokens: continuing with 4",
        f"out of memory with 4 rows of {longest} tokens: continuing with 2",
    ]


def test_halves_are_padded_only_to_their_longest_row(pipeline: Any, rows: EvalDataset, memory_ceiling: Any) -> None:
    lengths = sorted(rows.encoded.lengths.tolist(), reverse=True)
    with memory_ceiling(pipeline.lm.module, 10**6) as passes:
        dataset_loss(pipeline, rows.encoded, budget=BatchBudget(30, current_limit=8))
    # Thirty rows are split into 15 and 15, and these into 8 and 7.
    assert passes == [(8, 8 * lengths[0]), (7, 7 * lengths[8]), (8, 8 * lengths[15]), (7, 7 * lengths[23])]


class CenteredRows:
    """An objective with the mean log-probability of a row minus that of all rows, and the mean token probability."""

    def __init__(self) -> None:
        self.center = 0.0

    def denominator(self, batch: Batch) -> float:
        return batch.rows

    def prepare(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        means = [mean for batch in batches for mean in self.row_means(context.token_log_probs(batch), batch).tolist()]
        gathered = context.process_group.all_gather_object(means, "row means")
        self.center = sum(map(sum, gathered)) / sum(map(len, gathered))

    def loss(self, context: ObjectiveContext, batch: Batch) -> tuple[torch.Tensor, Mapping[str, WeightedMean]]:
        log_probs = context.token_log_probs(batch)
        distances = (self.row_means(log_probs, batch) - self.center).square()
        return distances.sum(), {"probability": WeightedMean(log_probs.exp().sum(), batch.loss_tokens)}

    def row_means(self, log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
        rows = batch.loss_token_rows
        return torch.zeros(batch.rows).index_add(0, rows, log_probs) / rows.bincount(minlength=batch.rows)


def test_an_objective_without_results_of_rows_records_none(pipeline: Any, rows: EvalDataset) -> None:
    assert dataset_loss(pipeline, rows.encoded, budget=BatchBudget(8), objective=CenteredRows()).rows is None


def test_an_objective_is_evaluated_on_all_rows_together(
    colours: Any, pipeline: Any, rows: EvalDataset, memory_ceiling: Any
) -> None:
    encoded, means, probabilities = rows.encoded, [], []
    with torch.no_grad():
        for batch in EvaluationBatches(encoded, batch_size=1, pad_token_id=0):
            log_probs = pipeline.lm.module(input_ids=batch.input_ids_BT).logits[0].log_softmax(-1)
            labels = [(place, label) for place, label in enumerate(batch.labels_BT[0].tolist()) if label != -100]
            results = [log_probs[place - 1, label].item() for place, label in labels]
            means.append(statistics.fmean(results))
            probabilities += map(math.exp, results)
    expected = {"loss": statistics.pvariance(means), "probability": statistics.fmean(probabilities)}

    def evaluate(size: int, pipeline: Any = pipeline, *, limit: int = 0, **options: Any) -> Any:
        budget = BatchBudget(size, current_limit=limit)
        return dataset_loss(pipeline, encoded, budget=budget, objective=CenteredRows(), **options).metrics

    assert evaluate(1) == pytest.approx(expected, rel=1e-4)
    assert evaluate(30, limit=8) == pytest.approx(expected, rel=1e-4)
    with ThreadPoolExecutor(2) as threads:
        models, groups = [pipeline, build_pipeline(colours)], ThreadGroup.of(2)
        of_ranks = list(threads.map(lambda model, group: evaluate(4, model, process_group=group), models, groups))
    assert of_ranks[0] == of_ranks[1] == pytest.approx(expected, rel=1e-4)
    with memory_ceiling(pipeline.lm.module, 100), pytest.raises(OutOfMemory) as caught:
        evaluate(30)
    assert str(caught.value) == (
        "a batch does not fit in memory while the objective prepares an evaluation: write a smaller "
        "trainer.eval_batch_size"
    )


@pytest.mark.long
def test_a_row_that_does_not_fit_alone_is_reported(pipeline: Any, rows: EvalDataset, memory_ceiling: Any) -> None:
    longest = int(rows.encoded.lengths.max())
    place = int(rows.encoded.lengths.argmax())
    with memory_ceiling(pipeline.lm.module, longest - 1), pytest.raises(OutOfMemory) as caught:
        dataset_loss(pipeline, rows.encoded, budget=BatchBudget(8))
    assert str(caught.value) == (
        f"row {rows.rows.key(place)} of {longest} tokens does not fit in memory even alone: write a smaller "
        "preprocessing.global_max_sequence_length, quantization or a smaller model"
    )


def test_any_other_error_of_the_loss_is_passed_on(rows: EvalDataset) -> None:
    class Wrong(ScriptedModel):
        def token_log_probs(self, module: torch.nn.Module, batch: Any) -> torch.Tensor:
            raise IndexError("index out of range in self")

    with pytest.raises(IndexError, match="index out of range"):
        dataset_loss(SimpleNamespace(lm=Wrong(str.upper)), rows.encoded, budget=BatchBudget(8))  # type: ignore[arg-type]


def test_scores_do_not_depend_on_out_of_memory_errors(pipeline: Any, rows: EvalDataset, memory_ceiling: Any) -> None:
    limit = BatchBudget(8)
    free = score(pipeline, rows.rows, budget=BatchBudget(8))
    with memory_ceiling(pipeline.lm.base, 4 * (30 + 24)):
        cut = score(pipeline, rows.rows, budget=limit)
    assert cut.outputs == free.outputs
    assert limit.current_limit < 8


def test_a_rank_that_cannot_compute_the_scores_ends_the_others_with_its_error(
    colours: Any, pipeline: Any, rows: EvalDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, calls = Scorer.scores, itertools.count()

    def failing(self: Scorer) -> Any:
        if next(calls) == 1:
            raise ValueError("a mean of no numbers")
        return scores(self)

    monkeypatch.setattr(Scorer, "scores", failing)

    def error_of(pipeline: Any, process_group: ThreadGroup) -> str:
        with pytest.raises(ValueError, match="a mean") as caught:
            score(pipeline, rows.rows, budget=BatchBudget(8), process_group=process_group)
        return str(caught.value)

    models, groups = [pipeline, build_pipeline(colours)], ThreadGroup.of(2, timeout_seconds=20)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(error_of, models, groups)) == ["a mean of no numbers"] * 2


@contextmanager
def hooks(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_tensors_of_a_batch_that_did_not_fit_are_freed_before_its_half_is_tried(
    pipeline: Any, rows: EvalDataset
) -> None:
    held: list[Any] = []
    alive: list[int] = []
    sizes: list[int] = []

    def hold(module: Any, inputs: Any, output: torch.Tensor) -> None:
        alive.append(sum(reference() is not None for reference in held))
        held.append(weakref.ref(output))
        sizes.append(len(output))

    def refuse(module: Any, inputs: Any) -> None:
        if sizes[-1] > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    base = pipeline.lm.base
    with hooks(
        base.get_input_embeddings().register_forward_hook(hold),
        base.get_output_embeddings().register_forward_pre_hook(refuse),
    ):
        dataset_loss(pipeline, rows.encoded, budget=BatchBudget(16))
    assert sizes[:4] == [16, 8, 4, 4]
    assert not any(alive), "no tensor of an earlier pass is alive when the next one starts"


def test_unusable_rows_are_counted_and_the_others_scored(colours: Any, tmp_path: Path, caplog: Any) -> None:
    rows = [*colours.rows(6), {"text": "no colour"}, {"colour": "red"}]
    lines = [json.dumps({"number": 1} | row) for row in rows] + ["{bad"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    model = Model(colours.config(trainer={"type": "none", "batch_size": 8}), quiet=True)
    with caplog.at_level(logging.WARNING):
        metrics = model.evaluate(tmp_path / "rows.jsonl")
    assert (metrics["colour"]["n"], metrics["colour"]["skipped"]) == (6, 3)
    assert "loss" in metrics["model"]
    assert "3 of 9 rows cannot be scored and are left out of the metrics:\n  1 x not JSON: Expecting" in caplog.text
    assert "  1 x column colour is missing or empty (such as rows.jsonl:7)" in caplog.text
    whole = model.evaluate(colours.rows(6))
    assert metrics["colour"] == whole["colour"] | {"skipped": 3.0}


def test_an_evaluation_with_only_unusable_rows_is_refused_with_the_reasons(colours: Any) -> None:
    model = Model(colours.config(trainer={"type": "none", "batch_size": 8}), quiet=True)
    with pytest.raises(DataError) as caught:
        model.evaluate([{"text": "x", "colour": None, "number": 1}])
    assert str(caught.value) == (
        "no test row can be used, of 1:\n  1 x column colour is missing or empty (such as dataset:1)"
    )


def test_rows_with_a_label_that_no_training_row_has_are_left_out(colours: Any, caplog: Any) -> None:
    rows = colours.rows(8)
    wrong = [{**rows[0], "colour": "pink"}, *rows, {**rows[1], "colour": "pink"}]
    model = Model(colours.config(trainer={"type": "none", "batch_size": 8}), quiet=True)
    with caplog.at_level(logging.WARNING):
        metrics = model.evaluate(wrong)
    assert caplog.messages == [
        (
            "2 of 10 rows cannot be scored and are left out of the metrics:\n"
            "  2 x column colour: 'pink' is none of the labels blue, green, red (such as dataset:1)"
        )
    ]
    whole = model.evaluate(rows)
    assert metrics["colour"] == whole["colour"] | {"skipped": 2.0}
    assert metrics["model"] == whole["model"]
    with pytest.raises(DataError) as caught:
        model.evaluate(wrong[:1])
    assert str(caught.value) == (
        "no test row can be used, of 1:\n"
        "  1 x column colour: 'pink' is none of the labels blue, green, red (such as dataset:1)"
    )
