"""Tests of Ludwig files for language models: they load unchanged, with a warning for each key without effect."""

from pathlib import Path

import pytest

from partita_schema.config import Config
from partita_schema.dump import native_yaml
from partita_schema.errors import ConfigError
from partita_schema.load import LoadedConfig, load_config
from partita_schema.sections.objectives import DpoLoss, OrpoLoss
from partita_schema.sections.outputs.preference import PreferenceOutput
from partita_schema.sections.trainer import FinetuneTrainer, KtoTrainer, PreferenceTrainer

FOLDER = Path(__file__).parent / "ludwig"
GUIDE = Path(__file__).parents[3] / "docs/guides/ludwig.md"
FILES = sorted(FOLDER.glob("*.yaml"))
HEAD = "model_type: llm\nbase_model: m\ninput_features: [{name: a}]\noutput_features: [{name: b, type: text}]\n"


def loaded(name: str) -> LoadedConfig:
    return load_config(FOLDER / f"{name}.yaml")


def warnings_of(file: LoadedConfig) -> list[str]:
    return [f"{warning.line}: {warning.path}: {warning.message}" for warning in file.warnings]


def finetune(config: Config) -> FinetuneTrainer:
    assert isinstance(config.trainer, FinetuneTrainer)
    return config.trainer


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_ludwig_file_loads_and_its_native_form_is_the_same_without_warnings(file: Path) -> None:
    first = load_config(file)
    native = load_config(native_yaml(first.config))
    assert native.config == first.config
    assert native.warnings == ()


def test_there_are_at_least_eight_files() -> None:
    assert len(FILES) >= 8


def test_zero_shot_classification_keeps_labels_and_sampling() -> None:
    file = loaded("zero_shot_category")
    (output,) = file.config.output_features
    assert output.type == "category"
    assert output.labels == ("negative", "neutral", "positive")
    assert output.fallback_label == "neutral"
    assert (file.config.generation.do_sample, file.config.generation.temperature) == (True, 0.1)
    assert warnings_of(file) == ["23: generation.top_k: answers are sampled: do_sample: true is added"]
    assert file.origins["generation.do_sample"] == "ludwig default"


def test_a_trainer_on_pairs_has_one_output_for_both_columns() -> None:
    file = loaded("preference_dpo")
    (output,) = file.config.output_features

    assert isinstance(file.config.trainer, PreferenceTrainer)
    assert file.config.trainer.loss == DpoLoss(type="dpo", beta=0.2, variant="ipo")
    assert (file.config.trainer.learning_rate, file.config.trainer.epochs) == (1e-5, 1)
    assert isinstance(output, PreferenceOutput)
    assert output.answer_columns == ("chosen", "rejected")
    assert output.preprocessing.max_sequence_length == 256
    assert file.warnings == ()
    assert file.origins["trainer.loss.beta"] == "ludwig: trainer.beta"


@pytest.mark.parametrize(
    ("outputs", "columns"),
    [
        ("[{name: response, type: text}]", ("chosen", "rejected")),
        ("[{name: response, column: better, type: text}]", ("better", "rejected")),
        (
            "[{name: rejected_text, type: text}, {name: b, column: chosen_text, type: text}]",
            ("chosen_text", "rejected_text"),
        ),
    ],
)
def test_the_columns_of_pairs_are_those_of_the_outputs(outputs: str, columns: tuple[str, str]) -> None:
    head = HEAD.replace("[{name: b, type: text}]", outputs)
    config = load_config(head + "trainer: {type: orpo, beta: 0.3}\n").config
    (output,) = config.output_features

    assert isinstance(config.trainer, PreferenceTrainer)
    assert config.trainer.loss == OrpoLoss(type="orpo", beta=0.3)
    assert isinstance(output, PreferenceOutput)
    assert output.answer_columns == columns


