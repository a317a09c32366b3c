"""Files that are replaced atomically."""

from pathlib import Path
from typing import Any

import pytest

from partita_schema.common.files import write_atomically


def test_a_file_that_was_written_is_on_the_disk(tmp_path: Path, forced: Any) -> None:
    write_atomically(tmp_path / "a", "some text")
    assert (tmp_path / "a").read_text() == "some text"
    assert forced(tmp_path / "a") == 9


def test_writing_leaves_the_old_text_or_the_new_one_and_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    write_atomically(path, "new")
    assert path.read_text() == "new"
    assert [found.name for found in tmp_path.iterdir()] == ["file.json"]
