"""Tests of relative paths in files that are extended: they are relative to the file that they stand in."""

from pathlib import Path

import pytest

from partita_schema.load import load_config
from partita_schema.sections.agents import ModelAgentConfig
from partita_schema.sections.sources import FileSource
from partita_schema.sections.sweep import SearchSpace

BASE = """\
base_model: m
input_features: [{name: a}]
output_features: [{name: b, type: text}]
"""


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("configs/models/small", "configs/rows", "exp"):
        Path(folder).mkdir(parents=True)
    Path("exp/run.yaml").write_text("extends: ../configs/base.yaml\n")


def source_of(written: str) -> object:
    """Return what the main file reads for a `data.source` of the file that it extends."""
    Path("configs/base.yaml").write_text(f"{BASE}data: {{source: {written}}}\n")
    return load_config("exp/run.yaml").config.data.source


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("rows.csv", "../configs/rows.csv"),
        ("../rows.jsonl.gz", "../rows.jsonl.gz"),
        ("../other/rows.csv", "../other/rows.csv"),
        ("'part-*.parquet'", "../configs/part-*.parquet"),
        ("rows", "../configs/rows"),
        ("./anything", "../configs/anything"),
        ("../exp/rows.csv", "rows.csv"),
        ("owner/dataset", "owner/dataset"),
        ("/data/rows.csv", "/data/rows.csv"),
        ("~/rows.csv", "~/rows.csv"),
        ("s3://bucket/rows.csv", "s3://bucket/rows.csv"),
    ],
)
def test_a_path_of_the_base_is_relative_to_the_base(written: str, read: str) -> None:
    assert source_of(written) == read


def test_paths_of_sources_models_and_agents_are_rewritten() -> None:
    Path("configs/base.yaml").write_text(
        """\
base_model: models/small
input_features: [{name: a, type: dialogue}]
output_features: [{name: b, type: text}]
data:
  mix: [{source: {type: csv, path: one.csv}}, {source: two.csv}]
  validation: {type: jsonl, path: valid.jsonl}
simulation:
  world: {type: user_sim}
  max_turns: 4
  agents: {user: {type: model, file: user.yaml, prompt: You ask.}}
  tasks: {source: tasks.jsonl}
"""
    )
    config = load_config("exp/run.yaml").config
    assert config.base_model == "../configs/models/small"
    assert config.data.mix is not None
    one, two = (part.source for part in config.data.mix)
    assert isinstance(one, FileSource)
    assert isinstance(config.data.validation, FileSource)
    assert (one.path, two, config.data.validation.path) == (
        "../configs/one.csv",
        "../configs/two.csv",
        "../configs/valid.jsonl",
    )
    assert config.simulation is not None
    user = config.simulation.agents.user
    assert isinstance(user, ModelAgentConfig)
    assert (user.file, config.simulation.tasks.source) == ("../configs/user.yaml", "../configs/tasks.jsonl")


def test_paths_among_the_values_of_a_sweep_are_relative_to_the_file_that_has_them() -> None:
    Path("configs/base.yaml").write_text(
        f"""{BASE}data: {{source: rows.csv, mix: null}}
trainer: {{type: finetune}}
sweep:
  parameters:
    base_model: [models/small, owner/model]
    data.source: {{choice: [one.csv, {{type: csv, path: two.csv}}]}}
    adapter: [{{type: lora, pretrained_adapter_weights: ./lora}}, null]
    trainer.epochs: [1, 2]
"""
    )
    Path("exp/run.yaml").write_text(
        "extends: ../configs/base.yaml\nsweep: {parameters: {data.validation: [valid.csv]}}\n"
    )
    sweep = load_config("exp/run.yaml").config.sweep
    assert sweep is not None
    source = sweep.parameters["data.source"]
    assert isinstance(source, SearchSpace)
    assert source.choice == ("../configs/one.csv", {"type": "csv", "path": "../configs/two.csv"})
    assert {key: value for key, value in sweep.parameters.items() if key != "data.source"} == {
        "base_model": ("../configs/models/small", "owner/model"),
        "adapter": ({"type": "lora", "pretrained_adapter_weights": "../configs/lora"}, None),
        "trainer.epochs": (1, 2),
        "data.validation": ("valid.csv",),
    }


def test_paths_of_reward_models_are_relative_to_the_file_that_has_them() -> None:
    checker = "{type: reward, model: ./rm}"
    Path("configs/base.yaml").write_text(
        "base_model: base\ninput_features: [{name: a, type: dialogue}]\noutput_features: [{name: b, type: text}]\n"
        "generation: {do_sample: true, best_of: 2, reward: ./rm}\n"
        f"simulation: {{world: {{type: replay}}, tasks: {{source: talks.jsonl}}, checker: {checker}}}\n"
    )
    Path("exp/run.yaml").write_text("extends: ../configs/base.yaml\nseed: 2\n")
    config = load_config("exp/run.yaml").config
    assert config.simulation is not None
    assert config.simulation.checker is not None
    assert (config.generation.reward, config.simulation.checker.model) == ("../configs/rm", "../configs/rm")


def test_paths_of_the_main_file_overrides_and_dictionaries_stay_as_they_are() -> None:
    Path("configs/base.yaml").write_text(f"{BASE}data: {{source: rows.csv, validation: valid.csv}}\n")
    Path("exp/run.yaml").write_text("extends: ../configs/base.yaml\ndata: {source: mine.csv}\n")
    data = load_config("exp/run.yaml", overrides=["data.test=test.csv"]).config.data
    assert (data.source, data.validation, data.test) == ("mine.csv", "../configs/valid.csv", "test.csv")
    over = load_config(["configs/base.yaml", {"data": {"test": "rows"}}]).config.data
    assert (over.source, over.test) == ("rows.csv", "rows")
    extended = load_config({"extends": "configs/base.yaml", "data": {"test": "t.csv"}})
    assert (extended.folder, extended.config.data.source, extended.config.data.test) == (
        Path(),
        "configs/rows.csv",
        "t.csv",
    )


def test_the_last_of_several_files_is_the_base_of_relative_paths() -> None:
    Path("configs/base.yaml").write_text(f"{BASE}data: {{source: rows.csv}}\n")
    Path("exp/more.yaml").write_text("data: {validation: valid.csv}\n")
    loaded = load_config(["configs/base.yaml", "exp/more.yaml"])
    assert (loaded.folder, loaded.config.data.source, loaded.config.data.validation) == (
        Path("exp"),
        "../configs/rows.csv",
        "valid.csv",
    )


def test_a_path_behind_a_symbolic_link_names_the_same_file() -> None:
    Path("real/deep").mkdir(parents=True)
    Path("link").symlink_to("real/deep")
    Path("configs/base.yaml").write_text(f"{BASE}data: {{source: rows.csv}}\n")
    Path("configs/rows.csv").touch()
    Path("link/run.yaml").write_text("extends: ../../configs/base.yaml\n")
    loaded = load_config("link/run.yaml")
    assert (loaded.folder / str(loaded.config.data.source)).samefile("configs/rows.csv")
