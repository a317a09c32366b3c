"""Tests of `--set`, which writes values into the configuration before validation."""

import pytest

from partita_schema.load import load_config

from ..refusals import message_of

TEXT = "base_model: m\ninput_features: [{name: a}]\noutput_features: [{name: b, type: text}]\n"


def message_with(*overrides: str) -> str:
    return message_of(TEXT, overrides=overrides)


def test_overrides_set_sections_list_items_and_yaml_values() -> None:
    config = load_config(
        TEXT,
        overrides=[
            "trainer.type=finetune",
            "trainer.epochs=2",
            "trainer.learning_rate=1e-4",
            "adapter={type: lora, r: 4}",
            "output_features.0.decoder.max_new_tokens=7",
            "input_features[0].column=body",
            "prompt.task=Say: hello",
            "base_model=org/name",
        ],
    ).config
    assert config.trainer.type == "finetune"
    assert (config.trainer.epochs, config.trainer.learning_rate) == (2.0, 1e-4)
    assert config.adapter is not None
    assert config.adapter.type == "lora"
    assert config.output_features[0].type == "text"
    assert config.output_features[0].decoder.max_new_tokens == 7
    assert config.input_features[0].column == "body"
    assert (config.prompt.task, config.base_model) == ("Say: hello", "org/name")


def test_the_last_override_of_a_key_wins() -> None:
    assert load_config(TEXT, overrides=["seed=1", "seed=2"]).config.seed == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "trainer.epohcs=1",
            (
                "--set trainer.epohcs=1: trainer.type: is missing; add type: with one of none, finetune, preference, "
                "kto, reward, hogwild, custom"
            ),
        ),
        (
            "trainer={type: finetune, epohcs: 1}",
            ("--set trainer={type: finetune, epohcs: 1}: trainer.epohcs: unknown key; did you mean epochs?"),
        ),
        ("seed=x", "--set seed=x: seed: write an integer from 0 to 4294967295; got x"),
        ("seed", "--set seed: is not an override; write key.path=value, such as trainer.epochs=1"),
        (
            "trainer.epochs= ",
            "--set trainer.epochs= : trainer.epochs: has no value; write one after =, or null for none",
        ),
        (
            "base_model.size=tiny",
            (
                "--set base_model.size=tiny: base_model.size: base_model has no keys to set; write --set "
                "base_model={...}"
            ),
        ),
        (
            "base_model.a.b=1",
            (
                "--set base_model.a.b=1: base_model.a: is under a value that has no keys; set the whole "
                "section, as --set key={...}"
            ),
        ),
        (
            "input_features.1.name=x",
            (
                "--set input_features.1.name=x: input_features[1]: the list has 1 item, counted from 0; "
                "write a smaller number"
            ),
        ),
        (
            "input_features.name=x",
            (
                "--set input_features.name=x: input_features.name: input_features is a list; write the "
                "number of an item, counted from 0, before the key"
            ),
        ),
        (
            "input_features.name.x=x",
            (
                "--set input_features.name.x=x: input_features.name: is a list; write the number of an "
                "item, counted from 0, before the key"
            ),
        ),
        ("prompt.0=x", "--set prompt.0=x: prompt[0]: is not a list; write a key instead of a number"),
    ],
)
def test_a_wrong_override_is_reported(override: str, message: str) -> None:
    assert message_with(override) == message


def test_a_typo_in_an_override_is_reported_with_the_correct_key() -> None:
    assert message_with("trainer.type=finetune", "trainer.epohcs=1") == (
        "--set trainer.epohcs=1: trainer.epohcs: unknown key; did you mean epochs?"
    )


def test_the_keys_of_the_type_before_are_refused_with_the_override_of_the_whole_section() -> None:
    file, whole = f"{TEXT}backend: {{type: torchrun, processes: 3}}\n", "backend={type: local}"
    assert message_of(file, overrides=["backend.type=local"]) == (
        "4:27: backend.processes: processes has no effect with type: local; remove it, it belongs to type: torchrun; "
        f"to replace the whole section, write --set '{whole}'"
    )
    assert load_config(file, overrides=[whole]).config.backend.type == "local"
