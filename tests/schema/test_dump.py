"""Tests of dumped configurations: the origin of each value is written, and loading gives the same values."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita_schema.dump import native_yaml, resolved_yaml, scalar
from partita_schema.load import load_config
from partita_schema.templates import TASKS, template
from partita_schema.yaml.parse import read_yaml

from ..properties import examples

GOOD = Path(__file__).parent / "wrong" / "good.yaml"
TEXT = "base_model: m\ninput_features: [{name: a}]\noutput_features: [{name: b, type: text}]\n"
ARMS = "lora adalora ia3 vera loha lokr boft oft fourierft ln_tuning vblora prompt_tuning prefix_tuning p_tuning"


@pytest.mark.parametrize("form", [resolved_yaml, lambda loaded: native_yaml(loaded.config)], ids=["resolved", "native"])
def test_a_dumped_configuration_loads_to_the_same_config(form) -> None:  # type: ignore[no-untyped-def]
    loaded = load_config(GOOD)
    assert load_config(form(loaded)).config == loaded.config


@pytest.mark.parametrize(
    "tail",
    [f"adapter: {{type: {arm}}}" for arm in ARMS.split()]
    + [
        "quantization: {bits: 8}",
        "quantization: {bits: 4}",
        "trainer: {type: finetune, optimizer: {type: lion}}",
        "trainer: {type: finetune, mixed_precision: no, learning_rate: auto}",
        "preprocessing: {sample_size: 5}",
        "trainer: {type: none, memory_budget: 0.5, max_batch_size: 64}",
        "trainer: {type: none, memory_budget: 1, eval_batch_size: auto}",
        "trainer: {type: finetune, memory_budget: 12 GiB, batch_size: 4, eval_batch_size: auto, max_batch_size: 9}",
        "trainer: {type: finetune, memory_budget: 12_000_000_000, batch_size: auto, effective_batch_size: 24}",
        "trainer: {type: custom, target: 'a.b:C', memory_budget: '500000000'}",
        "data: {source: {type: hub, name: x}, max_bad_rows: 3}",
        "trainer: {type: custom, target: 'a.b:C', options: {x: [1, {y: null}], 'no': yes}}",
        "prompt: {examples: [{a: 'no', b: 1}, {a: null, b: 2.5}], template: \"line\\n  {a}: 'q' #x\\n\"}",
    ],
)
def test_a_resolved_configuration_of_every_kind_loads_to_the_same_config(tail: str) -> None:
    trainer = "trainer: {type: finetune}\n" if tail.startswith("adapter") else ""
    loaded = load_config(TEXT + tail + "\n" + trainer)
    assert load_config(resolved_yaml(loaded)).config == loaded.config
    assert load_config(native_yaml(loaded.config)).config == loaded.config


def test_every_value_has_its_origin_as_a_comment(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(TEXT)
    lines = resolved_yaml(load_config(file, overrides=["seed=5"])).splitlines()
    results = {" ".join(line.split()) for line in lines}
    assert f"base_model: m # {file}:1" in results
    assert "seed: 5 # --set" in results
    assert "trust_remote_code: false # default" in results
    assert f"- name: b # {file}:3" in results


@examples(200)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**9), 10**9)
        | st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"])),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=5,
    )
)
def test_a_dumped_scalar_is_read_back(value: object) -> None:
    root, _ = read_yaml(f"a: {scalar(value)}\n", file=None)
    assert root.plain() == {"a": value}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", ["org/model", "./a folder: x", "scratch"])
@pytest.mark.parametrize("train", [True, False])
def test_every_template_is_a_valid_configuration(task: str, model: str, train: bool) -> None:
    loaded = load_config(template(task, model=model, data="rows/*.jsonl", train=train))
    trainer = {"pairs": "preference", "feedback": "kto"}.get(task, "finetune" if train else "none")
    assert loaded.config.trainer.type == trainer
    assert loaded.config.data.source == "rows/*.jsonl"
    assert loaded.warnings == ()
