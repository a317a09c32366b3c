"""Tests of the section `sweep`: its keys, every value of its parameters, and its rules with other sections."""

from pathlib import Path

import pytest

from partita_schema.config import Config
from partita_schema.errors import ConfigError
from partita_schema.load import load_config
from partita_schema.sections.sweep import num_trials, values_of
from partita_schema.sweep_values import trial_config

from ..refusals import message_of

BASE = """\
base_model: {type: scratch, size: nano}
input_features: [{name: text}]
output_features: [{name: label, type: category}]
trainer: {type: finetune, batch_size: 4}
"""


def sweep(parameters: str, more: str = "") -> str:
    return f"{BASE}sweep:\n  parameters:\n    {parameters}\n{more}"


def lines_of(text: str, folder: Path) -> list[str]:
    """Return the problems of a file, each with its line, without the name of the file and the column."""
    file = folder / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    return [f"{problem.line}: {problem.path}: {problem.message}" for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (
            "trainer.lerning_rate: [1.0e-3]",
            "7: sweep.parameters.trainer.lerning_rate: unknown key; did you mean learning_rate?",
        ),
        (
            (
                "defaults.text.preprocessing.max_sequence_length: [1, 2]\n"
                "defaults: {text: {preprocessing: {max_sequence_length: 3}}}"
            ),
            (
                "7: sweep.parameters.defaults.text.preprocessing.max_sequence_length: the inputs have the value of "
                "defaults.text.preprocessing.max_sequence_length in the file, not that of a trial; remove it there"
            ),
        ),
        (
            "trainer.epochs: {int: [0, 3]}",
            "7: sweep.parameters.trainer.epochs.int[0]: write a number above 0; got 0",
        ),
        (
            "trainer.learning_rate: {log_uniform: [1e-5, 1e-3]}\n    trainer.batch_size: [8, yes]",
            (
                "8: sweep.parameters.trainer.batch_size[1]: yes is read by YAML as true; write an integer of at least "
                "1, or auto"
            ),
        ),
        (
            "adapter: [{type: lora, r: 8}, {type: lora, r: x}]",
            "7: sweep.parameters.adapter[1].r: write an integer of at least 1; got x",
        ),
        (
            "adapter: [{type: lora, rr: 8}]",
            "7: sweep.parameters.adapter[0].rr: unknown key; did you mean r?",
        ),
        (
            "trainer.effective_batch_size: [8, 10]",
            (
                "7: sweep.parameters.trainer.effective_batch_size[1]: effective_batch_size 10 is not a multiple of "
                "batch_size 4; write 8"
            ),
        ),
        (
            "quantization.bits: [4]",
            (
                "7: sweep.parameters.quantization.bits[0]: quantization: a new model has no weights worth quantizing; "
                "remove quantization"
            ),
        ),
        (
            "output_features.1.type: [text]",
            (
                "7: sweep.parameters.output_features.1.type[0]: the list has 1 item, counted from 0; write a smaller "
                "number"
            ),
        ),
        ("seed: {uniform: [3, 1]}", "7: sweep.parameters.seed.uniform: the lower limit 3 is not below the upper 1"),
        ("seed: {log_int: [0, 1]}", "7: sweep.parameters.seed.log_int: a logarithm needs limits above 0; got 0"),
        (
            "seed: {int: [1, 2], uniform: [1, 2]}",
            "sweep.parameters.seed.int: write one of choice, uniform, log_uniform, int, log_int; got uniform and int",
        ),
        ("seed: {choice: [1], step: 2}", "7: sweep.parameters.seed.step: step has no effect without int; remove it"),
        ("seed: []", "7: sweep.parameters.seed: the list is empty; write at least 1 of them"),
    ],
)
def test_a_wrong_value_is_reported_with_its_line(tmp_path: Path, parameters: str, expected: str) -> None:
    problems = lines_of(sweep(parameters), tmp_path)
    assert len(problems) == 1
    assert expected in problems[0]


def test_all_wrong_values_are_reported_at_once(tmp_path: Path) -> None:
    problems = lines_of(sweep("seed: [-1, 2, x]\n    trainer.epochs: {uniform: [-1, 0]}"), tmp_path)
    assert [problem.split(": ")[1] for problem in problems] == [
        "sweep.parameters.seed[0]",
        "sweep.parameters.seed[2]",
        "sweep.parameters.trainer.epochs.uniform[0]",
        "sweep.parameters.trainer.epochs.uniform[1]",
    ]


