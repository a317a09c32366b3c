"""Tests of checkpoints: complete or absent, and read back unchanged."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partita_schema.common.checksums import DamagedError
from partita_schema.errors import ResumeError
from partita_trainers.checkpoints.checkpoint import (
    clear_unfinished,
    list_checkpoints,
    load_state,
    newest_intact,
    random_state,
    read_checkpoint,
    remove_checkpoints,
    restore_random_state,
    save_state,
    write_checkpoint,
)
from partita_trainers.checkpoints.file_sums import check_sums


def write(folder: Path, step: int, optimizers: list[torch.optim.Optimizer] | None = None, **options: Any) -> Path:
    return write_checkpoint(
        folder,
        step,
        save_model=options.get("save_model", lambda path: (path / "model.txt").write_text("weights")),
        optimizer_states=[optimizer.state_dict() for optimizer in optimizers or ()],
        data_position={"step": step},
        trainer={"step": step},
    )


def optimizer_with_state() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    for _ in range(3):
        (parameter**2).sum().backward()
        optimizer.step()
    return optimizer


def test_nested_state_with_tensors_is_restored_unchanged(tmp_path: Path) -> None:
    shared = torch.arange(4, dtype=torch.uint8)
    state = {
        "state": {0: {"a": shared, "b": shared, "n": 3, "t": (1, None, 0.5)}, 1: {}},
        "groups": [{"lr": 0.1, "params": [0, 1]}],
    }
    save_state(tmp_path / "x", state)
    result = load_state(tmp_path / "x")
    assert torch.equal(result["state"][0].pop("a"), shared)
    assert torch.equal(result["state"][0].pop("b"), shared)
    assert result == {"state": {0: {"n": 3, "t": (1, None, 0.5)}, 1: {}}, "groups": [{"lr": 0.1, "params": [0, 1]}]}


def test_random_generators_are_restored(tmp_path: Path) -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    np.random.normal()
    save_state(tmp_path / "rng", random_state())
    drawn = (torch.rand(3).tolist(), random.random(), np.random.normal())
    torch.rand(100)
    random.random()
    np.random.normal(size=3)
    restore_random_state(load_state(tmp_path / "rng"))
    assert (torch.rand(3).tolist(), random.random(), np.random.normal()) == drawn


def test_a_failed_write_keeps_existing_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def full_disk(path: Path) -> None:
        (path / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, 2, save_model=full_disk)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_written_checkpoint_and_its_folder_are_flushed_to_disk(tmp_path: Path, forced: Any) -> None:
    path = write(tmp_path, 1, [optimizer_with_state()])
    assert len(list(path.iterdir())) > 5
    for file in path.iterdir():
        assert forced(file) == file.stat().st_size
    assert "step-000001" in forced(tmp_path)


def test_only_complete_checkpoints_count_and_leftovers_are_removed(tmp_path: Path) -> None:
    write(tmp_path, 3)
    write(tmp_path, 12)
    (tmp_path / ".step-000020-77").mkdir()
    (tmp_path / "notes").mkdir()
    assert list_checkpoints(tmp_path) == [3, 12]
    clear_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-000003", "step-000012"]


def test_protected_checkpoints_are_not_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    remove_checkpoints(tmp_path, keep={2, 4})
    assert list_checkpoints(tmp_path) == [2, 4]


def test_another_number_of_optimizers_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1, [optimizer_with_state()])
    with pytest.raises(ResumeError, match="holds 1 optimizers and this run has 2; start a new run"):
        read_checkpoint(tmp_path, 1, load_model=lambda path: None, optimizers=[optimizer_with_state()] * 2)


def test_an_optimizer_over_other_parameters_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1, [optimizer_with_state()])
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(ResumeError, match="does not fit this run's parameters"):
        read_checkpoint(tmp_path, 1, load_model=lambda path: None, optimizers=[other])


@pytest.mark.parametrize("damage", ["flip", "truncate", "zero", "remove"])
def test_a_damaged_checkpoint_is_moved_away_and_the_newest_intact_one_is_used(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 6, 9):
        write(tmp_path, step, [optimizer_with_state()])
    for step in (6, 9):
        path = tmp_path / f"step-{step:06d}" / "optimizer-0.safetensors"
        data = path.read_bytes()
        half = len(data) // 2
        if damage == "remove":
            path.unlink()
        else:
            flipped = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
            path.write_bytes({"flip": flipped, "truncate": data[:half], "zero": data[:-40] + bytes(40)}[damage])
    assert newest_intact(tmp_path) == 3
    assert list_checkpoints(tmp_path) == [3]
    assert sorted(path.name for path in tmp_path.iterdir())[:2] == ["damaged-step-000006", "damaged-step-000009"]
    said = {"flip": "is not as it was written (its checksum differs)", "zero": "is not as it was written (its"}
    said |= {"truncate": f"has {half:,} bytes and was written with {len(data):,}", "remove": "is missing"}
    assert f"step-000009/optimizer-0.safetensors {said[damage]}" in caplog.text
    assert "; it was renamed to damaged-step-000009, and the run resumes from step 3" in caplog.text


def test_without_an_intact_checkpoint_the_damaged_file_is_reported(tmp_path: Path) -> None:
    assert newest_intact(tmp_path) is None
    write(tmp_path, 3)
    (tmp_path / "step-000003" / "data_position.json").write_text("{}")
    with pytest.raises(ResumeError) as caught:
        newest_intact(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/step-000003/data_position.json has 2 bytes and was written with 11, and there is no other intact "
        "checkpoint; restore it or start a new run"
    )
    assert list_checkpoints(tmp_path) == [3]


def test_every_flipped_bit_in_a_checkpoint_is_detected(tmp_path: Path) -> None:
    path, rng = write(tmp_path, 3, [optimizer_with_state()]), random.Random(2)
    files = sorted(path.iterdir())
    assert "partita-checksums.json" in [file.name for file in files]
    for _ in range(200):
        file = rng.choice(files)
        whole = file.read_bytes()
        place = rng.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        file.write_bytes(damaged)
        try:
            check_sums(path, required=True)
        except DamagedError:
            pass
        else:  # a space in the checksums themselves
            assert file.name == "partita-checksums.json"
            assert json.loads(damaged) == json.loads(whole)
        file.write_bytes(whole)


WRITER = """
import sys
from pathlib import Path
import torch
from partita_trainers.checkpoints.checkpoint import clear_unfinished, list_checkpoints, remove_checkpoints
from partita_trainers.checkpoints.checkpoint import write_checkpoint
folder = Path(sys.argv[1])
clear_unfinished(folder)
step = max(list_checkpoints(folder), default=0)
while True:
    step += 1
    write_checkpoint(folder, step, save_model=lambda path: (path / "model.txt").write_text(str(step) * 200000),
                     optimizer_states=[], data_position={"step": step}, trainer={"step": step})
    remove_checkpoints(folder, keep={step, step - 1})
    print(step, flush=True)
"""


@pytest.mark.long
def test_a_kill_at_any_moment_leaves_a_complete_newest_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(5)
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        first = int(process.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        steps = list_checkpoints(tmp_path)
        assert steps[-1] >= first
        for step in steps:
            path = tmp_path / f"step-{step:06d}"
            assert (path / "model.txt").read_text() == str(step) * 200000
            assert read_checkpoint(tmp_path, step, load_model=lambda path: None, optimizers=[]) == (
                {"step": step},
                {"step": step},
            )
