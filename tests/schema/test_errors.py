"""Tests of the error classes: each is exported by partita, documented, and has the correct exit status."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import partita
import partita_schema
import partita_trainers
from partita_schema.errors import JobError, PartitaError

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "command-line.md"
NEEDS_AN_EXTRA = ("partita.simulation.adapters.gymnasium",)


def subclasses(of: type[PartitaError]) -> Iterator[type[PartitaError]]:
    yield of
    for one in of.__subclasses__():
        yield from subclasses(one)


@pytest.fixture(scope="module")
def tree() -> list[type[PartitaError]]:
    """Return all error classes of the three packages, after importing all modules."""
    for package in (partita, partita_schema, partita_trainers):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__") and module.name not in NEEDS_AN_EXTRA:
                importlib.import_module(module.name)
    return [one for one in dict.fromkeys(subclasses(PartitaError)) if one.__module__.startswith("partita")]


def test_every_error_is_exported(tree: list[type[PartitaError]]) -> None:
    assert {one.__name__ for one in tree} <= set(partita.__all__)
    for one in tree:
        assert getattr(partita, one.__name__) is one


def test_every_error_is_documented_with_its_exit_status(tree: list[type[PartitaError]]) -> None:
    guide = GUIDE.read_text(encoding="utf8")
    for one in tree:
        assert re.search(rf"^ *{one.__name__} ", PartitaError.__doc__ or "", re.MULTILINE), one
        assert re.search(rf"^\| `{one.__name__}` \|.*\| {one.exit_status} \|$", guide, re.MULTILINE), one
        assert one.exit_status == (1 if issubclass(one, JobError) else 2)
        assert one.__doc__


def test_a_notebook_shows_the_message_and_the_lines_of_the_user(tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text("from partita_schema.load import load_config\n\nload_config('nothing: 1')\n", encoding="utf8")
    with pytest.raises(PartitaError) as caught:
        exec(compile(program.read_text(), program, "exec"), {"__name__": "mine"})
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]  # without this test
    message, *places = caught.value._render_traceback_()
    assert message == f"ConfigError: {caught.value}"
    assert places == ["  in line 3 of mine.py: load_config('nothing: 1')"]
