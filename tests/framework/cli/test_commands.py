"""Tests of the `partita` command: exit status, output, files, and what goes to which stream."""

import json
import marshal
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer
import yaml
from typer.testing import CliRunner

from partita.cli.main import app
from partita.runs.locks import lock

from ...forks import COMMAND, Forks
from ...json_lines import read_json_lines
from ..conftest import Command

INSTALLED = str(Path(sys.executable).with_name("partita"))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100", "TERM": "xterm"}

Done = subprocess.CompletedProcess[str]
Forked = Callable[..., Done]

LOG = {"--quiet", "-q", "--log-json"}
LOADING = {"--trust-remote-code", "--set", *LOG}
FLAGS = {
    "report": set(),
    "init": {"--task", "--model", "--data", "--train", "--zero-shot"},
    "validate": {"--merge", "--set"},
    "explain": {"--data", "--dataset", "--stdin-format", "--set", "--json", "--all"},
    "preview": {"--rows", "-n", "--dataset", "--stdin-format", "--ledger", "--set"},
    "simulate": {"--output", "--batch-size", "--fresh", "--json", *LOADING},
    "chat": {
        "--system",
        "--temperature",
        "--top-p",
        "--max-new-tokens",
        "--seed",
        "--context",
        "--trust-remote-code",
        "--set",
    },
    "serve": {
        "--host",
        "--port",
        "--name",
        "--ui",
        "--token",
        "--context",
        "--batch-size",
        "--max-waiting",
        "--max-body",
        "--max-seconds",
        "--finish-seconds",
        *LOADING,
    },
    "tune": {"--dataset", "--stdin-format", "--plot", "--fresh", "--json", *LOADING},
    "train": {"--dataset", "--stdin-format", "--run", "--set", "--json", *LOG},
    "sweep": {"--dataset", "--folder", "--workers", "--set", "--json", *LOG},
    "predict": {
        "--dataset",
        "--safe-csv",
        "--server",
        "--stdin-format",
        "--output",
        "--batch-size",
        "--retry-errors",
        "--fresh",
        "--json",
        *LOADING,
    },
    "evaluate": {"--dataset", "--stdin-format", "--batch-size", "--json", *LOADING},
    "export": {
        "--to",
        "--output",
        "-o",
        "--dtype",
        "--quantize",
        "--llama-cpp",
        "--dataset",
        "--stdin-format",
        "--min-agreement",
        "--json",
        *LOADING,
    },
    "merge": {"--output", "-o", "--dtype", "--dataset", "--stdin-format", "--min-agreement", "--json", *LOADING},
    "push": {"--private", "--public", "--dry-run", *LOADING},
    "convert": {"--from", "--keys", "--output", "-o"},
    "schema": {"--markdown"},
    "doctor": {"--json"},
    "compare": {"--split", "--examples", "-n", "--html", "--json"},
    "runs": set(),
    "runs list": {"--sort", "--metric", "--json"},
    "runs show": {"--json"},
    "runs clean": {"--older-than", "--yes", "-y"},
}


