"""Tests of checksums of a folder: they cover only written files."""

import json
import os
from pathlib import Path

import pytest

from partita_schema.common.checksums import DamagedError, sealed
from partita_trainers.checkpoints import file_sums
from partita_trainers.checkpoints.file_sums import FILE, check_sums, file_sum, read_sums, summed


def test_existing_files_are_not_part_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with summed(tmp_path):
        (tmp_path / "base").mkdir()
        (tmp_path / "base" / "weights.bin").write_text("1")
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "rows.csv").write_text("not of the model")
    assert sorted(read_sums(tmp_path) or ()) == ["base/weights.bin", "config.json"]
    (tmp_path / "notes.txt").write_text("changed")
    (tmp_path / "journal").mkdir()
    check_sums(tmp_path)


def test_a_model_that_overwrites_another_is_valid_once_it_is_complete(tmp_path: Path) -> None:
    with summed(tmp_path):
        (tmp_path / "config.json").write_text("{}")

    def stopped_on_the_way() -> None:
        with summed(tmp_path):
            (tmp_path / "config.json").write_text("[]")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped_on_the_way()
    assert read_sums(tmp_path) is None


def test_weights_are_read_only_on_request(tmp_path: Path) -> None:
    with summed(tmp_path):
        (tmp_path / "model.safetensors").write_text("weights")
        (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("Weights")
    check_sums(tmp_path, weights=False)
    with pytest.raises(DamagedError, match=r"model.safetensors is not as it was written \(its checksum differs\)$"):
        check_sums(tmp_path)


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_text("a")
    os.utime(path, (1, 1))
    first = file_sum(path)
    assert file_sums._read[path.resolve()][1] == first
    path.write_text("b")
    assert file_sum(path) != first


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON (Expecting value"),
        ("[" * 100_000, "is not JSON (nested too deeply)"),
        ('{"format": 1, "files": {}}', "is not as it was written (its checksum differs)"),
        (json.dumps(sealed({"files": {"a": 1}})), "cannot be read: "),
        (json.dumps(sealed({"files": {"../a": {"bytes": 0, "sha256": ""}}})), "names ../a, which is not in its folder"),
        (json.dumps(sealed({"files": {"/a": {"bytes": 0, "sha256": ""}}})), "names /a, which is not in its folder"),
    ],
)
def test_checksums_that_cannot_be_used_are_reported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(DamagedError) as caught:
        check_sums(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / FILE} {message}")


def test_an_endless_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "pipe").symlink_to("/dev/zero")
    (tmp_path / FILE).write_text(json.dumps(sealed({"files": {"pipe": {"bytes": 0, "sha256": ""}}})))
    with pytest.raises(DamagedError, match="pipe is missing"):
        check_sums(tmp_path)
