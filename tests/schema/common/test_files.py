"""Tests of atomic file replacement."""

from pathlib import Path
from typing import Any

import pytest

from partita_schema.common.files import replacing_folder, write_atomically


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


def write_folder(path: Path, text: str) -> None:
    with replacing_folder(path) as temporary:
        temporary.mkdir()
        (temporary / text).write_text(text)


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / ".model.writing").mkdir()
    (tmp_path / ".model.writing" / "left over from a kill").touch()
    write_folder(tmp_path / "model", "old")

    write_folder(tmp_path / "model", "new")

    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["model", "model/new"]


def test_a_folder_is_unchanged_after_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "old")

    with pytest.raises(UnicodeEncodeError):
        write_folder(tmp_path / "model", "new \ud800")

    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["model", "model/old"]