@pytest.mark.parametrize(
    ("outputs", "label"),
    [
        ("[{name: b, type: text}]", "label"),
        ("[{name: b, type: text}, {name: is_label, type: category}]", "is_label"),
    ],
)
def test_kto_has_a_text_with_a_label(outputs: str, label: str) -> None:
    head = HEAD.replace("[{name: b, type: text}]", outputs)
    config = load_config(head + "trainer: {type: kto, beta: 0.3, desirable_weight: 2.0}\n").config
    (output,) = config.output_features

    assert config.trainer == KtoTrainer(type="kto", beta=0.3, desirable_weight=2.0)
    assert (output.type, output.more_columns) == ("text", (label,))


@pytest.mark.parametrize("key", ["loss_type: aot", "beta: -1"])
def test_a_wrong_value_of_a_loss_is_reported_with_the_key_as_written(key: str) -> None:
    name = key.partition(":")[0]
    assert f"(written as trainer.{name})" in problem_of(HEAD + f"trainer: {{type: dpo, {key}}}\n")


@pytest.mark.parametrize("trainer", ["", "trainer: {type: none}\n"])
def test_an_adapter_of_a_file_that_trains_nothing_is_left_out(trainer: str) -> None:
    file = load_config(HEAD + "adapter: {type: lora, pretrained_adapter_weights: null}\n" + trainer)
    assert file.config.adapter is None
    assert warnings_of(file) == ["5: adapter: has no effect here: nothing is trained with type: none"]
    trained = load_config(HEAD + "adapter: {type: lora, pretrained_adapter_weights: folder}\n" + trainer)
    assert trained.config.adapter is not None


def test_retrieval_is_kept_without_its_index_name() -> None:
    file = loaded("few_shot_retrieval")
    assert file.config.prompt.retrieval is not None
    assert (file.config.prompt.retrieval.type, file.config.prompt.retrieval.k) == ("semantic", 3)
    assert warnings_of(file) == ["25: prompt.retrieval.index_name: has no effect here: the index is made for each run"]


def test_a_template_with_columns_that_are_not_features_is_kept() -> None:
    file = loaded("qlora_alpaca")
    assert file.config.shown_columns == ("instruction", "input")
    assert finetune(file.config).gradient_checkpointing is True
    assert file.origins["trainer.gradient_checkpointing"].startswith("ludwig: trainer.enable_gradient_checkpointing (")
    assert warnings_of(file) == [
        "28: trainer.max_batch_size: has no effect here: neither batch_size nor eval_batch_size is auto",
        "34: trainer.learning_rate_scheduler.reduce_on_plateau: has no effect here: the rate follows its schedule only",
    ]


def test_renamed_keys_and_values_are_converted() -> None:
    file = loaded("full_trainer")
    trainer = finetune(file.config)
    assert (trainer.max_steps, trainer.learning_rate, trainer.mixed_precision) == (200, 0.0002, "auto")
    assert (trainer.optimizer.type, trainer.optimizer.betas) == ("paged_adamw", (0.9, 0.99))
    assert (trainer.early_stop, trainer.batch_size, trainer.validation_metric) == (0, "auto", "loss")
    assert trainer.steps_per_checkpoint is None
    assert (file.config.generation.do_sample, file.config.generation.temperature) == (None, 0.0)
    assert file.config.adapter is not None
    assert file.config.adapter.postprocessor.merge_adapter_into_base_model is True
    message = warnings_of(file)
    assert not any("batch_size" in line for line in message)
    assert "39: trainer.optimizer.type: paged_adam is not offered; paged_adamw is used" in message
    assert any(
        line.endswith("input_features[0].encoder: has no effect here: it belongs to tabular models") for line in message
    )


def test_training_keys_without_training_give_warnings() -> None:
    file = loaded("prompt_at_feature")
    assert file.config.trainer.batch_size == 4
    assert file.config.prompt.template == "Question: {body} Answer:"
    assert (file.config.generation.temperature, file.config.generation.do_sample) == (None, False)
    assert [line.partition(": ")[2] for line in warnings_of(file)] == [
        "generation.temperature: has no effect here: generation is greedy",
        "generation.top_k: has no effect here: generation is greedy",
        "generation.max_length: has no effect here: write max_new_tokens",
        "trainer.epochs: has no effect here: nothing is trained with type: none",
        "trainer.learning_rate: has no effect here: nothing is trained with type: none",
    ]


