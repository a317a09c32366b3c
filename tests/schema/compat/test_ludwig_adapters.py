"""Tests of Ludwig's adapters: keys of ludwig/schema/llms/peft.py, version 0.17, are converted."""

import json
from typing import Any

import pytest

from partita_schema.dump import native_yaml
from partita_schema.load import LoadedConfig, load_config

EVA = {"rho": 3.0, "tau": 0.9, "use_label_mask": True, "label_mask_value": -100, "whiten": False}
LORA: dict[str, Any] = {
    "r": 4,
    "alpha": None,
    "dropout": 0.05,
    "bias_type": "none",
    "target_modules": None,
    "use_rslora": False,
    "use_dora": False,
    "loraplus_lr_ratio": None,
    "rank_pattern": None,
    "alpha_pattern": None,
    "init_lora_weights": "default",
    "eva_config": None,
    "loftq_config": None,
    "layer_replication": None,
    "pretrained_adapter_weights": None,
    "postprocessor": {"merge_adapter_into_base_model": False},
}


def loaded(adapter: dict[str, Any]) -> LoadedConfig:
    file = {"model_type": "llm", "base_model": "m", "adapter": adapter, "trainer": {"type": "finetune"}}
    features = {"input_features": [{"name": "a", "type": "text"}], "output_features": [{"name": "b", "type": "text"}]}
    return load_config(json.dumps(file | features))


def adapter_of(file: LoadedConfig) -> dict[str, Any]:
    """Return the adapter without defaults, after a round trip through the native form."""
    assert file.config.adapter is not None
    assert load_config(native_yaml(file.config)).config == file.config
    return file.config.adapter.model_dump(mode="json", exclude_defaults=True)


def warnings_of(file: LoadedConfig) -> list[str]:
    return [f"{warning.path}: {warning.message}" for warning in file.warnings]


def test_lora_with_all_ludwig_keys_at_their_defaults_loads_without_a_warning() -> None:
    file = loaded({"type": "lora", **LORA})
    assert adapter_of(file) == {"type": "lora", "r": 4, "dropout": 0.05}
    assert warnings_of(file) == []


@pytest.mark.parametrize("init", ["gaussian", "orthogonal", "pissa", "olora", "corda", "eva", "loftq"])
def test_initializations_of_lora_have_the_same_names(init: str) -> None:
    assert adapter_of(loaded({"type": "lora", "init_lora_weights": init})) == {"type": "lora", "init": init}


def test_options_of_eva_and_loftq_are_converted() -> None:
    eva = loaded({"type": "lora", "init_lora_weights": "eva", "eva_config": EVA})
    assert adapter_of(eva) == {"type": "lora", "init": "eva", "eva": {"rho": 3.0, "tau": 0.9}}
    assert sorted(warnings_of(eva)) == [
        "adapter.eva_config.label_mask_value: has no effect here: padding is left out always",
        "adapter.eva_config.use_label_mask: has no effect here: padding is left out always",
        "adapter.eva_config.whiten: has no effect here: activations are not whitened",
    ]
    loftq = {"loftq_bits": 8, "loftq_iter": 3}
    result = loaded({"type": "lora", "init_lora_weights": "loftq", "loftq_config": loftq})
    assert adapter_of(result) == {"type": "lora", "init": "loftq", "loftq_bits": 8, "loftq_iterations": 3}
    assert warnings_of(result) == []


def test_options_of_another_initialization_give_warnings() -> None:
    file = loaded({"type": "lora", "init_lora_weights": True, "eva_config": EVA, "loftq_config": {"loftq_bits": 8}})
    assert adapter_of(file) == {"type": "lora"}
    assert sorted(warnings_of(file)) == [
        "adapter.eva_config: has no effect here: it is for init_lora_weights: eva",
        "adapter.loftq_config: has no effect here: it is for init_lora_weights: loftq",
    ]
    random = loaded({"type": "lora", "init_lora_weights": False})
    assert adapter_of(random) == {"type": "lora"}
    assert warnings_of(random) == [
        "adapter.init_lora_weights: has no effect here: an adapter starts without changing the model"
    ]


def test_the_initialization_of_a_trained_adapter_gives_a_warning() -> None:
    trained: dict[str, Any] = {"type": "lora", "pretrained_adapter_weights": "./trained"}
    file = loaded(trained | {"init_lora_weights": "pissa"})
    assert adapter_of(file) == trained
    assert warnings_of(file) == ["adapter.init_lora_weights: has no effect here: a trained adapter is loaded"]
    assert warnings_of(loaded(trained | {"init_lora_weights": True})) == []


def test_keys_of_lora_in_adalora_give_warnings() -> None:
    file = loaded({"type": "adalora", "r": 4, "use_dora": False, "init_lora_weights": "default", "target_r": 4})
    assert adapter_of(file) == {"type": "adalora", "target_r": 4}
    assert sorted(warning.path for warning in file.warnings) == [
        "adapter.init_lora_weights",
        "adapter.r",
        "adapter.use_dora",
    ]


@pytest.mark.parametrize(
    ("written", "peft_type", "parameters"),
    [
        ({"type": "tinylora", "r": 2, "u": 8, "target_modules": None}, "TINYLORA", {"r": 2, "u": 8}),
        ({"type": "c3a", "block_size": 64, "bias_type": "all"}, "C3A", {"block_size": 64, "bias": "all"}),
        ({"type": "hra", "r": 4, "apply_GS": True}, "HRA", {"r": 4, "apply_GS": True}),
        ({"type": "waveft", "wavelet_family": "db2"}, "WAVEFT", {"wavelet_family": "db2"}),
    ],
)
def test_methods_without_a_section_are_converted_to_peft_adapters(
    written: dict[str, Any], peft_type: str, parameters: dict[str, Any]
) -> None:
    file = loaded({**written, "postprocessor": {"merge_adapter_into_base_model": True}})
    assert adapter_of(file) == {
        "type": "peft",
        "peft_type": peft_type,
        "parameters": parameters,
        "postprocessor": {"merge_adapter_into_base_model": True},
    }
    assert warnings_of(file) == []


def test_dropout_of_vblora_is_renamed() -> None:
    assert adapter_of(loaded({"type": "vblora", "vblora_dropout": 0.1})) == {"type": "vblora", "dropout": 0.1}