def installed(*words: object, folder: Path) -> Done:
    """Run the installed command to its end, without a terminal."""
    done = subprocess.run(
        [INSTALLED, *map(str, words)],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    return done


@pytest.fixture(scope="module")
def partita(forks: Forks, folder: Path) -> Forked:
    """Run the command to its end, without a terminal; `before` is run in its process first."""

    def call(*words: object, before: str = "") -> Done:
        done = forks.run(before + COMMAND, "partita", *words, folder=folder, environment=ENVIRONMENT)
        assert "Traceback" not in done.stderr + done.stdout, done.stderr
        return done

    return call


Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Run the command in this process, which has the libraries loaded; return exit code, stdout and stderr."""
    monkeypatch.chdir(folder)

    def call(*words: object) -> tuple[int, str, str]:
        code = command(*words)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.fixture(scope="module")
def folder(colours: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with run.yaml, zero.yaml and some rows."""
    place = tmp_path_factory.mktemp("commands")
    settings = colours.config(trainer={"epochs": 1, "evaluate_generated": False}, preprocessing={"sample_size": 160})
    (place / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf8")
    zero = colours.config(trainer={"type": "none", "batch_size": 8})
    (place / "zero.yaml").write_text(yaml.safe_dump(zero), encoding="utf8")
    pd.DataFrame(colours.rows(12)).to_csv(place / "rows.csv", index=False)
    return place


@pytest.fixture(scope="module")
def trained(folder: Path) -> Done:
    """Return the output of `partita train`; the run is in `first`."""
    return installed("train", "run.yaml", "--run", "first", "--set", "seed=5", folder=folder)


def test_train_logs_in_plain_lines_and_prints_a_table(trained: Done, folder: Path) -> None:
    assert trained.returncode == 0, trained.stderr
    waits = ("loading libraries", "loading the model")
    lines = [line for line in trained.stderr.splitlines() if line not in waits]
    assert trained.stderr.startswith("loading libraries\nrun directory: first (new)\nloading the model\n")
    assert lines[0] == "run directory: first (new)"
    assert re.fullmatch(r"128 training rows, [\d,]+ tokens, longest \d+; 8 steps an epoch, 8 in all", lines[1])
    assert re.fullmatch(r"(fixed|bucket): \d+ rows a batch, .*, 1 batch a step, \d+\.\d % padding expected", lines[2])
    assert re.fullmatch(r"training 8/8  loss \d+\.\d+  epoch 1  tokens/s [\d,.]+", lines[-2])
    assert lines[-1] == "report: first/report.html"
    assert "\x1b" not in trained.stderr + trained.stdout
    assert re.search(r"metric .* validation .* test ", trained.stdout)
    assert re.search(r"│ loss +│ +\d\.\d{4} │ \d\.\d{4} │", trained.stdout)
    assert trained.stdout.endswith("8 steps; the run is in first\n")
    assert json.loads((folder / "first" / "manifest.json").read_text(encoding="utf8"))["seed"] == 5


@pytest.mark.long
def test_repeating_a_finished_run_prints_the_same_result_without_training(
    trained: Done, folder: Path, here: Here
) -> None:
    log = (folder / "first" / "log.jsonl").read_bytes()
    again = installed("train", "run.yaml", "--run", "first", "--set", "seed=5", "--json", "--quiet", folder=folder)
    assert (again.returncode, again.stderr) == (0, "")
    result = json.loads(again.stdout)
    assert (result["run"], result["steps"]) == ("first", 8)
    assert f"{result['metrics']['test']['loss']:.4f}" in trained.stdout
    assert (folder / "first" / "log.jsonl").read_bytes() == log
    code, _, error_text = here("train", "run.yaml", "--run", "first")
    assert code == 2
    assert error_text == (
        "error: first holds a run of another file:\n  seed: 5 -> 42\ngive this run another folder with --run\n"
    )


@pytest.mark.long
def test_a_run_predicts_and_resumes_a_prediction(trained: Done, folder: Path, partita: Forked) -> None:
    words = ("predict", "first", "--dataset", "rows.csv", "--output", "out.parquet")
    first = partita(*words)
    assert first.returncode == 0, first.stderr
    rates = r"tokens/s [\d,.]+  slots \d+% of \d+  padding \d+%  prompt tokens/s [\d,.]+"
    lines = first.stderr.splitlines()
    assert lines[:3] == ["loading libraries", "run directory: first (finished)", "loading the model"]
    assert re.fullmatch(rf"predicting 12/12  {rates}", lines[-1])
    assert re.fullmatch(r"12 rows, .* written to out\.parquet\n", first.stdout)
    table = pd.read_parquet(folder / "out.parquet")
    assert list(table["text"]) == list(pd.read_csv(folder / "rows.csv")["text"])
    again = partita(*words, "--quiet", "--json")
    assert (again.returncode, again.stderr) == (0, "")
    result = json.loads(again.stdout)
    assert (result["rows"], result["resumed"], result["batches"], result["path"]) == (12, 12, 0, "out.parquet")


def test_evaluate_prints_a_table_or_json(trained: Done, partita: Forked, here: Here) -> None:
    shown = partita("evaluate", "first", "--dataset", "rows.csv", "--quiet")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"┃ metric +┃ +value ┃", shown.stdout)
    assert re.search(r"│ colour\.n +│ +12 │\n(.*\n)*│ number\.n +│ +12 │\n│ loss +│ +\d", shown.stdout)
    code, output, _ = here("evaluate", "first", "--dataset", "rows.csv", "--json", "--batch-size", "5")
    scores = json.loads(output)
    assert code == 0
    assert scores["colour"]["n"] == 12
    assert f"{scores['model']['loss']:.4f}" in shown.stdout
    assert re.search(r"\ncolour: labels +\n", shown.stdout)
    for label, metrics in scores["colour"]["per_label"].items():
        assert re.search(rf"│ {label} +│ +{metrics['precision']:.3f} │ +{metrics['recall']:.3f} │", shown.stdout)
    assert sum(pair["rows"] for pair in scores["colour"]["confusion"]) == 12


def test_a_zero_shot_configuration_predicts_and_overrides_apply(folder: Path, partita: Forked, here: Here) -> None:
    words = ("predict", "zero.yaml", "--dataset", "rows.csv", "--output", "zero.jsonl", "--json", "-q")
    done = partita(*words, "--set", "generation.max_new_tokens=3")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["generated_tokens"] <= 36
    result = read_json_lines(folder / "zero.jsonl")
    assert max(row["tokens"] for row in result) <= 3
    code, _, error_text = here(*words)
    assert code == 2
    assert "holds answers of another job: generation changed" in error_text
    assert "or start again with --fresh" in error_text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            "train begun",
            2,
            "begun: is a folder; write the YAML file, and --run begun after it to continue a run that lies there",
        ),
        ("train none.yaml", 2, "none.yaml: there is no such file; YAML files there: run.yaml, zero.yaml"),
        (
            "train run.yaml --set trainer.epochs=0 --set sead=1",
            2,
            (
                "--set trainer.epochs=0: trainer.epochs: write a number above 0; got 0\n"
                "--set sead=1: sead: unknown key; did you mean seed?"
            ),
        ),
        (
            "train run.yaml --set seed",
            2,
            "--set seed: is not an override; write key.path=value, such as trainer.epochs=1",
        ),
        (
            "train run.yaml --dataset row.csv",
            2,
            "error: row.csv does not exist in {folder}; did you mean rows.csv?",
        ),
        (
            "train run.yaml --run rows.csv",
            1,
            "error: the folder rows.csv cannot be created: File exists; name another one",
        ),
        (
            "predict begun --dataset rows.csv --output o.csv",
            2,
            (
                "error: the run in begun is not finished (dead); partita runs show begun prints the command that "
                "continues it"
            ),
        ),
        (
            "predict apart/nothing --dataset rows.csv --output o.csv",
            2,
            (
                "error: apart/nothing is neither a run directory nor a saved model: it has no manifest.json or "
                "partita.json; there are apart/begun (dead)"
            ),
        ),
        (
            "predict apart/begum --dataset rows.csv --output o.csv",
            2,
            ("apart/begum: there is no such file or run; did you mean apart/begun? There are apart/begun (dead)"),
        ),
        (
            "train run.yaml trainer.learning_rate=0.1",
            2,
            (
                "trainer.learning_rate=0.1: there is no such file or run; to override a key, write --set "
                "trainer.learning_rate=0.1"
            ),
        ),
        (
            "predict run.yaml --dataset rows.csv --output o.csv",
            2,
            (
                "error: nothing has been trained with this file yet: train first, name the directory of a finished "
                "run, or write trainer: {{type: none}} for zero-shot"
            ),
        ),
        ("predict zero.yaml --dataset empty.jsonl --output o.csv", 2, "error: empty.jsonl has no rows"),
        ("predict zero.yaml --dataset header.csv --output o.csv", 2, "error: header.csv has no rows"),
        (
            "predict zero.yaml --dataset wrong.csv --output o.csv",
            2,
            (
                "error: wrong.csv has no column 'text', which input text needs; its columns are txt, colour; "
                "did you mean 'txt'?"
            ),
        ),
        (
            "predict zero.yaml --dataset rows.csv --output o.txt",
            2,
            "error: o.txt has the ending '.txt'; predictions are written as .jsonl, .csv or .parquet",
        ),
        (
            "predict zero.yaml --dataset rows.csv --output o.csv --server http://127.0.0.1:9",
            1,
            (
                "error: http://127.0.0.1:9 cannot be reached: Connection refused. Start the server with partita serve, "
                "or correct --server"
            ),
        ),
        (
            "predict zero.yaml --dataset rows.csv --output ./rows.csv",
            2,
            "error: rows.csv is a file of the dataset, which would be overwritten; name another output",
        ),
    ],
)
def test_errors_are_reported_with_their_exit_code(
    words: str, code: int, message: str, folder: Path, here: Here
) -> None:
    for name in ("begun", "apart/begun", "apart/nothing"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        if name.endswith("begun"):
            manifest = '{"format_version": 1, "status": "running"}'
            (folder / name / "manifest.json").write_text(manifest, encoding="utf8")
    (folder / "empty.jsonl").touch()
    (folder / "header.csv").write_text("text,colour\n", encoding="utf8")
    (folder / "wrong.csv").write_text("txt,colour\na,red\n", encoding="utf8")
    assert here(*words.split(), "--quiet") == (code, "", message.format(folder=folder) + "\n")


def test_an_unreachable_dataset_of_the_hub_is_reported(partita: Forked) -> None:
    done = partita("train", "run.yaml", "--dataset", "nobody/nothing", "--run", "hub", "-q")
    assert done.returncode == 2
    assert done.stderr.startswith("error: nobody/nothing cannot be read: ConnectionError: Couldn't reach")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_reported(folder: Path, here: Here) -> None:
    (folder / "closed").mkdir(mode=0o555)
    code, _, stderr = here("train", "run.yaml", "--run", "closed/run")
    assert code == 1
    assert stderr == ("error: the folder closed/run cannot be created: Permission denied; name another one\n")


def test_errors_of_the_operating_system_are_reported_without_a_traceback(
    folder: Path, tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    words = ("--dataset", folder / "rows.csv", "--output", "out.csv", "--quiet")
    code, _, stderr = here("predict", folder / "zero.yaml", *words)
    assert code == 1
    assert stderr.startswith("error: runs/zero/journal/out-")
    assert stderr.endswith(
        ".jsonl cannot be written: Not a directory; there is a file where a folder is needed; write to another path\n"
    )


LIMIT_FILES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY)); "
"""Limit files of this process to 300 kB, as a full disk would."""


