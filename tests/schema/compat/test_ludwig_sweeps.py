"""Tests of Ludwig's section `hyperopt`, which loads as `sweep`."""

import pytest

from partita_schema.load import LoadedConfig, load_config
from partita_schema.sections.sweep import SearchSpace, SweepConfig, num_trials

from ..refusals import message_of

HEAD = """\
model_type: llm
base_model: m
input_features: [{name: a}]
output_features: [{name: b, type: category}]
adapter: {type: lora}
trainer: {type: finetune}
"""


def load(parameters: str, more: str = "") -> tuple[SweepConfig, LoadedConfig]:
    loaded = load_config(f"{HEAD}hyperopt:\n  parameters: {parameters}\n{more}")
    assert loaded.config.sweep is not None
    return loaded.config.sweep, loaded


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("trainer.learning_rate: {space: loguniform, lower: 0.0001, upper: 0.01}", {"log_uniform": (0.0001, 0.01)}),
        ("trainer.learning_rate: {space: uniform, lower: 0.1, upper: 0.2}", {"uniform": (0.1, 0.2)}),
        ("adapter.r: {space: choice, categories: [8, 16]}", {"choice": (8, 16)}),
        ("adapter.r: {space: randint, lower: 4, upper: 17}", {"int": (4, 16)}),
        ("adapter.r: {space: qrandint, lower: 4, upper: 16, q: 4}", {"int": (4, 16), "step": 4}),
    ],
)
def test_spaces_of_ray_tune_have_a_counterpart(written: str, expected: dict[str, object]) -> None:
    sweep, _ = load(f"{{{written}}}")
    (space,) = sweep.parameters.values()
    assert space == SearchSpace.model_validate(expected)


def test_renamed_keys_are_parameters_by_their_names_here() -> None:
    sweep, _ = load("{trainer.train_steps: {space: choice, categories: [10, 20]}}")
    assert list(sweep.parameters) == ["trainer.max_steps"]


def test_goal_metric_trials_and_search_algorithm_are_kept_and_other_keys_reported() -> None:
    sweep, loaded = load(
        "{adapter.r: {space: choice, categories: [8, 16]}}",
        "  goal: maximize\n  metric: accuracy\n  output_feature: b\n  split: validation\n"
        "  search_alg: {type: optuna}\n"
        "  executor: {type: ray, num_samples: 5, max_concurrent_trials: 2, time_budget_s: 60}\n",
    )
    assert (sweep.mode, sweep.metric, sweep.trials, sweep.sampler) == ("maximize", "b.accuracy", 5, "tpe")
    assert sweep.max_concurrent_trials == 2
    assert [f"{one.line}: {one.path}: {one.message}" for one in loaded.warnings] == [
        "14: hyperopt.executor.time_budget_s: has no effect here: a sweep does not use it"
    ]


def test_a_search_of_lists_only_is_a_grid_and_others_without_an_algorithm_are_random() -> None:
    assert load("{adapter.r: {space: grid_search, values: [8, 16]}}")[0].sampler == "grid"
    assert load("{adapter.r: {space: choice, categories: [8, 16]}}")[0].sampler == "random"


@pytest.mark.parametrize(("samples", "warnings"), [(1, []), (3, ["each combination of a grid is tried once"])])
def test_a_grid_is_tried_once_whatever_the_number_of_samples(samples: int, warnings: list[str]) -> None:
    sweep, loaded = load(
        "{adapter.r: {space: grid_search, values: [8, 16, 32]}}", f"  executor: {{num_samples: {samples}}}\n"
    )
    assert num_trials(sweep) == 3
    assert [one.message for one in loaded.warnings] == [f"has no effect here: {warning}" for warning in warnings]


def test_a_number_of_trials_that_is_none_is_an_error_and_auto_is_the_default() -> None:
    parameters = "{adapter.r: {space: choice, categories: [8, 16]}}"
    sweep, _ = load(parameters, "  executor: {max_concurrent_trials: auto}\n")
    assert sweep.max_concurrent_trials == 4
    message = message_of(f"{HEAD}hyperopt:\n  parameters: {parameters}\n  executor: {{num_samples: many}}\n")
    assert "sweep.trials: write an integer of at least 1; got many" in message


def test_schedulers_that_stop_trials_are_pruners() -> None:
    sweep, loaded = load(
        "{adapter.r: {space: choice, categories: [8, 16]}}",
        "  executor: {scheduler: {type: async_hyperband}}\n",
    )
    assert sweep.pruner is not None
    assert sweep.pruner.type == "successive_halving"
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("trainer", "metric", "problem"),
    [
        ("", "metric: loss", ""),
        ("", "metric: perplexity", ""),
        ("validation_metric: accuracy", "metric: accuracy, output_feature: b", ""),
        ("validation_metric: accuracy, validation_field: b", "metric: accuracy, output_feature: b", ""),
        ("validation_metric: accuracy, validation_field: b", "metric: accuracy, output_feature: combined", ""),
        ("", "metric: accuracy, output_feature: b", "b.accuracy"),
        ("validation_metric: accuracy, validation_field: c", "metric: accuracy", "accuracy"),
        ("validation_metric: macro_f1", "metric: accuracy, output_feature: b", "b.accuracy"),
    ],
)
def test_trials_are_stopped_by_a_metric_that_is_computed_while_they_train(
    trainer: str, metric: str, problem: str
) -> None:
    head = HEAD.replace("{type: finetune}", f"{{type: finetune, {trainer}}}")
    head = head.replace("{name: b, type: category}", "{name: b, type: category}, {name: c, type: category}")
    hyperopt = (
        "{parameters: {adapter.r: {space: choice, categories: [8, 16]}}, "
        f"{metric}, executor: {{scheduler: {{type: async_hyperband}}}}}}"
    )
    loaded = load_config(f"{head}hyperopt: {hyperopt}\n")
    assert loaded.config.sweep is not None
    assert (loaded.config.sweep.pruner is None) == bool(problem)
    reason = (
        f"has no effect here: {problem} is not computed while a trial trains; write it as trainer.validation_metric"
    )
    expected = [f"hyperopt.executor.scheduler: {reason}"] if problem else []
    assert [f"{one.path}: {one.message}" for one in loaded.warnings] == expected


def test_an_unknown_search_algorithm_is_replaced_with_a_warning() -> None:
    sweep, loaded = load("{adapter.r: {space: choice, categories: [8]}}", "  search_alg: {type: skopt}\n")
    assert sweep.sampler == "tpe"
    assert [one.message for one in loaded.warnings] == ["has no effect here: skopt is not offered; tpe is used"]


def test_a_space_without_a_counterpart_is_an_error() -> None:
    message = message_of(f"{HEAD}hyperopt: {{parameters: {{adapter.r: {{space: randn, mean: 0, sd: 1}}}}}}\n")
    assert "sweep.parameters.adapter.r.space" in message
