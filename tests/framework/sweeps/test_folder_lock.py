"""Tests of the lock of the folder of a sweep."""

import os
from pathlib import Path

import pytest

from partita.sweeps import folder_lock
from partita.sweeps.folder_lock import join_lock, locked
from partita_schema.errors import PartitaError, ResumeError


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "LOCK_SECONDS", 0.0)


def test_a_folder_is_locked_until_the_last_worker_that_holds_the_lock_has_ended(tmp_path: Path) -> None:
    with locked(tmp_path) as lock:
        worker = join_lock(tmp_path, lock.token)
    message = f"{tmp_path} is in use by another process; wait for it, or name another folder with --folder"
    with pytest.raises(ResumeError) as caught, locked(tmp_path):
        ...
    assert str(caught.value) == message
    os.close(worker)
    with locked(tmp_path) as again:
        assert again.token != lock.token
        with pytest.raises(ResumeError, match="is in use by another process"), locked(tmp_path):
            ...
        assert (tmp_path / ".lock").read_text() == again.token


def test_a_worker_that_sees_another_folder_or_comes_too_late_is_refused(tmp_path: Path) -> None:
    message = (
        f"the folder of the sweep, {tmp_path}, is another one on {os.uname().nodename}: name one with --folder that "
        "all machines of the cluster see under this name"
    )
    with pytest.raises(PartitaError) as caught:
        join_lock(tmp_path, "0123")
    assert str(caught.value) == message
    with locked(tmp_path) as first:
        ...
    with locked(tmp_path), pytest.raises(PartitaError) as caught:
        join_lock(tmp_path, first.token)
    assert str(caught.value) == message
