"""Tests of atomic file replacement."""

from pathlib import Path
from typing import Any

import pytest

from partita_schema.common.files import write_atomically


def test_a_written_file_is_flushed_to_disk(tmp_path: Path, forced: Any) -> None:
    write_atomically(tmp_path / "a", "some text")
    assert (tmp_path / "a").read_text() == "some text"
    assert forced(tmp_path / "a") == 9


def test_writing_leaves_the_old_or_the_new_text_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [found.name for found in tmp_path.iterdir()] == ["file.json"]