def test_a_run_on_a_full_disk_is_reported_and_resumes_when_there_is_space(folder: Path, partita: Forked) -> None:
    words = ("train", "run.yaml", "--run", "full", "--quiet")
    done = partita(*words, before=LIMIT_FILES)
    message = "error: files in full cannot be written: File too large; fix that and rerun the same command\n"
    assert (done.returncode, done.stderr) == (1, message)
    assert json.loads((folder / "full" / "manifest.json").read_text(encoding="utf8"))["status"] == "failed"
    assert not list((folder / "full" / "checkpoints").iterdir())
    assert partita(*words).returncode == 0


def test_a_run_in_use_is_refused(folder: Path, partita: Forked) -> None:
    (folder / "busy").mkdir()
    with lock(folder / "busy"):
        done = partita("train", "run.yaml", "--run", "busy")
    message = (
        "loading libraries\n"
        "error: busy is in use by another process; wait for it, or give this run another folder with --run\n"
    )
    assert (done.returncode, done.stderr) == (2, message)


def test_a_launched_process_does_not_repeat_what_its_launcher_waited_for(folder: Path, partita: Forked) -> None:
    launched = "import os; os.environ['PARTITA_LAUNCHED'] = str(os.getppid())\n"
    (folder / "launched").mkdir()
    with lock(folder / "launched"):
        done = partita("train", "run.yaml", "--run", "launched", before=launched)
    assert done.stderr.startswith("error: launched is in use by another process")


