"""Tests of the locks of runs."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partita.runs.locks import is_locked, lock
from partita_schema.errors import ResumeError, WriteError


def test_one_process_at_a_time_holds_the_lock_until_it_ends(tmp_path: Path) -> None:
    message = f"{tmp_path} is in use by another process; wait for it, or give this run another folder with --run"
    with lock(tmp_path), pytest.raises(ResumeError) as caught, lock(tmp_path):
        pass
    assert str(caught.value) == message
    code = "import sys, time\nfrom pathlib import Path\nfrom partita.runs.locks import lock\n"
    code += "with lock(Path(sys.argv[1])):\n    print('locked', flush=True)\n    time.sleep(60)\n"
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(ResumeError), lock(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    with lock(tmp_path):
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_locks(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with pytest.raises(WriteError) as caught, lock(tmp_path):
        pass
    problem = f"{tmp_path / '.lock'} cannot be locked: No locks available"
    assert str(caught.value) == f"{problem}; use a folder on another file system"
    assert not is_locked(tmp_path)


def test_a_fork_does_not_inherit_the_lock(tmp_path: Path) -> None:
    # Like a data worker, the fork outlives the process that held the lock.
    code = "import os, sys, time\nfrom pathlib import Path\nfrom partita.runs.locks import lock\n"
    code += "with lock(Path(sys.argv[1])):\n    pid = os.fork()\n    if not pid:\n        time.sleep(30)\n"
    code += "    else:\n        print(pid, flush=True)\n        time.sleep(60)\n"
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    fork = int(holder.stdout.readline())
    time.sleep(0.2)
    with pytest.raises(ResumeError), lock(tmp_path):
        pass
    holder.kill()
    holder.wait()
    try:
        with lock(tmp_path):
            pass
    finally:
        os.kill(fork, 9)
        holder.stdout.close()
