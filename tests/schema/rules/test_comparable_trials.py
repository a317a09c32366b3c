"""Tests of sweeps whose parameters change what the metric measures."""

from typing import Any

import pytest

from partita_schema.load import load_config
from partita_schema.rules.comparable_trials import why_incomparable
from partita_schema.rules.sweep import sweep_direction

from ..refusals import problems_of

NEW: dict[str, Any] = {"type": "scratch", "size": "nano"}
PAIRS: dict[str, Any] = {
    "base_model": "a/model",
    "input_features": [{"name": "question"}],
    "output_features": [{"name": "answer", "type": "preference"}],
    "trainer": {"type": "preference", "loss": {"type": "dpo"}},
}
LABELS = {
    "base_model": NEW,
    "input_features": [{"name": "text"}],
    "output_features": [{"name": "label", "type": "category"}],
    "trainer": {"type": "finetune"},
}
DOCUMENTS = {"base_model": NEW, "output_features": [{"name": "text", "type": "text"}], "trainer": {"type": "finetune"}}
HEAD = LABELS | {"base_model": NEW | {"architecture": "distilbert"}}


def sweeping(base: dict[str, Any], parameters: dict[str, Any], **section: Any) -> dict[str, Any]:
    return base | {"sweep": {"parameters": parameters, **section}}


@pytest.mark.parametrize(
    ("base", "parameters", "expected"),
    [
        (
            PAIRS,
            {"trainer.loss.beta": [0.01, 1.0]},
            (
                "sweep.metric: trials are compared by loss, and trainer.loss.beta changes what it measures; write a "
                "metric that it does not change, such as metric: rewards/accuracies, or metric: loss to compare them "
                "all the same"
            ),
        ),
        (
            DOCUMENTS,
            {"base_model.tokenizer": ["byte", "word"]},
            (
                "sweep.metric: trials are compared by loss, and base_model.tokenizer changes what it measures; write a "
                "metric that it does not change, such as metric: bits_per_byte, or metric: loss to compare them all "
                "the same"
            ),
        ),
        (
            LABELS,
            {"trainer": [{"type": "finetune"}, {"type": "finetune", "completion_only_loss": False}]},
            (
                "sweep.metric: trials are compared by loss, and trainer changes what it measures; write a metric that "
                "it does not change, such as metric: label.accuracy, or metric: loss to compare them all the same"
            ),
        ),
        (
            LABELS | {"trainer": {"type": "finetune", "evaluate_generated": False}},
            {"base_model": [NEW, NEW | {"vocab_size": 300}]},
            (
                "sweep.metric: trials are compared by loss, and base_model changes what it measures; write metric: "
                "loss to compare them all the same"
            ),
        ),
        (
            PAIRS | {"trainer": PAIRS["trainer"] | {"validation_metric": "rewards/margins"}},
            {"trainer.loss.beta": {"log_uniform": [0.01, 1.0]}},
            (
                "sweep.metric: trials are compared by rewards/margins, and trainer.loss.beta changes what it measures; "
                "write a metric that it does not change, such as metric: rewards/accuracies, or metric: "
                "rewards/margins to compare them all the same"
            ),
        ),
    ],
)
def test_a_default_metric_whose_meaning_a_parameter_changes_is_refused(
    base: dict[str, Any], parameters: dict[str, Any], expected: str
) -> None:
    assert problems_of(sweeping(base, parameters)) == [expected]


@pytest.mark.parametrize(
    ("base", "parameters", "section"),
    [
        (LABELS, {"trainer.learning_rate": [0.1, 0.2], "base_model.size": ["nano", "tiny"]}, {}),
        (LABELS, {"trainer": [{"type": "finetune"}, {"type": "finetune", "learning_rate": 0.1}]}, {}),
        (LABELS, {"base_model.tokenizer": ["byte", "word"]}, {"metric": "label.accuracy"}),
        (LABELS, {"base_model.tokenizer": {"choice": ["byte"]}}, {}),
        (LABELS, {"output_features.0.decoder.scoring": [True, False]}, {}),
        (LABELS, {"output_features": [LABELS["output_features"], LABELS["output_features"]]}, {}),
        (LABELS, {"prompt.template": ["{text}", "Text: {text}"]}, {}),
        (HEAD, {"base_model.tokenizer": ["bpe", "word"]}, {}),
        (PAIRS, {"trainer.loss.beta": [0.01, 1.0]}, {"metric": "rewards/accuracies"}),
        (DOCUMENTS, {"base_model.tokenizer": ["byte", "word"]}, {"metric": "bits_per_byte"}),
    ],
)
def test_a_metric_that_means_the_same_in_all_trials_is_allowed_without_a_warning(
    base: dict[str, Any], parameters: dict[str, Any], section: dict[str, Any]
) -> None:
    assert why_incomparable(load_config(sweeping(base, parameters, **section)).config) is None