def test_keys_of_clusters_and_other_bits_give_warnings() -> None:
    file = loaded("int8_ia3")
    assert file.config.backend.type == "local"
    assert finetune(file.config).learning_rate_scheduler.decay == "none"
    assert finetune(file.config).optimizer.type == "adamw"
    message = " | ".join(warnings_of(file))
    assert "3: quantization.bnb_4bit_compute_dtype: has no effect here: it is for 4 bits" in message
    instead = "for several processes write backend: {type: torchrun, processes: N}"
    assert f"backend.type: ray has no effect here: {instead}" in message
    assert "hyperopt: has no effect here: it has no parameters" in message


def test_prompt_tuning_and_its_metric_are_translated() -> None:
    file = loaded("prompt_tuning")
    assert file.config.adapter is not None
    assert file.config.adapter.type == "prompt_tuning"
    assert file.config.adapter.init_text == "Classify the sentiment:"
    assert finetune(file.config).validation_metric == "label.bleu"
    assert finetune(file.config).learning_rate == "auto"
    assert finetune(file.config).step_rows == 32
    message = "trainer.gradient_accumulation_steps: has no effect here: it is what effective_batch_size needs"
    assert f"15: {message}" in warnings_of(file)


@pytest.mark.parametrize("keys", ["type: finetune", "type: finetune, skip_all_evaluation: true", "type: none"])
def test_a_limit_of_the_steps_of_an_evaluation_has_no_effect(keys: str) -> None:
    file = load_config(HEAD + f"trainer: {{{keys}, eval_steps: 5}}\n")
    assert "steps_per_evaluation" not in file.config.trainer.model_fields_set
    reason = "an evaluation measures all validation rows; write steps_per_evaluation for the steps between evaluations"
    assert warnings_of(file) == [f"5: trainer.eval_steps: has no effect here: {reason}"]


def test_steps_of_training_replace_the_epochs() -> None:
    file = load_config(HEAD + "trainer: {type: finetune, train_steps: 200, epochs: 3}\n")
    assert (finetune(file.config).max_steps, finetune(file.config).epochs) == (200, None)
    assert warnings_of(file) == ["5: trainer.epochs: has no effect here: train_steps is set"]
    both = finetune(load_config(HEAD + "trainer: {type: finetune, max_steps: 200, epochs: 3}\n").config)
    assert (both.max_steps, both.epochs) == (200, 3)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("checkpoints_per_epoch: 0", {}),
        ("checkpoints_per_epoch: 0, steps_per_checkpoint: 0", {}),
        ("checkpoints_per_epoch: 4", {"checkpoints_per_epoch": 4, "evaluations_per_epoch": 4}),
        (
            "checkpoints_per_epoch: 0, steps_per_checkpoint: 50",
            {"steps_per_checkpoint": 50, "steps_per_evaluation": 50},
        ),
        (
            "steps_per_checkpoint: 50, evaluations_per_epoch: 2",
            {"steps_per_checkpoint": 50, "evaluations_per_epoch": 2},
        ),
        (
            "steps_per_checkpoint: 50, skip_all_evaluation: true",
            {"steps_per_checkpoint": 50, "skip_all_evaluation": True},
        ),
    ],
)
def test_evaluations_take_place_at_checkpoints_and_0_is_once_per_epoch(keys: str, expected: dict[str, object]) -> None:
    file = load_config(HEAD + f"trainer: {{type: finetune, {keys}}}\n")
    trainer = finetune(file.config)
    assert trainer.model_dump(exclude_unset=True) == {"type": "finetune", **expected}
    assert file.warnings == ()
    if "steps_per_evaluation" in expected:
        assert file.origins["trainer.steps_per_evaluation"].startswith("ludwig: trainer.steps_per_checkpoint (")


