"""Tests of the launch of several machines."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
base_model: {type: scratch, size: nano, context_length: 64, tokenizer: byte}
input_features: [{name: text, type: text}]
output_features: [{name: answer, type: text}]
backend: {type: torchrun, processes: 1, nodes: 2, address: "localhost:PORT", timeout_seconds: 2}
"""


@pytest.mark.long
def test_files_in_the_current_folder_do_not_hide_modules_from_ranks(tmp_path: Path) -> None:
    two = CONFIG.replace('processes: 1, nodes: 2, address: "localhost:PORT", timeout_seconds: 2', "processes: 2")
    (tmp_path / "run.yaml").write_text(two + "generation: {max_new_tokens: 2}\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    for name in ("random", "queue", "datasets"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the user')\n")
    words = ["predict", "run.yaml", "--dataset", "rows.jsonl", "--output", "out.jsonl"]
    ended = subprocess.run(
        [Path(sys.executable).parent / "partita", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
def test_a_machine_says_what_it_waits_for_and_how_to_use_it_alone(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    (tmp_path / "run.yaml").write_text(CONFIG.replace("PORT", str(port)))
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    words = ["predict", "run.yaml", "--dataset", "rows.jsonl", "--output", "out.jsonl"]
    ended = subprocess.run(
        [sys.executable, "-m", "partita", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        f"waiting up to 2 seconds for 2 machines at localhost:{port}; for this one alone, add --set "
        "'backend={type: local}'\n"
        f"error: 2 machines did not meet at localhost:{port} in 2 seconds; start the same command on each of them, and "
        "write backend.address as one that all of them reach\n"
    )