def test_limits_of_a_range_of_numbers_are_not_integers(tmp_path: Path) -> None:
    assert lines_of(sweep("trainer.batch_size: {uniform: [4, 8]}"), tmp_path) == [
        "7: sweep.parameters.trainer.batch_size: the key takes integers; write int or log_int"
    ]


def test_a_value_that_fits_another_value_of_a_sweep_is_allowed() -> None:
    load_config(sweep("trainer.batch_size: [4, 5]\n    trainer.effective_batch_size: [16, 20, 25]"))


@pytest.mark.parametrize(
    ("parameters", "more", "expected"),
    [
        ("sweep.trials: [1]", "", "sweep.trials is the same in all trials; remove it"),
        ("backend.type: [ray]", "", "backend.type is the same in all trials; remove it"),
        (
            "adapter: [null]\n    adapter.r: [8]",
            "",
            "adapter.r is inside adapter, which is a parameter as well; remove one of them",
        ),
        (
            "seed: {int: [1, 2]}\n    trainer.epochs: {uniform: [1, 2]}",
            "  sampler: grid\n",
            "sweep.sampler: a grid needs lists of values, and a parameter is a range; write random or tpe, or lists",
        ),
        ("seed: [1]", "  sampler: grid\n  seed: 3\n", "sweep.seed: a grid has nothing random; remove seed"),
        ("seed: [1]", "  metric: label.accurracy\n", "no metric is named label.accurracy; did you mean"),
        (
            "seed: [1]",
            "  metric: label.accuracy\n  pruner: {type: median}\n",
            (
                "sweep.pruner: label.accuracy is not computed while a trial trains; write trainer: {validation_metric: "
                "label.accuracy}"
            ),
        ),
        ("seed: [1]", "  sampler: bayes\n", "sweep.sampler: write one of grid, random, tpe; got 'bayes'"),
        (
            "seed: [1]",
            "backend: {type: torchrun, processes: 2}\n",
            "backend: a trial runs in one process; write backend: {type: local}",
        ),
        (
            "seed: [1]",
            "  workers: 2\nbackend: {type: ray}\n",
            "sweep.workers: with backend: {type: ray}, write the number of workers as backend.workers",
        ),
        (
            "seed: [1]",
            "backend: {type: ray, sharding: full}\n",
            "backend.sharding: a trial runs in one process, which holds the whole model; remove sharding",
        ),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused(parameters: str, more: str, expected: str) -> None:
    assert expected in message_of(sweep(parameters, more))


@pytest.mark.parametrize(
    ("trainer", "more", "expected"),
    [
        ("{type: finetune, skip_all_evaluation: true}", "", "a sweep compares validation metrics; remove it"),
        ("{type: none, evaluate: [test]}", "", "a sweep compares trials on the validation rows; add validation"),
        ("{type: none}", "  pruner: {type: median}\n", "{type: none} does not evaluate while it trains; remove pruner"),
    ],
)
def test_a_sweep_needs_validation_metrics(trainer: str, more: str, expected: str) -> None:
    text = sweep("seed: [1]", more).replace("{type: finetune, batch_size: 4}", trainer)
    assert expected in message_of(text.replace("{type: scratch, size: nano}", "some/model"))


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        (
            {
                "input_features": "[{name: messages, type: dialogue}]",
                "output_features": "[{name: reply, type: text}]",
                "data": "{source: rows.jsonl}",
                "simulation": "{world: {type: replay}, self_training: {rounds: 2}}",
            },
            "a trial with self-training is known at the end of its last round; remove pruner",
        ),
        (
            {"data": "{source: rows.jsonl, split: {type: kfold}}"},
            "a trial is the mean of its folds, which is known at its end; remove pruner",
        ),
    ],
)
def test_a_pruner_needs_trials_that_are_one_training(sections: dict[str, str], reason: str) -> None:
    changes = "\n".join(f"{key}: {value}" for key, value in sections.items()) + "\n"
    with pytest.raises(ConfigError) as caught:
        load_config([sweep("seed: [1]", "  metric: loss\n  pruner: {type: median}\n"), changes])
    assert str(caught.value).endswith(f"sweep.pruner: {reason}")
    load_config([sweep("seed: [1]", "  metric: loss\n"), changes])


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": "{type: finetune, validation_metric: label.accuracy}"},
        {"data": "{source: rows.jsonl, split: {type: kfold, fold: 2}}"},
    ],
)
def test_a_pruner_may_use_the_loss_of_every_training_with_evaluations(changes: dict[str, str]) -> None:
    text = sweep("seed: [1]", "  metric: loss\n  pruner: {type: median}\n")
    config = load_config([text, "\n".join(f"{key}: {value}" for key, value in changes.items()) + "\n"]).config
    assert config.sweep is not None
    assert config.sweep.pruner is not None


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        ("trainer.learning_rate: [1e-4, 0.0001, 1, auto]", (1e-4, 1e-4, 1.0, "auto")),
        ("trainer.learning_rate: {choice: [1e-4]}", (1e-4,)),
        ("trainer.batch_size: [8, 16]", (8, 16)),
        ("trainer.effective_batch_size: [10, 20]\n    trainer.batch_size: [5]", (10, 20)),
        ("trainer.mixed_precision: ['no', auto]", ("no", "auto")),
        ("prompt.task: [Classify., '1e-4', 1e-4]", ("Classify.", "1e-4", "1e-4")),
        ("adapter: [{type: lora, alpha: 1e1}]", ({"type": "lora", "alpha": "1e1"},)),
    ],
)
def test_numbers_of_a_list_are_those_that_their_key_reads(parameter: str, expected: tuple[object, ...]) -> None:
    section = load_config(sweep(parameter)).config.sweep
    assert section is not None
    found = values_of(next(iter(section.parameters.values())))
    assert found == expected
    assert [type(value) for value in found or ()] == [type(value) for value in expected]


