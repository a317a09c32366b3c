"""Tests of the public names: exports, documentation, and imported libraries."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

import partita
import partita.data
import partita.simulation
import partita_schema
import partita_trainers

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = "\n".join((DOCS / page).read_text(encoding="utf8") for page in ("api.md", "extending.md"))
PUBLIC = [partita, partita.data, partita.simulation, partita_trainers]
EXPORTED = [(package, name) for package in PUBLIC for name in package.__all__]
CREATED_BY_USERS = {"Model", "ConfigError", "Problem"}
OF_THE_PIPELINE = {
    "LoaderOptions": "a section of the configuration",
    **dict.fromkeys(["Ledger", "RowKeys", "RowTokenizer", "Rows"], "how a TokenizedDataset is made"),
    **dict.fromkeys(["ActiveEpisode", "TurnResult"], "the state of Rollout between its steps"),
}
"""Classes in annotations of public classes that users neither receive nor pass."""


def test_the_cheap_imports_load_no_heavy_library() -> None:
    program = """
import sys
import partita, partita.data, partita.simulation, partita_trainers
from partita import Config, ConfigError, PartitaError, load_config
from partita.data import DataSource, RowFormatter
from partita.simulation import Agent, Checker, Environment, World
from partita_trainers import Trainer
heavy = {"accelerate", "datasets", "numpy", "pandas", "peft", "pyarrow", "ray", "torch", "transformers"}
print(sorted(heavy & set(sys.modules)))
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_every_public_name_can_be_imported_is_listed_and_has_a_docstring(package: ModuleType) -> None:
    assert list(package.__all__) == sorted(set(package.__all__))
    assert dir(package) == package.__all__
    for name in package.__all__:
        value = getattr(package, name)
        assert not isinstance(value, type) or value.__doc__, f"{package.__name__}.{name} has no docstring"
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Modell'"):
        _ = package.Modell


def test_the_python_reference_documents_exactly_the_public_names() -> None:
    documented = re.findall(r"^::: ([\w.]+)$", REFERENCE, re.MULTILINE)
    assert len(documented) == len(set(documented))
    objects = {id(resolve(path)): path for path in documented}
    assert len(objects) == len(documented), "the same object under two names"
    exported = {id(getattr(package, name)): f"{package.__name__}.{name}" for package, name in EXPORTED}
    assert sorted(exported[one] for one in exported.keys() - objects.keys()) == [], "not in the reference"
    assert sorted(objects[one] for one in objects.keys() - exported.keys()) == [], "not exported"
    assert {path.rpartition(".")[0] for path in documented} == {package.__name__ for package in PUBLIC}


def resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.fixture(scope="module")
def classes() -> dict[str, set[type]]:
    """Return the classes of the three packages by name."""
    found: dict[str, set[type]] = {}
    for root in (partita, partita_schema, partita_trainers):
        for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if module.name.endswith("__main__") or module.name == "partita.simulation.adapters.gymnasium":
                continue
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, type) and value.__module__.startswith("partita"):
                    found.setdefault(name, set()).add(value)
    return found


def test_every_class_in_annotations_of_public_classes_is_public(classes: dict[str, set[type]]) -> None:
    public = {id(getattr(package, name)) for package, name in EXPORTED}
    missing = [
        f"{package.__name__}.{name} names {word}"
        for package, name in EXPORTED
        if inspect.isclass(value := getattr(package, name)) and name != "Config"
        for word in sorted(words_of(value))
        if word in classes and word not in OF_THE_PIPELINE and not public & set(map(id, classes[word]))
    ]
    assert missing == []


def words_of(kind: type) -> set[str]:
    """Return the names in annotations of public methods, properties and fields, and of `__init__` if users call it."""
    members = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    if kind.__name__ in CREATED_BY_USERS:
        members["__init__"] = vars(kind)["__init__"]
    annotated = [getattr(value, "fget", None) or getattr(value, "__func__", value) for value in members.values()]
    annotations = [note for one in annotated if callable(one) for note in getattr(one, "__annotations__", {}).values()]
    annotations += [note for name, note in vars(kind).get("__annotations__", {}).items() if not name.startswith("_")]
    return {word for note in annotations for word in words_in(note)}


def words_in(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, str):
        yield from re.findall(r"\b[A-Z]\w+", annotation)
    elif isinstance(annotation, type) and not get_args(annotation):
        yield annotation.__name__
    for part in get_args(annotation):
        yield from words_in(part)


STATE_OF = {"Rollout", "Transcripts", "TrainingProbe"}
"""Public classes whose reference lists only some members; the others are internal state."""


def test_every_field_and_method_of_a_public_class_has_a_docstring() -> None:
    silent = [
        f"{package.__name__}.{name}.{member}"
        for package, name in EXPORTED
        if inspect.isclass(value := getattr(package, name)) and name not in {"Config", "Segment"} | STATE_OF
        for member in undescribed_members(value)
    ]
    assert silent == []


def undescribed_members(kind: type) -> Iterator[str]:
    """Yield fields, properties and methods without a docstring. The docstring of a field is the text after it."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    for node, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            if not any(ast.unparse(one) == "overload" for one in node.decorator_list):
                yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not node.target.id.startswith("_") and not described:
                yield node.target.id