def on_a_terminal(forks: Forks, *words: object, folder: Path, answers: tuple[str, ...] = ()) -> tuple[int, str]:
    """Return the exit code and all terminal output; each answer is typed when the prompt before it has appeared."""
    master, slave = pty.openpty()
    process = forks.start(COMMAND, "partita", *words, folder=folder, environment=ENVIRONMENT, terminal=slave)
    os.close(slave)
    shown, left = b"", list(answers)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            try:
                piece = os.read(master, 65536)
            except OSError:  # linux raises this when the other side is closed
                break
            shown += piece
            if left and shown.endswith(b": "):
                os.write(master, left.pop(0).encode() + b"\n")
    os.close(master)
    return process.wait(timeout=60), shown.decode()


def test_a_terminal_gets_a_bar(forks: Forks, folder: Path) -> None:
    code, shown = on_a_terminal(forks, "train", "run.yaml", "--run", "terminal", folder=folder)
    assert code == 0, shown
    assert "training" in shown
    assert "━" in shown
    assert "8/8" in shown
    assert re.search(r"loss \d\.\d+  epoch 1  tokens/s", shown)
    assert "\x1b[?25l" in shown, "the bar is redrawn in its place"
    assert "\x1b[?25h" in shown, "the cursor is shown again"


def test_init_asks_questions_at_a_terminal(forks: Forks, folder: Path, partita: Forked) -> None:
    answers = ("rows.csv", "fly", "classify", "scratch")
    code, shown = on_a_terminal(forks, "init", "asked", folder=folder, answers=answers)
    assert code == 0, shown
    assert "Please select one of the available options" in shown
    assert partita("validate", "asked/run.yaml").stdout.startswith("asked/run.yaml: ok (finetune of scratch")


