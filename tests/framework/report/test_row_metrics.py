"""Metrics of row results equal those of the output types, and their intervals those of a plain bootstrap."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from partita.outputs.base import Metrics
from partita.outputs.category import CategoryMetrics
from partita.outputs.json import JsonMetrics
from partita.outputs.number import NumberMetrics
from partita.outputs.set import SetMetrics
from partita.outputs.tags import TagsMetrics
from partita.outputs.text import TextMetrics
from partita.report.evaluation import Evaluation, OutputColumn
from partita.report.resampling import Blocks, interval_of
from partita.report.row_metrics import METRICS, estimates_of
from partita.report.statistics import mean_interval
from partita.runs.row_results import EvaluationHeader, OutputResult

from . import made_runs

MADE: Mapping[str, tuple[Callable[[float], Any], Callable[[], Metrics]]] = {
    "category": (made_runs.category, lambda: CategoryMetrics(scored=False)),
    "number": (made_runs.number, NumberMetrics),
    "set": (made_runs.label_set, lambda: SetMetrics(scored=False)),
    "tags": (made_runs.tags, TagsMetrics),
    "json": (made_runs.json_value, JsonMetrics),
    "text": (made_runs.text, TextMetrics),
}


def column_of(kind: str, outputs: list[OutputResult]) -> OutputColumn:
    column = OutputColumn(kind)
    for output in outputs:
        column.references.append(output.reference)
        column.values.append(output.value)
        column.rights.append(output.right)
    return column


def outputs_of(kind: str, rows: int, *, unreadable: float = 0.1) -> list[OutputResult]:
    chance = random.Random(3)
    drawn = [next(iter(MADE[kind][0](0.6)(chance).values())) for _ in range(rows)]
    return [
        OutputResult(one.reference, None, False) if chance.random() < unreadable else one for one in drawn
    ]  # an unreadable answer is wrong


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("rows", [1, 7, 1200])
def test_values_equal_those_of_the_output_type(kind: str, rows: int) -> None:
    outputs, oracle = outputs_of(kind, rows), MADE[kind][1]()
    for output in outputs:
        oracle.add(output.reference, output.value, valid=output.value is not None)

    estimates = METRICS[kind](column_of(kind, outputs), Blocks(rows))

    wanted = oracle.results(rows) | {"invalid": sum(output.value is None for output in outputs) / rows}
    assert estimates.keys() <= wanted.keys()
    for name, values in estimates.items():
        if np.isfinite(values[0]):
            assert values[0] == pytest.approx(wanted[name], rel=1e-9, abs=1e-12), name


def test_every_type_with_metrics_of_its_own_is_tested() -> None:
    assert METRICS.keys() == MADE.keys() | {"score"}


def test_scores_have_their_error_and_no_share_of_right_ones() -> None:
    column = column_of("score", [OutputResult(1.0, 0.5, False), OutputResult(0.0, 0.5, False)])

    estimates = METRICS["score"](column, Blocks(2))

    assert {name: values[0] for name, values in estimates.items()} == {"mse": 0.25}


def test_a_share_has_the_interval_of_a_bootstrap_of_rows() -> None:
    outputs = outputs_of("category", 400)
    estimate = METRICS["category"](column_of("category", outputs), Blocks(400))["accuracy"]
    plain = mean_interval(np.array([float(bool(output.right)) for output in outputs]), seed=5)

    interval = interval_of(estimate)

    assert interval.value == plain.value
    assert interval.low == pytest.approx(plain.low, abs=0.01)
    assert interval.high == pytest.approx(plain.high, abs=0.01)


def test_macro_f1_has_the_interval_of_a_bootstrap_of_rows() -> None:
    outputs = outputs_of("category", 300)
    column = column_of("category", outputs)
    estimate = METRICS["category"](column, Blocks(300))["macro_f1"]
    chance = random.Random(9)
    plain = []
    for _ in range(400):
        metrics = CategoryMetrics(scored=False)
        for output in chance.choices(outputs, k=300):
            metrics.add(output.reference, output.value, valid=output.value is not None)
        plain.append(metrics.results(300)["macro_f1"])

    interval = interval_of(estimate)

    assert interval.low == pytest.approx(np.percentile(plain, 2.5), abs=0.015)
    assert interval.high == pytest.approx(np.percentile(plain, 97.5), abs=0.015)


def test_resamples_of_equal_references_do_not_count_for_r2() -> None:
    outputs = [OutputResult(truth, truth + 0.5, False) for truth in (92.24867988, 92.24867988, 92.24867988, 56.7, 33.2)]

    interval = interval_of(METRICS["number"](column_of("number", outputs), Blocks(5))["r2"])

    assert 0.9 < interval.low < interval.value < interval.high < 1


@pytest.mark.parametrize("error", [0.0, 0.5])
def test_equal_references_have_the_r2_of_the_output_type(error: float) -> None:
    oracle = NumberMetrics()
    for _ in range(3):
        oracle.add(0.1, 0.1 + error, valid=True)

    r2 = METRICS["number"](column_of("number", [OutputResult(0.1, 0.1 + error, False)] * 3), Blocks(3))["r2"]

    assert interval_of(r2) == (oracle.results(3)["r2"],) * 3


def test_blocks_of_many_rows_give_the_interval_of_rows() -> None:
    values_N = np.random.default_rng(2).random(20_000)
    blocks = Blocks(20_000)

    sums_R = blocks.sums(values_N, np.ones(20_000))
    interval = interval_of(sums_R[:, 0] / sums_R[:, 1])

    error = values_N.std() / np.sqrt(20_000)
    assert interval.value == pytest.approx(values_N.mean())
    assert (interval.high - interval.low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.08)


def test_the_loss_is_the_mean_over_tokens_and_not_over_rows() -> None:
    evaluation = Evaluation(EvaluationHeader("test", "result", "f00d"))
    evaluation.keys, evaluation.losses, evaluation.tokens = ["a", "b", "c"], [1.0, 4.0, None], [3, 1, None]

    estimates = estimates_of(evaluation, Blocks(3), is_plain_text=True)

    assert estimates["loss"][0] == pytest.approx(7 / 4)
    assert estimates["perplexity"][0] == pytest.approx(np.exp(7 / 4))
