"""Tests of atomic, durable file writes."""

from pathlib import Path
from typing import Any

from partita.runs.files import new_file


def test_a_new_file_and_its_folder_are_flushed_to_disk(tmp_path: Path, forced: Any) -> None:
    with new_file(tmp_path / "a") as file:
        file.write(b"some ")
        file.write(b"bytes")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == b"some bytes"
    assert forced(tmp_path / "a") == 10
    assert forced(tmp_path) == ["a"]
