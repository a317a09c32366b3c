"""Tests of the guide on converting other tools' files: the example is converted as shown, and all keys are listed."""

import re
from pathlib import Path

import pytest

from partita_schema.compat.tools.conversion import To
from partita_schema.convert import TOOLS, convert_file, keys_page, report_lines
from partita_schema.problems.unknown_key import all_paths

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "guides" / "converting.md").read_text(encoding="utf-8")


def test_the_example_is_converted_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = re.search(r"<!-- axolotl: config.yml -->\n```yaml\n(.*?)```\n```console\n(.*?)```", GUIDE, re.DOTALL)
    assert example is not None
    Path("config.yml").write_text(example[1], encoding="utf-8")
    lines = list(report_lines(convert_file(Path("config.yml"), "axolotl").report))
    shown = [line for line in example[2].splitlines() if not line.startswith(("$", "wrote", "..."))]
    assert shown[0] == lines[0]
    assert shown[1:] == lines[lines.index(shown[1]) :]


def test_the_tables_name_keys_that_exist() -> None:
    known = {path.replace("[]", "") for paths in all_paths().values() for path in paths}
    free = "prompt.chat_template_kwargs."
    for tool in TOOLS.values():
        for key, entry in tool.table.items():
            if isinstance(entry, To):
                assert entry.path in known or entry.path.startswith(free), (tool.title, key)


def test_the_page_of_keys_is_up_to_date() -> None:
    page = (DOCS / "converted-keys.md").read_text(encoding="utf-8")
    assert page == keys_page(), "run partita convert --keys > docs/converted-keys.md"
