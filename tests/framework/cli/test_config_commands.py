"""Tests of validate, schema, explain, convert and init on the command line."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from partita.cli.main import app
from partita_schema.convert import keys_page
from partita_schema.load import load_config
from partita_schema.reference import json_schema, markdown
from partita_schema.templates import TASKS

from ..conftest import Command

TEXT = "base_model: {type: scratch}\ninput_features: [{name: a}]\noutput_features: [{name: b, type: text}]\n"
LUDWIG = "model_type: llm\nbase_model: m\ninput_features: [{name: a, type: text, tied: null}]\n"
LUDWIG += "output_features: [{name: b, type: text}]\ntrainer: {type: finetune, train_steps: 5}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


def test_a_valid_configuration_is_summarized_in_one_line(
    file: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    override = ("--set", "trainer.type=finetune", "--set", "adapter={type: lora}")
    assert command("validate", file, *override) == 0
    assert capsys.readouterr().out == f"{file}: ok (finetune of scratch llama with lora; 1 input, 1 output)\n"


def test_wrong_configurations_exit_with_2_and_all_problems(
    file: Path, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(TEXT + "sede: 1\nadaptor: {type: lora}\ntrainer: {type: finetune}\n")
    assert command("validate", wrong, file, tmp_path / "none.yaml") == 2
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        f"{wrong}:4:1: sede: unknown key; did you mean seed?",
        f"{wrong}:5:1: adaptor: unknown key; did you mean adapter?",
        f"{tmp_path / 'none.yaml'}: there is no such file; YAML files there: run.yaml, wrong.yaml",
    ]
    assert shown.out == f"{file}: ok (zero-shot of scratch llama; 1 input, 1 output)\n"


def test_a_file_of_another_tool_names_the_command_that_converts_it(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sft.yaml").write_text("model_name_or_path: m\ndataset_name: d\nuse_peft: true\nlora_r: 8\n")
    assert command("validate", "sft.yaml") == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first == (
        "sft.yaml: looks like a file of another tool; to convert it: partita convert sft.yaml --from trl --output "
        "sft-converted.yaml"
    )
    assert sum(": unknown key" in line for line in others) == 4
    Path("typos.yaml").write_text(TEXT + "use_peft: 1\nsede: 1\nadaptor: 1\n")
    assert command("validate", "typos.yaml") == 2
    assert "convert" not in capsys.readouterr().err


def test_warnings_of_a_ludwig_file_are_shown(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ludwig.yaml"
    file.write_text(LUDWIG)
    assert command("validate", file) == 0
    assert capsys.readouterr().err == (
        f"warning: {file}:3:40: input_features[0].tied: has no effect here: it belongs to tabular models\n"
    )


HEAVY = {"torch", "transformers", "pandas", "numpy", "marshmallow", "jsonschema", "jinja2"}
FOR_MISTAKES = {
    f"partita_schema.{name}"
    for name in ("problems.repair", "problems.explain", "schema_tree", "problems.unknown_key", "problems.wrong_value")
}
FOR_OTHER_FILES = {
    f"partita_schema.{name}" for name in ("compat.ludwig", "dump", "reference", "rows", "yaml.syntax_errors")
}


def loaded_by(*arguments: str) -> tuple[str, set[str]]:
    """Return the standard output of the command, and the modules that it loads in a new process."""
    code = (
        "import sys; sys.argv = ['partita', *sys.argv[1:]]; from partita.cli.main import run\n"
        "try: run()\nexcept SystemExit: pass\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    *printed, modules = done.stdout.splitlines()
    return "\n".join(printed), set(modules.split())


def test_validate_loads_no_heavy_library_and_no_error_modules_for_a_valid_configuration(file: Path) -> None:
    printed, modules = loaded_by("validate", str(file))
    assert printed.endswith("ok (zero-shot of scratch llama; 1 input, 1 output)")
    assert modules & (HEAVY | FOR_MISTAKES | FOR_OTHER_FILES | {"rich"}) == set()


def test_validate_loads_error_modules_at_the_first_error(file: Path) -> None:
    file.write_text(file.read_text() + "sead: 1\n")
    modules = loaded_by("validate", str(file))[1]
    assert modules >= FOR_MISTAKES
    assert modules & HEAVY == set()


def test_a_run_that_does_not_exist_is_an_error_before_libraries_are_loaded(tmp_path: Path) -> None:
    printed, modules = loaded_by("serve", str(tmp_path / "missing"))
    assert not printed
    assert modules & (HEAVY - {"marshmallow"}) == set()


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_no_schema(option: str) -> None:
    printed, modules = loaded_by(option)
    assert printed
    assert modules & (HEAVY | {"partita_schema.config", "partita_schema.load"}) == set()


def test_schema_prints_the_json_schema_or_the_reference() -> None:
    assert json.loads(CliRunner().invoke(app, ["schema"]).stdout) == json_schema()
    assert CliRunner().invoke(app, ["schema", "--markdown"]).stdout == markdown()


def test_explain_shows_written_and_derived_values_and_counts_the_rest(file: Path) -> None:
    overrides = ["seed=9", "trainer.type=finetune", "trainer.epochs=2"]
    flags = [f"--set={one}" for one in overrides]
    text = CliRunner().invoke(app, ["explain", str(file), *flags]).stdout
    assert load_config(text).config == load_config(TEXT, overrides=overrides).config
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert {"seed: 9 # --set", "epochs: 2.0 # --set", f"type: scratch # {file}:1", "batch_size: auto # default"} <= {
        *lines
    }
    assert not [line for line in lines if line.endswith("# default") and ": auto" not in line]
    everything = CliRunner().invoke(app, ["explain", str(file), "--all", *flags]).stdout
    origins = [count.count("  # ") for count in (everything, text)]
    assert f"# {origins[0] - origins[1]:,} more values are defaults: partita explain {file} --all" in lines
    assert origins[1] < 30 < origins[0]


def test_explain_all_shows_every_value_with_its_origin(file: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["explain", str(file), "--all", "--set", "seed=9"]).stdout
    assert load_config(shown).config == load_config(TEXT, overrides=["seed=9"]).config
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "seed: 9 # --set" in lines
    assert f"type: scratch # {file}:1" in lines


@pytest.fixture
def two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(TEXT)
    Path("more.yaml").write_text("seed: 5\ntrainer: {type: finetune}\n")


@pytest.mark.usefixtures("two_files")
def test_several_files_are_merged_and_the_last_one_wins(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("explain", "base.yaml", "more.yaml", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["config"]["seed"], shown["origins"]["seed"]) == (5, "more.yaml:1")
    assert shown["origins"]["base_model.type"] == "base.yaml:1"
    assert (shown["file"], shown["files"]) == ("more.yaml", ["base.yaml", "more.yaml"])
    assert command("explain", "base.yaml", "more.yaml") == 0
    assert "more values are defaults: partita explain base.yaml more.yaml --all" in capsys.readouterr().out


@pytest.mark.usefixtures("two_files")
def test_validate_checks_several_files_one_by_one_or_merged(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("validate", "base.yaml", "more.yaml") == 2
    shown = capsys.readouterr()
    assert shown.out == "base.yaml: ok (zero-shot of scratch llama; 1 input, 1 output)\n"
    assert shown.err.startswith("more.yaml:1:1: base_model: is missing")
    assert command("validate", "--merge", "base.yaml", "more.yaml") == 0
    assert capsys.readouterr().out == "base.yaml more.yaml: ok (finetune of scratch llama; 1 input, 1 output)\n"


@pytest.mark.usefixtures("two_files")
@pytest.mark.parametrize("verb", ["predict --dataset r.csv --output o.csv", "evaluate", "simulate", "tune"])
def test_a_run_cannot_be_merged_with_files(verb: str, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    name, *options = verb.split()
    assert command(name, "run", "base.yaml", *options) == 2
    assert capsys.readouterr().err == (
        "run: is a folder, and only YAML files can be merged; name it alone, and change its values with --set\n"
    )


def test_explain_prints_json(file: Path) -> None:
    shown = json.loads(CliRunner().invoke(app, ["explain", str(file), "--json"]).stdout)
    assert shown["file"] == str(file)
    assert shown["config"]["base_model"]["size"] == "tiny"
    assert shown["origins"]["base_model.size"] == "default"
    assert shown["origins"]["base_model.type"] == f"{file}:1"
    assert shown["warnings"] == []


def test_convert_writes_the_native_form_once(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    ludwig, native = tmp_path / "ludwig.yaml", tmp_path / "native.yaml"
    ludwig.write_text(LUDWIG)
    assert command("convert", ludwig, "-o", native) == 0
    assert load_config(native).config.model_dump(exclude={"model_type"})["trainer"]["max_steps"] == 5
    assert "model_type" not in native.read_text()
    assert command("convert", ludwig, "-o", native) == 2
    assert f"error: {native} exists; remove it or write another name after --output" in capsys.readouterr().err


AXOLOTL = """\
base_model: org/base
datasets: [{path: rows.jsonl, type: alpaca}]
micro_batch_size: 2
learning_rate: 1e-4
flash_attn_rms_norm: true
lora_r:
gptq: true
"""


def test_convert_lists_what_maps_and_what_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("axolotl.yml").write_text(AXOLOTL)
    Path("rows.jsonl").touch()
    Path("runs").mkdir()
    assert command("convert", "--from", "axolotl", "axolotl.yml", "-o", "runs/run.yaml") == 0
    shown = capsys.readouterr()
    assert shown.out == "wrote runs/run.yaml\n"
    lines = shown.err.splitlines()
    assert lines[0] == "6 keys mapped, 1 without a counterpart, 1 not needed, 1 empty or off"
    assert {
        "  micro_batch_size -> trainer.batch_size",
        "  num_epochs -> trainer.epochs: 1",
        "  flash_attn_rms_norm: kernels change the speed, not the result",
        "empty or off: lora_r",
        (
            "  axolotl.yml:7:1: gptq: weights are quantized by bitsandbytes; name the model before its quantization, "
            "and load_in_4bit"
        ),
    } <= set(lines)
    text = Path("runs/run.yaml").read_text()
    assert text.startswith("# Converted from the axolotl file axolotl.yml\nversion: 1\nbase_model: org/base\n")
    assert load_config("runs/run.yaml").config.data.source == "../rows.jsonl"
    assert command("validate", "runs/run.yaml") == 0


def test_convert_names_the_tool_of_a_file_that_is_not_ludwigs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("axolotl.yml").write_text(AXOLOTL)
    assert command("convert", "axolotl.yml") == 2
    assert capsys.readouterr().err == ("axolotl.yml: is no file of Ludwig; it looks like a file for --from axolotl\n")
    assert command("convert") == 2
    assert "write the file to convert" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tool", "title", "key"),
    [
        ("ludwig", "Ludwig", "base_model"),
        ("axolotl", "axolotl", "base_model"),
        ("llama_factory", "LLaMA-Factory", "model_name_or_path"),
        ("trl", "TRL", "model_name_or_path"),
    ],
)
def test_an_empty_file_cannot_be_converted(
    tool: str,
    title: str,
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yml").write_text("# nothing yet\n")
    assert command("convert", "--from", tool, "run.yml") == 2
    assert capsys.readouterr().err == (
        f"run.yml:1:1: the file is empty, so there is nothing to convert; give a file of {title}, which has at least "
        f"{key}\n"
    )


def test_convert_prints_the_keys_of_the_tools(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("convert", "--keys") == 0
    assert capsys.readouterr().out == keys_page()


def test_init_names_a_folder_and_not_the_file(
    tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("init", tmp_path / "mine.yaml", "--task", "chat", "--model", "scratch") == 2
    said = "mine.yaml is the name of a file; name the folder in which to write run.yaml, such as mine"
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.parametrize("task", TASKS)
def test_init_writes_a_valid_file_for_every_task(
    task: str, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    assert command("init", folder, "--task", task, "--model", "scratch") == 0
    config = load_config(folder / "run.yaml").config
    assert config.trainer.type == {"pairs": "preference", "feedback": "kto"}.get(task, "finetune")
    assert config.generation.max_new_tokens is None, "the limit is derived from the outputs"
    assert command("init", folder, "--task", task) == 2
    assert f"error: {folder / 'run.yaml'} exists; remove it or name another folder" in capsys.readouterr().err


def test_init_without_a_terminal_uses_defaults(tmp_path: Path, command: Command) -> None:
    assert command("init", tmp_path, "--zero-shot") == 0
    config = load_config(tmp_path / "run.yaml").config
    assert (config.trainer.type, config.base_model) == ("none", "meta-llama/Llama-3.2-1B-Instruct")


@pytest.mark.parametrize("task", ["pairs", "feedback"])
def test_init_writes_no_zero_shot_file_for_tasks_of_training(
    task: str, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("init", tmp_path, "--task", task, "--zero-shot") == 2
    message = f"--zero-shot: the task {task} learns from answers; write --train, or --task answer"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run.yaml").exists()


def test_init_writes_a_path_relative_to_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("text,label\na,b\n")
    words = ("init", "sub", "--task", "classify", "--model", "scratch", "--data", "rows.csv")
    assert command(*words) == 0
    assert load_config(Path("sub/run.yaml")).config.data.source == "../rows.csv"
    words = ("init", "my sub", "--task", "classify", "--model", "scratch", "--data", "*.csv")
    capsys.readouterr()
    assert command(*words) == 0
    assert load_config(Path("my sub/run.yaml")).config.data.source == "../*.csv"
    assert capsys.readouterr().out.endswith("next: partita validate 'my sub/run.yaml'\n")
    assert command("init", "rows.csv", "--model", "scratch") == 1
    assert capsys.readouterr().err == "error: the folder rows.csv cannot be created: File exists; name another one\n"


def test_init_proposes_the_columns_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{number},message number {number},{'ab'[number % 2]}\n" for number in range(20))
    (tmp_path / "rows.csv").write_text(f"id,message,team\n{rows}")
    assert command("init", "new", "--model", "scratch", "--data", "rows.csv") == 0
    assert capsys.readouterr().out == (
        "rows.csv: input message, output team (category, 2 labels); not used: id\n"
        "wrote new/run.yaml; next: partita validate new/run.yaml\n"
    )
    config = load_config(Path("new/run.yaml")).config
    assert [one.name for one in config.input_features] == ["message"]
    assert (config.output_features[0].name, config.output_features[0].type) == ("team", "category")
    words = ("init", "other", "--model", "scratch", "--data", "rows.csv", "--task", "extract")
    assert command(*words) == 0
    assert capsys.readouterr().out.startswith(
        "rows.csv: its columns (id, message, team) do not fit the task extract; replace the example features in "
        "other/run.yaml\n"
    )
    (tmp_path / "broken.parquet").write_text("no parquet")
    assert command("init", "third", "--data", "broken.parquet") == 2
    assert capsys.readouterr().err.startswith("error: broken.parquet cannot be read as parquet: ")


def test_init_refuses_rows_that_do_not_exist_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "nope.csv"):
        assert command("init", "new", "--model", "scratch", "--data", name) == 2
        assert capsys.readouterr().err == f"error: {name} does not exist in {tmp_path}\n"
    assert not (tmp_path / "new").exists()


def test_init_refuses_a_csv_whose_delimiter_is_unclear_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("text;label\nyes, please\nno\n")
    assert command("init", "new", "--model", "scratch", "--data", "rows.csv") == 2
    assert capsys.readouterr().err == (
        "error: rows.csv has a single column, 'text;label'; its delimiter may be ';', but the rows do not have as many "
        "cells as the header; write its delimiter at the source, such as delimiter: ','\n"
    )
    assert not (tmp_path / "new").exists()


def test_init_warns_about_an_output_with_the_same_value_in_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("text,label\nyes,a\nno,a\nwell,a\n")
    assert command("init", "new", "--model", "scratch", "--data", "rows.csv") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("rows.csv: input text, output label (category, 1 label)\n")
    assert printed.err == (
        "warning: rows.csv: the output label is 'a' in all rows, so there is nothing to learn; name another output "
        "column, or use rows with different answers\n"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("folder", "folder is a folder, so its columns are not known; replace the example features in new/run.yaml\n"),
        ("own/rows", "own/rows is no file on this machine, so its columns are not known; replace the example features"),
        ("none.json", "none.json: it has no columns that fit the task answer; replace the example features in new/"),
    ],
)
def test_init_says_if_it_proposes_nothing(
    data: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "none.json").write_text("[{}, {}]")
    assert command("init", "new", "--model", "scratch", "--data", data) == 0
    assert capsys.readouterr().out.startswith(message)


def test_init_warns_about_a_single_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("text,label\nyes,a\n")
    assert command("init", "new", "--model", "scratch", "--data", "rows.csv") == 0
    assert capsys.readouterr().err == (
        "warning: rows.csv: it has one row, so types and labels are guesses; check them\n"
    )


def test_the_version_is_printed(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--version") == 0
    assert capsys.readouterr().out == f"partita {version('partita')}\n"


def test_a_shell_completes_commands_and_options() -> None:
    command = str(Path(sys.executable).with_name("partita"))

    def completed(words: str) -> list[str]:
        environment = os.environ | {
            "_PARTITA_COMPLETE": "complete_bash",
            "COMP_WORDS": f"partita {words}",
            "COMP_CWORD": str(len(words.split())),
        }
        return subprocess.run([command], env=environment, capture_output=True, text=True, check=True).stdout.split()

    assert completed("pre") == ["preview", "predict"]
    assert completed("predict --dat") == ["--dataset"]


def test_init_lists_the_tasks(tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("init", tmp_path, "--task", "paint") == 2
    assert capsys.readouterr().err == (
        "--task: got paint; write one of classify, tag, extract, answer, score, chat, entities, continue, pairs, "
        "feedback\n"
    )
