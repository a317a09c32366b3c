"""Tests of choosing the best evaluation."""

import math

import pytest

from partita_schema.errors import ConfigError
from partita_schema.sections.outputs import DIRECTIONS
from partita_trainers.early_stopping import BestEvaluation

LOWER = {"loss", "invalid", "errors", "mae", "mse", "rmse", "chosen_falls", "perplexity", "bits_per_byte"}
HIGHER = {
    *("exact_match", "accuracy", "macro_f1", "weighted_f1", "micro_f1", "jaccard", "r2", "valid", "field_accuracy"),
    *("rouge_1", "rouge_2", "rouge_l", "bleu", "auroc", "average_precision"),
    *("micro_precision", "micro_recall", "word_accuracy", "mrr", "ndcg_at_10"),
    *("rewards/accuracies", "rewards/margins", "rewards/chosen", "logps/chosen"),
    *("recall_at_1", "recall_at_5", "recall_at_10", "joint_accuracy", "slot_accuracy", "slot_f1"),
}


def best_step(metric: str, values: list[float]) -> int | None:
    best = BestEvaluation(metric, patience=0)
    for step, value in enumerate(values, start=1):
        best.update({metric: value}, step=step)
    return best.best_step


def test_every_metric_has_a_direction() -> None:
    """A new metric fails here until it is in LOWER or HIGHER above."""
    assert set(DIRECTIONS) == LOWER | HIGHER


@pytest.mark.parametrize("metric", sorted(LOWER | HIGHER))
def test_the_best_evaluation_is_the_lowest_error_or_the_highest_score(metric: str) -> None:
    name = metric if metric == "loss" else f"answer.{metric}"
    assert best_step(name, [0.5, 0.2, 0.7, 0.4]) == (2 if metric in LOWER else 3)


@pytest.mark.parametrize("part", ["field", "slot"])
def test_the_score_of_a_part_of_a_json_object_is_a_score_with_any_name(part: str) -> None:
    assert best_step(f"answer.{part}.errors", [0.5, 0.2, 0.7]) == 3


@pytest.mark.parametrize("metric", ["loss", "answer.accuracy"])
def test_nan_is_never_the_best(metric: str) -> None:
    assert best_step(metric, [math.nan, math.nan]) is None
    assert best_step(metric, [math.nan, 0.5, math.nan]) == 2
    assert best_step(metric, [0.5, math.nan]) == 1


@pytest.mark.parametrize("metric", ["loss", "answer.accuracy"])
def test_in_a_tie_the_earlier_evaluation_is_the_best(metric: str) -> None:
    assert best_step(metric, [0.5, 0.5, 0.5]) == 1


def test_an_infinite_error_is_better_than_no_evaluation_and_worse_than_any_other() -> None:
    assert best_step("number.mae", [math.inf, math.inf]) == 1
    assert best_step("number.mae", [math.inf, 9.0]) == 2


def test_a_number_of_rows_is_not_used_to_choose_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match=r"trainer.validation_metric: a\.n does not say which of two checkpoints"):
        best_step("a.n", [3.0])
