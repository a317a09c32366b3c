"""Tests of the context of a run: the configuration, the run and the data."""

from pathlib import Path

import pytest

from partita.backends.context import RunContext
from partita_schema.load import load_config

FILE = """# A comment that run directories keep.
base_model: base
input_features: [{name: text}]
output_features: [{name: answer, type: text}]
data: {source: "${ROWS}"}
"""


def test_a_copy_for_another_process_keeps_the_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWS", "rows.csv")
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(FILE, encoding="utf-8")
    context = RunContext(load_config("mine.yaml"))

    copy = context.for_other_process()

    assert copy.loaded.text == FILE
    assert copy.name == context.name == "mine"
    assert copy.loaded.folder == tmp_path.resolve()
    assert copy.loaded.origins == context.loaded.origins
    assert copy.config == context.config
