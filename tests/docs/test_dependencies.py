"""Tests of the dependencies: every import is declared in pyproject.toml, used if declared, and installed."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
OWN = {"partita", "partita_schema", "partita_trainers"}
CALLER_HAS = {"IPython"}
"""Packages that are used only in a process that has imported them: IPython in a notebook."""
EXTRAS = sorted(PROJECT["optional-dependencies"])


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {canonical(re.split(r"[<>=!~;\[ ]", one)[0]) for one in requirements} - {"partita"}


def statements(parent: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements below a node; expressions, which hold most of the nodes, hold no imports."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(parent, part, ()):
            yield child
            yield from statements(child)


@cache
def imports() -> dict[str, list[str]]:
    """Return the files by the top-level package that they import, without the standard library."""
    results: dict[str, list[str]] = {}
    for path in (path for folder in ("framework", "schema", "trainers") for path in (ROOT / folder).rglob("*.py")):
        for node in statements(ast.parse(path.read_text(encoding="utf8"))):
            match node:
                case ast.Import(names=aliases):
                    modules = [alias.name for alias in aliases]
                case ast.ImportFrom(module=str(module), level=0):
                    modules = [module]
                case _:
                    modules = []
            for module in modules:
                results.setdefault(module.partition(".")[0], []).append(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in results.items() if name not in sys.stdlib_module_names | OWN}


def distributions() -> dict[str, set[str]]:
    """Return the names of the distributions that install each imported package."""
    installed = packages_distributions()
    return {name: {canonical(one) for one in installed.get(name, (name,))} for name in imports()}


def test_every_imported_package_is_a_declared_dependency() -> None:
    users = {
        name
        for extra in EXTRAS
        if extra not in ("dev", "docs")
        for name in names(PROJECT["optional-dependencies"][extra])
    }
    declared = names(PROJECT["dependencies"]) | users
    undeclared = {
        name: imports()[name]
        for name, packages in distributions().items()
        if name not in CALLER_HAS and not packages & declared
    }
    assert undeclared == {}


def test_every_declared_dependency_is_imported() -> None:
    imported = set[str]().union(*distributions().values())
    assert names(PROJECT["dependencies"]) - imported == set()


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_is_installed(extra: str) -> None:
    missing = []
    for name in names(PROJECT["optional-dependencies"][extra]):
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    assert missing == []


def test_the_development_extra_contains_all_others() -> None:
    (own,) = (one for one in PROJECT["optional-dependencies"]["dev"] if one.startswith("partita["))
    assert set(own.removeprefix("partita[").removesuffix("]").split(",")) == {*EXTRAS} - {"dev"}
