"""Loading of libraries by commands and by the server of trials: no garbage collections, then or later."""

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from partita.cli.loading import loading_libraries
from partita.sweeps.trial_server import load
from partita_schema.load import load_config
from partita_schema.records import FORMAT_VERSION


def test_the_collector_is_paused_while_a_command_loads_libraries() -> None:
    with loading_libraries(line=False):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000


def test_the_collector_is_paused_while_the_server_of_trials_loads_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library_of_trials.py").write_text("import gc\nENABLED = gc.isenabled()\n", encoding="utf8")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        load(["library_of_trials"])
        assert sys.modules["library_of_trials"].ENABLED is False
    finally:
        sys.modules.pop("library_of_trials", None)
    assert gc.isenabled()


CONFIG = """
base_model: {type: scratch, size: nano, architecture: llama}
input_features: [{name: text, type: text}]
output_features: [{name: answer, type: text}]
data: {source: rows.jsonl}
trainer: {type: finetune}
backend: {type: torchrun, processes: 2}
"""
COMMAND = """
import sys
import partita.backends.launch as launch
from partita.cli.main import run

def show(event):
    print(event, *(name for name in ("torch", "transformers.modeling_utils") if name in sys.modules))
    return 0

launch.launch = lambda config, arguments: show("launched:")
try:
    run()
finally:
    show("ended:")
"""


def imported_by(folder: Path, *words: str) -> tuple[str, str]:
    """Return which libraries a command has imported when it launches processes and ends, and its standard error."""
    (folder / "run.yaml").write_text(CONFIG, encoding="utf8")
    (folder / "rows.jsonl").write_text('{"text": "a", "answer": "b"}\n' * 20, encoding="utf8")
    command = [sys.executable, "-c", COMMAND, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("launched:", "ended:"))]
    return "\n".join(lines), done.stderr


def test_a_command_that_launches_processes_loads_no_model_libraries_itself(tmp_path: Path) -> None:
    assert imported_by(tmp_path, "train", "run.yaml") == ("launched: torch\nended: torch", "loading libraries\n")


def test_a_run_directory_that_launches_processes_loads_no_model_libraries_itself(tmp_path: Path) -> None:
    config = load_config(yaml.safe_load(CONFIG)).config.model_dump(mode="json")
    manifest = {"format_version": FORMAT_VERSION, "status": "done", "config": config}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest), encoding="utf8")
    imported = imported_by(tmp_path, "evaluate", "run")
    assert imported == ("launched: torch\nended: torch", "loading libraries\n")


def test_explain_needs_no_libraries(tmp_path: Path) -> None:
    assert imported_by(tmp_path, "explain", "run.yaml") == ("ended:", "")


def test_preview_needs_torch_only(tmp_path: Path) -> None:
    imported, _ = imported_by(tmp_path, "preview", "run.yaml", "--set", "base_model.tokenizer=byte")
    assert imported == "ended: torch"