def test_a_sweep_without_parameters_is_refused() -> None:
    assert "there is no parameter; write a key of the file" in message_of(f"{BASE}sweep: {{parameters: {{}}}}")


def test_the_number_of_trials_is_that_of_the_combinations_of_a_grid_and_otherwise_16() -> None:
    def count(text: str) -> int:
        section = load_config(text).config.sweep
        assert section is not None
        return num_trials(section)

    grid = "seed: [1, 2, 3]\n    trainer.epochs: {int: [1, 4], step: 2}"
    assert count(sweep(grid, "  sampler: grid\n")) == 6
    assert count(sweep(grid, "  sampler: grid\n  trials: 4\n")) == 4
    assert count(sweep(grid, "  sampler: grid\n  trials: 40\n")) == 6
    assert count(sweep(grid)) == 16
    assert count(sweep(grid, "  trials: 40\n")) == 40


EMBEDDINGS = """\
base_model: {type: scratch, size: nano, architecture: bert}
input_features: [{name: text}]
output_features: [{name: vector, type: embedding}]
trainer: {type: finetune, batch_size: 4}
backend: {type: ray, workers: 2}
"""


def test_what_ray_does_not_run_may_be_a_trial_that_it_places_because_trials_are_local_runs() -> None:
    assert "the embeddings of a step are compared in one place; remove backend" in message_of(EMBEDDINGS)
    config = load_config(f"{EMBEDDINGS}sweep: {{parameters: {{trainer.epochs: [1, 2]}}}}").config
    assert config.backend.type == "ray"
    trial = trial_config(config, {"trainer.epochs": 2})
    assert trial.backend.type == "local"
    assert "backend" not in trial.model_dump(exclude_unset=True)


def test_the_configuration_of_a_trial_has_the_values_and_no_sweep() -> None:
    config = load_config(sweep("seed: [1, 2]\n    adapter: [{type: lora, r: 4}]")).config
    trial = trial_config(config, {"seed": 2, "adapter": {"type": "lora", "r": 4}})
    assert isinstance(trial, Config)
    assert trial.sweep is None
    assert (trial.seed, trial.adapter and trial.adapter.type) == (2, "lora")
    assert trial.model_copy(update={"seed": config.seed, "adapter": None, "sweep": config.sweep}) == config