def test_a_value_that_an_option_does_not_have_is_refused_in_plain_words() -> None:
    refused = CliRunner().invoke(app, ["predict", "run.yaml", "--stdin-format", "foo"])
    assert refused.exit_code == 2
    assert "Invalid value for '--stdin-format': 'foo' is not one of 'jsonl', 'csv'" in refused.output
    assert "Value error" not in refused.output


def test_a_module_that_was_cut_is_no_end_of_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_module() -> None:
        marshal.loads(b"")

    monkeypatch.setattr("partita_schema.reference.json_schema_text", read_module)
    result = CliRunner().invoke(app, ["schema"])
    assert "Aborted" not in result.output
    assert isinstance(result.exception, RuntimeError)
    assert str(result.exception) == "a file ended early: EOF read where object expected"


def test_help_of_each_command_lists_every_flag() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    groups = {name: group.commands for name, group in commands.items() if hasattr(group, "commands")}
    assert {*commands, *(f"{name} {command}" for name, group in groups.items() for command in group)} == FLAGS.keys()
    for words, flags in FLAGS.items():
        *group, name = words.split()
        overview = CliRunner().invoke(app, [*group, "--help"]).stdout
        assert re.search(rf"^  {name}  +.*[a-z]\.$", overview, re.MULTILINE), words
        help_text = CliRunner().invoke(app, [*group, name, "--help"]).stdout
        assert max(map(len, help_text.splitlines())) <= 80
        assert "<bool>" not in help_text
        result = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", help_text.split("Options")[-1]))
        assert result - {"--help", "-h"} == flags, name
