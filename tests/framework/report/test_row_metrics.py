"""Metrics of row results equal those of the output types, and their intervals those of a plain bootstrap of rows."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics import BLEU
from sklearn.metrics import average_precision_score, ndcg_score, roc_auc_score

from partita.outputs.base import Metrics
from partita.outputs.registry import OUTPUT_TYPES
from partita.outputs.types.category import CategoryMetrics
from partita.outputs.types.json import JsonMetrics
from partita.outputs.types.number import NumberMetrics
from partita.outputs.types.score import ScoreMetrics
from partita.outputs.types.set import SetMetrics
from partita.outputs.types.tags import TagsMetrics
from partita.outputs.types.text import TextMetrics
from partita.report.evaluation import Evaluation, OutputColumn
from partita.report.label_curves import curve_metrics
from partita.report.measures import measure_rows
from partita.report.resampling import MAX_BLOCKS, Blocks, interval_of
from partita.report.row_metrics import METRICS, estimates_of
from partita.report.row_shares import EPISODE, shares_of
from partita.report.statistics import Interval
from partita.report.value_metrics import bleu
from partita.runs.row_results import EvaluationHeader, OutputResult

from . import made_runs

MADE: Mapping[str, tuple[Callable[[float], Any], Callable[[], Metrics]]] = {
    "category": (made_runs.category, lambda: CategoryMetrics(scored=False)),
    "number": (made_runs.number, NumberMetrics),
    "set": (made_runs.label_set, lambda: SetMetrics(scored=False)),
    "tags": (made_runs.tags, TagsMetrics),
    "json": (made_runs.json_value, JsonMetrics),
    "text": (made_runs.text, TextMetrics),
    "score": (made_runs.score, ScoreMetrics),
}
RESAMPLES = 400
"""Of the plain bootstrap. Its percentiles vary by about a tenth of the interval."""
SLOW = {"text": 120, "json": 200}
"""Fewer of them, for types whose metrics take long."""


def truth_of(kind: str, output: OutputResult) -> Any:
    """Return the reference of an output as its metrics expect it."""
    return (output.of_row["query"], output.reference) if kind == "score" and output.of_row else output.reference


def outputs_of(kind: str, rows: int, *, unreadable: float = 0.1) -> list[OutputResult]:
    """Return the results of an output, some of them unreadable, with what each row contributes to metrics."""
    rng, metrics = random.Random(3), MADE[kind][1]()
    outputs = []
    for _ in range(rows):
        output = next(iter(MADE[kind][0](0.6)(rng).values()))
        value = None if rng.random() < unreadable else output.value
        right = metrics.add(truth_of(kind, output), value, valid=value is not None)
        outputs.append(OutputResult(output.reference, value, right, of_row=metrics.of_row))
    return outputs


def evaluation_of(kind: str, outputs: Sequence[OutputResult], **header: Any) -> Evaluation:
    """Return an evaluation with one output, named `out`."""
    evaluation = Evaluation(EvaluationHeader("test", "result", "f00d", outputs={"out": kind}, **header))
    evaluation.outputs["out"] = OutputColumn(kind)
    rows = [
        {"key": str(index), "prompt": "", "answer": "", "loss": None, "tokens": None, "outputs": {"out": vars(output)}}
        for index, output in enumerate(outputs)
    ]
    evaluation.add(rows)
    return evaluation


def oracle(kind: str, outputs: Sequence[OutputResult]) -> dict[str, float]:
    """Return the metrics of the output type."""
    metrics = MADE[kind][1]()
    for output in outputs:
        metrics.add(truth_of(kind, output), output.value, valid=output.value is not None)
    return metrics.results(len(outputs))


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("rows", [1, 7, 1200])
def test_values_equal_those_of_the_output_type(kind: str, rows: int) -> None:
    outputs = outputs_of(kind, rows)
    wanted = {f"out.{name}": value for name, value in oracle(kind, outputs).items()}
    wanted |= {"out.invalid": sum(output.value is None for output in outputs) / rows, "out.errors": 0.0}

    measures = measure_rows(evaluation_of(kind, outputs))

    assert {measure.metric for measure in measures} <= wanted.keys()
    for measure in measures:
        assert measure.result.value == pytest.approx(wanted[measure.metric], rel=1e-9, abs=1e-12), measure.metric
    if rows > 1:
        assert {measure.metric for measure in measures} == wanted.keys()


def test_every_type_is_tested() -> None:
    assert METRICS.keys() == MADE.keys() | {"embedding", "preference", EPISODE}
    assert METRICS.keys() == OUTPUT_TYPES.keys() | {EPISODE}


@pytest.mark.parametrize("kind", MADE)
def test_intervals_are_near_those_of_a_plain_bootstrap(kind: str) -> None:
    outputs = outputs_of(kind, 200)
    groups = [partial(renamed, group) for group in groups_of(outputs)]
    generator = np.random.default_rng(5)
    plain: dict[str, list[float]] = {}
    for _ in range(SLOW.get(kind, RESAMPLES)):
        places = generator.integers(0, len(groups), len(groups)).tolist()
        for name, value in oracle(
            kind, [one for draw, place in enumerate(places) for one in groups[place](draw)]
        ).items():
            plain.setdefault(f"out.{name}", []).append(value)

    estimates = estimates_of(evaluation_of(kind, outputs), Blocks(200))

    assert estimates
    for name in estimates:
        if kind == "score" and name.endswith(".mse"):
            continue  # over rows, the rankings over queries
        interval, expected = interval_of(estimates[name]), np.nanpercentile(plain[name], [2.5, 97.5])
        assert interval[1:] == pytest.approx(expected, abs=0.25 * float(expected[1] - expected[0])), name


def renamed(group: Sequence[OutputResult], draw: int) -> list[OutputResult]:
    """Return documents as those of separate queries, because a query may be drawn several times."""
    if group[0].of_row is None or "query" not in group[0].of_row:
        return list(group)
    return [replace(output, of_row={"query": f"draw {draw}"}) for output in group]


def groups_of(outputs: Sequence[OutputResult]) -> list[list[OutputResult]]:
    """Return what is resampled: rows, or the documents of a query."""
    if outputs[0].of_row is None or "query" not in outputs[0].of_row:
        return [[output] for output in outputs]
    groups: dict[str, list[OutputResult]] = {}
    for output in outputs:
        assert output.of_row is not None
        groups.setdefault(output.of_row["query"], []).append(output)
    return [group for group in groups.values() if any(output.reference > 0 for output in group)]


def test_bleu_of_resamples_equals_that_of_sacrebleu() -> None:
    generator = np.random.default_rng(4)
    sums_RC = generator.integers(0, 6, (300, 10)).astype(np.float64)
    sums_RC[:, 4:8] = np.sort(sums_RC[:, 4:8] + sums_RC[:, :4], axis=1)[:, ::-1]  # shorter n-grams are more
    sums_RC[:, :4] = np.minimum(sums_RC[:, :4], sums_RC[:, 4:8])
    sums_RC[::7, :4] = 0
    sums_RC[:, 9] += 1
    sums_RC[::5, 8] = 0

    for sums, value in zip(sums_RC.astype(int).tolist(), bleu(sums_RC), strict=True):
        expected = BLEU.compute_bleu(
            sums[:4], sums[4:8], sums[8], sums[9], smooth_method="exp", effective_order=True
        ).score
        assert value == pytest.approx(expected)


def test_ndcg_of_queries_is_that_of_scikit_learn() -> None:
    outputs = outputs_of("score", 60, unreadable=0)
    expected = [
        ndcg_score([[one.reference for one in group]], [[one.value for one in group]], k=10) if len(group) > 1 else 1.0
        for group in groups_of(outputs)
    ]

    values = METRICS["score"](evaluation_of("score", outputs).outputs["out"], Blocks(60))["ndcg_at_10"]

    assert values[0] == pytest.approx(np.mean(expected))


def scored_rows(rows: int, labels: int = 3) -> tuple[list[dict[str, float]], list[tuple[str, ...]], np.ndarray]:
    """Return log probabilities and references of rows, and the probabilities [N, L]."""
    generator = np.random.default_rng(8)
    truths_N = generator.integers(0, labels, rows)
    raised_NL = generator.normal(size=(rows, labels)) + 1.5 * np.eye(labels)[truths_N]
    shares_NL = np.exp(raised_NL) / np.exp(raised_NL).sum(axis=1, keepdims=True)
    shares_NL = shares_NL.round(2) + 1e-4  # with ties
    scores = [{f"label {place}": math.log(share) for place, share in enumerate(row)} for row in shares_NL.tolist()]
    return scores, [(f"label {place}",) for place in truths_N.tolist()], np.column_stack([truths_N, shares_NL])


def curve_of(name: str, table_N4: np.ndarray) -> float:
    """Return a metric of label scores as scikit-learn computes it."""
    compute = roc_auc_score if name == "auroc" else average_precision_score
    return float(np.mean([compute(table_N4[:, 0] == place, table_N4[:, place + 1]) for place in range(3)]))


@pytest.mark.parametrize("rows", [150, pytest.param(MAX_BLOCKS + 1500, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["auroc", "average_precision"])
def test_curves_of_label_scores_have_the_interval_of_a_plain_bootstrap(name: str, rows: int) -> None:
    scores, truths, table_N4 = scored_rows(rows)
    generator = np.random.default_rng(2)
    plain = [curve_of(name, table_N4[generator.integers(0, rows, rows)]) for _ in range(RESAMPLES // 2)]

    interval = interval_of(curve_metrics(scores, truths, Blocks(rows))[name])

    low, high = np.percentile(plain, [2.5, 97.5])
    assert interval.value == pytest.approx(curve_of(name, table_N4))
    assert interval[1:] == pytest.approx((low, high), abs=0.25 * float(high - low))


def test_a_row_without_scores_is_the_last_one_of_each_label() -> None:
    rows: list[dict[str, float | None] | None] = [{"a": -0.1, "b": -2.0}, {"a": -2.0, "b": -0.1}, None]

    metrics = curve_metrics(rows, [("a",), ("b",), ("a",)], Blocks(3))

    assert metrics["auroc"][0] == pytest.approx((0.5 + 1.0) / 2)


def test_scores_of_some_labels_give_no_curves() -> None:
    outputs = [OutputResult("a", "a", True, {"a": -0.1, "b": -2.5}), OutputResult("b", "b", True, {"b": -0.1})]

    def names(num_labels: int, outputs: Sequence[OutputResult]) -> set[str]:
        return set(estimates_of(evaluation_of("category", outputs, num_labels={"out": num_labels}), Blocks(2)))

    assert names(2, [outputs[0]] * 2) == {"out.macro_f1", "out.weighted_f1", "out.auroc", "out.average_precision"}
    assert names(2, outputs) == names(3, [outputs[0]] * 2) == {"out.macro_f1", "out.weighted_f1"}


def test_embeddings_have_the_metrics_of_the_ranks_of_their_rows() -> None:
    ranks = [1, 2, 4, 20]
    outputs = [OutputResult(None, None, of_row={"rank": rank}) for rank in ranks]

    estimates = estimates_of(evaluation_of("embedding", outputs), Blocks(4))

    assert {name: values[0] for name, values in estimates.items()} == {
        "out.mrr": pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 20) / 4),
        "out.recall_at_1": 0.25,
        "out.recall_at_5": 0.75,
        "out.recall_at_10": 0.75,
    }


def test_scores_have_no_share_of_right_ones() -> None:
    evaluation = evaluation_of("score", [OutputResult(1.0, 0.5, False), OutputResult(0.0, 0.5, False)])

    assert [one.metric for one in measure_rows(evaluation)] == ["out.mse", "out.invalid", "out.errors"]


def test_rows_without_an_answer_are_errors_and_unreadable_answers_invalid() -> None:
    outputs = [
        OutputResult({"a": 1}, {"a": 1}, True),
        OutputResult({"a": 1}, None, False),
        OutputResult(None, None, True, is_null=True),
        OutputResult({"a": 1}, None, False, is_null=True),
    ]
    evaluation = evaluation_of("json", [*outputs, OutputResult({"a": 1}, None, False)])
    evaluation.answers[4] = None

    shares = {name: rows_N.tolist() for name, rows_N in shares_of(evaluation).items()}

    assert shares == {
        "out.exact_match": [1, 0, 1, 0, 0],
        "out.invalid": [0, 1, 0, 0, 0],
        "out.errors": [0, 0, 0, 0, 1],
        "out.valid": [1, 0, 1, 1, 0],
    }


def test_resamples_of_equal_references_do_not_count_for_r2() -> None:
    outputs = [OutputResult(truth, truth + 0.5, False) for truth in (92.24867988, 92.24867988, 92.24867988, 56.7, 33.2)]

    interval = interval_of(METRICS["number"](evaluation_of("number", outputs).outputs["out"], Blocks(5))["r2"])

    assert 0.9 < interval.low < interval.value < interval.high < 1


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_equal_references_have_the_r2_of_the_output_type(error: float) -> None:
    outputs = [OutputResult(0.1, 0.1 + error, False)] * 3

    r2 = METRICS["number"](evaluation_of("number", outputs).outputs["out"], Blocks(3))["r2"]

    assert interval_of(r2) == (oracle("number", outputs)["r2"],) * 3


def test_blocks_of_many_rows_give_the_interval_of_rows() -> None:
    values_N = np.random.default_rng(2).random(20_000)

    interval = interval_of(Blocks(20_000).means(values_N))

    error = values_N.std() / np.sqrt(20_000)
    assert interval.value == pytest.approx(values_N.mean())
    assert (interval.high - interval.low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.08)


def test_the_loss_is_the_mean_over_tokens_and_not_over_rows() -> None:
    evaluation = Evaluation(EvaluationHeader("test", "result", "f00d"))
    evaluation.keys, evaluation.losses, evaluation.tokens = ["a", "b", "c"], [1.0, 4.0, None], [3, 1, None]

    estimates = estimates_of(evaluation, Blocks(3), is_plain_text=True)

    assert estimates["loss"][0] == pytest.approx(7 / 4)
    assert estimates["perplexity"][0] == pytest.approx(np.exp(7 / 4))


def test_a_share_of_rows_has_wilsons_interval() -> None:
    outputs = [OutputResult("a", "a", True)] * 30

    measures = {one.metric: one.result for one in measure_rows(evaluation_of("category", outputs))}

    assert measures["out.accuracy"] == Interval(1.0, pytest.approx(0.8865, abs=1e-4), 1.0)
    assert measures["out.invalid"] == Interval(0.0, 0.0, pytest.approx(0.1135, abs=1e-4))
