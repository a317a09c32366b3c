"""Loading of libraries by commands and by the server of trials: no garbage collections, then or later."""

import gc
import sys
from pathlib import Path

import pytest

from partita.cli.options import loading_libraries
from partita.sweeps.trial_server import load


def test_the_collector_is_paused_while_a_command_loads_libraries() -> None:
    with loading_libraries(line=False):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000


def test_the_collector_is_paused_while_the_server_of_trials_loads_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library_of_trials.py").write_text("import gc\nENABLED = gc.isenabled()\n", encoding="utf8")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        load(["library_of_trials"])
        assert sys.modules["library_of_trials"].ENABLED is False
    finally:
        sys.modules.pop("library_of_trials", None)
    assert gc.isenabled()
