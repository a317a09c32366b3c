"""Tests of atomic file replacement, and of the cache folder of the user."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from partita_schema.common.files import replacing_folder, user_cache_folder, write_atomically


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


def test_the_cache_of_the_user_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("PARTITA_CACHE", "~/own")
    assert user_cache_folder() == tmp_path / "own"
    monkeypatch.delenv("PARTITA_CACHE")
    assert user_cache_folder() == tmp_path / "xdg" / "partita"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_folder() == tmp_path / ".cache" / "partita"


@pytest.mark.parametrize("named", ["", "~no user of this name/cache"])
def test_a_user_without_a_home_has_a_cache_too(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CACHE", named)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert user_cache_folder() == Path(tempfile.gettempdir()) / "partita"