@pytest.mark.parametrize(
    ("base", "parameters"),
    [
        (LABELS, {"output_features.0.preprocessing.lowercase": [True, False]}),
        (
            LABELS,
            {"output_features": [[{"name": "label", "type": kind}] for kind in ("category", "text")]},
        ),
        (HEAD, {"output_features.0.decoder.labels": [["a", "b"], ["a", "b", "c"]]}),
    ],
)
def test_outputs_that_change_what_is_learned_change_the_loss(base: dict[str, Any], parameters: dict[str, Any]) -> None:
    (problem,) = problems_of(sweeping(base, parameters))
    (key,) = parameters
    assert problem.startswith(f"sweep.metric: trials are compared by loss, and {key} changes what it measures; write ")


def test_prompts_change_the_loss_if_they_are_part_of_it() -> None:
    whole = LABELS | {"trainer": {"type": "finetune", "completion_only_loss": False}}
    (problem,) = problems_of(sweeping(whole, {"prompt.template": ["{text}", "Text: {text}"]}))
    assert problem.startswith("sweep.metric: trials are compared by loss, and prompt.template changes what it measures")


def test_a_metric_that_the_file_names_is_a_warning() -> None:
    config = load_config(sweeping(PAIRS, {"trainer.loss.beta": [0.01, 1.0]}, metric="loss")).config
    assert why_incomparable(config) == (
        "trainer.loss.beta changes what loss measures, so trials with other values of it cannot be compared by loss"
    )


@pytest.mark.parametrize(
    ("data", "parameters", "key"),
    [
        (
            {"split": {"type": "random"}},
            {"data.split.probabilities": [[0.8, 0.1, 0.1], [0.5, 0.25, 0.25]]},
            "data.split.probabilities",
        ),
        ({}, {"data.source": ["one.csv", "other.csv"]}, "data.source"),
        ({}, {"seed": [1, 2]}, "seed"),
        ({}, {"preprocessing.sample_ratio": [0.5, 1.0]}, "preprocessing.sample_ratio"),
        ({"validation": "rows.csv"}, {"seed": [1, 2], "data.source": ["one.csv", "other.csv"]}, None),
        ({"split": {"type": "fixed", "column": "part"}}, {"seed": [1, 2]}, None),
    ],
)
def test_other_validation_rows_are_a_warning(data: Any, parameters: dict[str, Any], key: str | None) -> None:
    config = load_config(sweeping(LABELS | {"data": {"source": "one.csv"} | data}, parameters)).config
    assert why_incomparable(config) == (
        None
        if key is None
        else f"{key} changes the validation rows, so trials with other values of it are compared on other rows"
    )


def test_base_models_with_other_tokenizers_are_a_warning_because_the_file_does_not_say_whether_they_differ() -> None:
    parameters = {"base_model": ["one/model", "other/model"]}
    config = load_config(sweeping(LABELS | {"base_model": "one/model"}, parameters)).config
    assert why_incomparable(config) == (
        "loss is measured in tokens, so trials of base models with other tokenizers cannot be compared by it"
    )


def test_the_metrics_of_documents_compare_trials_and_select_checkpoints_where_they_are_computed() -> None:
    for metric in ("bits_per_byte", "perplexity"):
        text = sweeping(DOCUMENTS, {"seed": [1, 2]}, metric=metric, pruner={"type": "median"})
        assert sweep_direction(load_config(text).config) == "minimize"
        assert not problems_of(DOCUMENTS | {"trainer": {"type": "finetune", "validation_metric": metric}})
        (problem,) = problems_of(sweeping(LABELS, {"seed": [1, 2]}, metric=metric))
        where = "a metric of documents, in files without input_features"
        assert problem == f"sweep.metric: {metric} is {where}; write loss, or a metric of the output"
    assert problems_of(sweeping(DOCUMENTS, {"seed": [1, 2]}, metric="text.bleu")) == [
        "sweep.metric: without input_features no answers are scored; write one of loss, bits_per_byte, perplexity"
    ]