@pytest.mark.parametrize("kind", ["none", "finetune"])
def test_automatic_batch_sizes_are_kept(kind: str) -> None:
    keys = "batch_size: auto, eval_batch_size: auto, max_batch_size: 1099511627776"
    file = load_config(HEAD + f"trainer: {{type: {kind}, {keys}}}\n")
    trainer = file.config.trainer
    assert (trainer.batch_size, trainer.eval_batch_size, trainer.max_batch_size) == ("auto", "auto", 2**40)
    assert file.warnings == ()


def test_a_limit_without_a_batch_size_is_kept_because_auto_is_the_default_in_both() -> None:
    file = load_config(HEAD + "trainer: {type: finetune, max_batch_size: 64}\n")
    assert (file.config.trainer.batch_size, file.config.trainer.max_batch_size) == ("auto", 64)
    assert file.warnings == ()


def test_an_automatic_effective_batch_size_is_not_searched() -> None:
    file = load_config(HEAD + "trainer: {type: finetune, batch_size: 4, effective_batch_size: auto}\n")
    assert finetune(file.config).step_rows == 16
    assert warnings_of(file) == ["5: trainer.effective_batch_size: has no effect here: the default is used"]


def test_short_forms_and_ludwig_defaults_are_written_out() -> None:
    file = loaded("model_parameters")
    assert file.config.adapter is not None
    assert file.config.adapter.type == "lora"
    assert file.config.split.type == "random"
    assert file.config.input_features[0].preprocessing.max_sequence_length == 128
    assert loaded("bare").config.trainer.type == "none"
    assert loaded("bare").origins["trainer.type"] == "ludwig default"


def problem_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(text)
    return str(caught.value)


def test_a_typo_in_a_ludwig_file_is_an_error_with_the_nearest_key() -> None:
    assert problem_of(HEAD + "trainer: {type: finetune, epocs: 3}\n") == (
        "5:27: trainer.epocs: unknown key; did you mean epochs?"
    )


def test_an_unsupported_trainer_is_an_error_that_the_guide_quotes() -> None:
    problem = (
        "trainer.type: grpo is not available yet; write one of none, finetune, preference, kto, reward, hogwild, custom"
    )
    assert problem_of(HEAD + "trainer: {type: grpo, beta: 0.1}\n") == f"5:17: {problem}"
    assert problem in GUIDE.read_text(encoding="utf8")


def test_a_wrong_value_of_a_renamed_key_is_reported_with_the_key_as_written() -> None:
    assert problem_of(HEAD + "trainer: {type: finetune, train_steps: 0}\n") == (
        "5:40: trainer.max_steps: write an integer of at least 1; got 0 (written as trainer.train_steps)"
    )


def test_ludwig_keys_in_a_native_file_are_errors_with_the_partita_key() -> None:
    head = HEAD.replace("model_type: llm", "version: 1")
    assert problem_of(head + "trainer: {type: finetune, train_steps: 3}\n") == (
        "5:27: trainer.train_steps: unknown key; write max_steps"
    )
    assert problem_of(head + "combiner: {}\n") == (
        "5:1: combiner: this key of Ludwig's has no effect here: it belongs to tabular models; remove it"
    )
    assert problem_of(head + "trainer: {type: finetune, optimizer: {lr: 1}}\n") == (
        "5:39: trainer.optimizer.lr: unknown key; write trainer.learning_rate"
    )


def test_keys_of_the_exponential_schedule_have_no_effect_with_another_one() -> None:
    text = HEAD + "trainer: {type: finetune, learning_rate_scheduler: {decay: %s, decay_rate: 0.96, decay_steps: 9}}\n"
    for decay in ("null", "linear"):
        assert [problem.message for problem in load_config(text % decay).warnings if "decay_" in problem.path] == [
            "has no effect here: the schedule is not decay: exponential"
        ] * 2
    assert finetune(load_config(text % "exponential").config).learning_rate_scheduler.decay_rate == 0.96
