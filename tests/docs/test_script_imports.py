"""Every name that a benchmark or an example imports from the packages exists."""

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("partita", "partita_schema", "partita_trainers")
SCRIPTS = sorted(
    path.relative_to(ROOT) for folder in ("benchmarks", "examples") for path in ROOT.glob(f"{folder}/**/*.py")
)


def imported_names(script: Path) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import from the packages, wherever in the script it is."""
    for node in ast.walk(ast.parse((ROOT / script).read_text(encoding="utf8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            yield from ((node.module, alias.name) for alias in node.names)


def exists(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_the_names_that_a_script_imports_exist(script: Path) -> None:
    missing = [f"{module}.{name}" for module, name in imported_names(script) if not exists(module, name)]
    assert not missing
