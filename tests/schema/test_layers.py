"""Tests of configurations of several files: `extends`, and several sources that are merged."""

import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from partita_schema.errors import ConfigError
from partita_schema.layers import MAX_FILES
from partita_schema.load import LoadedConfig, load_config
from partita_schema.reference import json_schema
from partita_schema.sections.adapter import LoraAdapter
from partita_schema.sections.trainer import FinetuneTrainer

from .refusals import message_of

BASE = """\
base_model: m
input_features: [{name: a}]
output_features: [{name: b, type: text}]
trainer:
  type: finetune
  epochs: 3
  learning_rate: 1.0e-4
  optimizer: {type: adamw, betas: [0.9, 0.95]}
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


def load(text: str, name: str = "run.yaml") -> LoadedConfig:
    write(name, text)
    return load_config(name)


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def finetune(loaded: LoadedConfig) -> FinetuneTrainer:
    assert isinstance(loaded.config.trainer, FinetuneTrainer)
    return loaded.config.trainer


def problem_of(text: str, name: str = "run.yaml") -> str:
    write(name, text)
    return message_of(Path(name))


@pytest.mark.usefixtures("files")
def test_a_file_is_merged_over_the_one_that_it_extends_and_each_value_has_its_line() -> None:
    loaded = load("extends: base.yaml\nseed: 7\ntrainer:\n  epochs: 1\n")

    trainer = finetune(loaded)
    assert (loaded.config.seed, trainer.epochs, trainer.learning_rate) == (7, 1, 1e-4)
    assert loaded.origins["trainer.epochs"] == "run.yaml:4"
    assert loaded.origins["trainer.learning_rate"] == "base.yaml:7"
    assert loaded.origins["base_model"] == "base.yaml:1"
    assert loaded.origins["trainer.batch_size"] == "default"
    assert (loaded.file, loaded.files) == ("run.yaml", ("base.yaml", "run.yaml"))


@pytest.mark.usefixtures("files")
def test_lists_and_values_replace_and_null_switches_off() -> None:
    write("more.yaml", "extends: base.yaml\nadapter: {type: lora}\ngeneration: {stop: [x, y]}\n")
    loaded = load("extends: more.yaml\ninput_features: [{name: c}]\nadapter: null\ngeneration: {stop: [z]}\n")
    assert [feature.name for feature in loaded.config.input_features] == ["c"]
    assert loaded.config.adapter is None
    assert loaded.config.generation.stop == ("z",)


@pytest.mark.usefixtures("files")
def test_a_section_with_another_type_replaces_the_one_of_the_base() -> None:
    adafactor = finetune(load("extends: base.yaml\ntrainer: {optimizer: {type: adafactor}}\n"))
    assert (adafactor.optimizer.type, adafactor.optimizer.betas, adafactor.epochs) == ("adafactor", None, 3)
    assert load("extends: base.yaml\ntrainer: {type: none}\n").config.trainer.type == "none"
    same = finetune(load("extends: base.yaml\ntrainer: {optimizer: {type: adamw, eps: 1e-6}}\n"))
    assert (same.optimizer.betas, same.optimizer.eps) == ((0.9, 0.95), 1e-6)
    scratch = load("extends: base.yaml\nbase_model: {type: scratch, size: nano}\n").config.base_model
    assert scratch.size == "nano"  # type: ignore[union-attr]


@pytest.mark.usefixtures("files")
def test_a_type_from_a_variable_is_compared_by_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIND", "adamw")
    text = "extends: base.yaml\ntrainer: {optimizer: {type: '${KIND}', weight_decay: 0.1}}\n"
    assert finetune(load(text)).optimizer.betas == (0.9, 0.95)
    monkeypatch.setenv("KIND", "adafactor")
    assert finetune(load(text)).optimizer.betas is None


@pytest.mark.usefixtures("files")
def test_several_files_are_merged_in_their_order_and_each_is_complete_by_itself() -> None:
    write("lora.yaml", "adapter: {type: lora, r: 4}\nseed: 1\n")
    write("dora.yaml", "adapter: {use_dora: true}\nseed: 2\n")
    loaded = load("extends: [base.yaml, lora.yaml, dora.yaml]\nadapter: {alpha: 9}\n")
    adapter = loaded.config.adapter
    assert isinstance(adapter, LoraAdapter)
    assert (adapter.r, adapter.use_dora, adapter.alpha, loaded.config.seed) == (4, True, 9, 2)
    assert loaded.files == ("base.yaml", "lora.yaml", "dora.yaml", "run.yaml")

    together = load_config(["base.yaml", Path("lora.yaml"), "dora.yaml", "adapter: {alpha: 9}\n"])
    assert together.config == loaded.config
    assert together.file == "dora.yaml"


@pytest.mark.usefixtures("files")
def test_a_dictionary_extends_files_and_is_merged_over_files() -> None:
    extended = load_config({"extends": Path("base.yaml"), "trainer": {"epochs": 1}})
    over = load_config(["base.yaml", {"trainer": {"epochs": 1}}])
    assert finetune(extended).epochs == finetune(over).epochs == 1
    assert extended.config == over.config
    assert (extended.file, over.file) == (None, "base.yaml")
    assert over.origins["trainer.epochs"] == "given"
    assert load_config([load_config("base.yaml").config, {"seed": 3}]).config.seed == 3


@pytest.mark.usefixtures("files")
def test_the_name_of_a_base_is_relative_to_the_file_and_may_have_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    write("sub/middle.yaml", "extends: ../${NAME}.yaml\nseed: 5\n")
    monkeypatch.setenv("NAME", "base")
    loaded = load("extends: ../sub/middle.yaml\n", "runs/run.yaml")
    assert loaded.files == ("base.yaml", "sub/middle.yaml", "runs/run.yaml")
    assert loaded.config.seed == 5


@pytest.mark.usefixtures("files")
def test_overrides_apply_to_the_merged_values_and_spare_variables_of_the_base() -> None:
    write("variables.yaml", "extends: base.yaml\nseed: ${NOT_SET_ANYWHERE}\nprompt: {task: '${ALSO_NOT_SET}'}\n")
    write("run.yaml", "extends: variables.yaml\nprompt: {task: Say it.}\n")
    loaded = load_config("run.yaml", overrides=["seed=4", "trainer.optimizer.eps=1e-7"])
    assert (loaded.config.seed, loaded.config.prompt.task) == (4, "Say it.")
    assert finetune(loaded).optimizer.betas == (0.9, 0.95)
    assert message_of(Path("run.yaml")).startswith(
        "variables.yaml:2:7: seed: the environment variable NOT_SET_ANYWHERE"
    )


@pytest.mark.usefixtures("files")
def test_mistakes_in_all_files_are_reported_at_their_lines_the_main_file_first() -> None:
    write("wrong.yaml", "extends: base.yaml\nseed: 1\nseed: 2\ntrainer: {epohcs: 2}\n")
    assert problem_of(
        "extends: wrong.yaml\nseed: x\ngeneration: {stpo: [a]}\ntrainer: {batch_sise: 8}\n"
    ).splitlines() == [
        "run.yaml:2:7: seed: write an integer from 0 to 4294967295; got x",
        "run.yaml:3:14: generation.stpo: unknown key; did you mean stop?",
        "run.yaml:4:11: trainer.batch_sise: unknown key; did you mean batch_size?",
        "wrong.yaml:3:1: seed: the key occurs twice, first in line 2; keep one",
        "wrong.yaml:4:11: trainer.epohcs: unknown key; did you mean epochs?",
    ]


@pytest.mark.usefixtures("files")
def test_what_is_missing_is_reported_in_the_main_file() -> None:
    write("part.yaml", "base_model: m\n")
    assert problem_of("# A comment.\nextends: part.yaml\nseed: 1\n").startswith(
        "run.yaml:2:1: output_features: is missing"
    )
    assert message_of(["part.yaml", {"seed": 1}]).startswith("part.yaml:1:1: output_features: is missing")


@pytest.mark.usefixtures("files")
def test_yaml_errors_of_a_base_are_reported_in_its_file() -> None:
    write("broken.yaml", "seed: 1\n\ttrainer: {\n")
    assert problem_of("extends: broken.yaml\n").startswith("broken.yaml:2:1: there is a tab in the indentation")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("bsae.yaml", "run.yaml:1:10: extends: there is no file bsae.yaml; did you mean base.yaml?"),
        ("no/base.yaml", "run.yaml:1:10: extends: there is no file no/base.yaml; there is no folder no"),
        (
            "[base.yaml, ./x.yaml]",
            "run.yaml:1:22: extends: there is no file x.yaml; YAML files there: base.yaml, run.yaml",
        ),
        ("folder", "run.yaml:1:10: extends: folder is a folder; write the YAML file in it: a.yaml"),
        (
            "https://host/base.yaml",
            "run.yaml:1:10: extends: is an address; download the file and write its path",
        ),
        (
            "run.yaml",
            "run.yaml:1:10: extends: a file cannot extend itself: run.yaml extends run.yaml; remove one of them",
        ),
        (
            "folder/a.yaml",
            (
                "folder/a.yaml:2:3: extends: a file cannot extend itself: run.yaml extends folder/a.yaml extends "
                "run.yaml; remove one of them"
            ),
        ),
        ("5", "run.yaml:1:10: extends: write the path of a YAML file, or a list of paths; got 5"),
        ("", "run.yaml:1:9: extends: write the path of a YAML file, or a list of paths; got nothing"),
        ("{file: a}", "run.yaml:1:10: extends: write the path of a YAML file, or a list of paths; got a mapping"),
        ("[[a]]", "run.yaml:1:11: extends: write the path of a YAML file, or a list of paths; got a list"),
        ("[]", "run.yaml:1:10: extends: the list is empty; write the path of a YAML file, or remove the key"),
        (
            "${NOT_SET_ANYWHERE}.yaml",
            (
                "run.yaml:1:10: extends: the environment variable NOT_SET_ANYWHERE is not set; run "
                "`export NOT_SET_ANYWHERE=...` first, or write ${NOT_SET_ANYWHERE:-default}, or $${NOT_SET_ANYWHERE} "
                "for the text itself"
            ),
        ),
    ],
)
def test_a_wrong_value_of_extends_is_reported_at_its_line(written: str, message: str) -> None:
    write("folder/a.yaml", "extends:\n- ../run.yaml\n")
    assert problem_of(f"extends: {written}\n") == message


@pytest.mark.usefixtures("files")
def test_a_base_may_be_reached_twice_but_not_without_end() -> None:
    write("left.yaml", "extends: base.yaml\nseed: 1\n")
    write("right.yaml", "extends: base.yaml\ntrainer: {epochs: 9}\n")
    loaded = load("extends: [left.yaml, right.yaml]\n")
    assert (loaded.config.seed, finetune(loaded).epochs) == (1, 9)
    for number in range(12):
        write(f"bomb{number}.yaml", f"extends: [bomb{number + 1}.yaml, bomb{number + 1}.yaml]\n")
    write("bomb12.yaml", BASE)
    assert message_of(Path("bomb0.yaml")).endswith(
        f"extends: more than {MAX_FILES} files are extended, repetitions counted; extend fewer"
    )


@pytest.mark.usefixtures("files")
def test_extends_elsewhere_and_names_of_other_tools_are_answered() -> None:
    assert "trainer.extends: unknown key; write extends at the top of the file" in problem_of(
        BASE + "  extends: base.yaml\n"
    )
    assert "_base_: unknown key; write extends" in problem_of(BASE + "_base_: base.yaml\n")
    assert message_of(Path("base.yaml"), overrides=["extends=run.yaml"]) == (
        "--set extends=run.yaml: extends: unknown key; files are merged before values are set; name both files "
        "instead: base.yaml run.yaml"
    )


@pytest.mark.parametrize("source", [[], 5, ["base.yaml", 5], [["base.yaml"]], b"base.yaml"])
def test_a_source_of_another_type_is_refused(source: object, files: Path) -> None:
    wrong = repr(source[-1] if isinstance(source, list) and source else source)
    assert message_of(source) == (
        f"the configuration is {wrong}; write a path, YAML text, a dictionary, a Config, or a list of them"
    )


@pytest.mark.usefixtures("files")
def test_the_text_of_a_merged_configuration_is_one_file_with_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHS", "2")
    monkeypatch.setenv("TASK", "no")
    loaded = load(
        "extends: base.yaml\ntrainer:\n  epochs: ${EPOCHS}\n"
        'prompt:\n  task: "${TASK}"\n  system: |\n    One.\n    Two.\n'
    )
    assert loaded.text is not None
    assert loaded.text.startswith("# Merged from base.yaml, run.yaml\nbase_model: m\n")
    assert "epochs: ${EPOCHS}\n" in loaded.text
    assert 'task: "${TASK}"\n' in loaded.text
    assert "system: |\n    One.\n    Two.\n" in loaded.text
    assert load_config(loaded.text).config == loaded.config
    given = load_config(["base.yaml", {"prompt": {"task": "${TASK}"}}])
    assert given.config.prompt.task == "${TASK}"
    assert load_config(str(given.text)).config == given.config


@pytest.mark.usefixtures("files")
def test_the_text_of_a_single_file_is_kept_as_written() -> None:
    assert load_config("base.yaml").text == BASE
    assert load_config(["base.yaml"]).text == BASE
    assert load_config({"extends": "base.yaml"}).text != BASE


LUDWIG = """\
model_type: llm
base_model: m
adapter: lora
input_features: [{name: a, type: text}]
output_features: [{name: b, type: text}]
trainer: {type: finetune, train_steps: 100, enable_gradient_checkpointing: true}
"""


@pytest.mark.usefixtures("files")
def test_a_ludwig_file_can_be_extended_with_the_keys_of_either_tool() -> None:
    write("ludwig.yaml", LUDWIG)
    ours = load("extends: ludwig.yaml\nadapter: {r: 4}\ntrainer: {max_steps: 5}\n")
    theirs = load("extends: ludwig.yaml\nadapter: {r: 4}\ntrainer: {train_steps: 5}\n")
    for loaded in (ours, theirs):
        assert isinstance(loaded.config.adapter, LoraAdapter)
        assert (loaded.config.adapter.r, finetune(loaded).max_steps) == (4, 5)
        assert finetune(loaded).gradient_checkpointing
        assert loaded.warnings == ()
    assert theirs.origins["trainer.max_steps"] == "ludwig: trainer.train_steps (run.yaml:3)"
    assert load("extends: ludwig.yaml\nadapter: null\n").config.adapter is None


@pytest.mark.usefixtures("files")
def test_warnings_about_a_ludwig_base_have_its_line() -> None:
    write("ludwig.yaml", LUDWIG + "hyperopt: {goal: minimize}\n")
    assert [str(one) for one in load("extends: ludwig.yaml\n").warnings] == [
        "ludwig.yaml:7:1: hyperopt: has no effect here: it has no parameters"
    ]


def test_the_json_schema_requires_no_keys_of_a_file_that_extends_another() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    assert not list(validator.iter_errors({"extends": "base.yaml", "seed": 1}))
    assert not list(validator.iter_errors({"extends": ["a.yaml", "b.yaml"]}))
    assert not list(validator.iter_errors(yaml.safe_load(BASE)))
    for wrong in ({"seed": 1}, {"extends": 5}, {"extends": []}):
        assert list(validator.iter_errors(wrong))


def test_a_single_file_loads_no_module_for_merging(files: Path) -> None:
    code = (
        "import sys; from partita_schema.load import load_config; load_config('base.yaml'); "
        "print([name for name in sys.modules if name.endswith(('.merge', '.relative_paths', '.ludwig_layers'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=files)
    assert done.stdout == "[]\n"


def test_a_base_behind_a_symbolic_link_is_found(files: Path) -> None:
    write("far/away/run.yaml", "extends: ../base.yaml\n")
    write("far/base.yaml", BASE)
    (files / "link").symlink_to("far/away")
    assert load_config("link/run.yaml").files == ("link/../base.yaml", "link/run.yaml")


def test_a_base_that_cannot_be_read_is_reported(files: Path) -> None:
    (files / "utf.yaml").write_bytes(b"a: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"^utf.yaml:1: byte 0xe9 is not UTF-8; save the file as UTF-8$"):
        load("extends: utf.yaml\n")
