"""Tests that public functions with more than three parameters describe each of them under `Args:`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from partita.cli.main import app

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "framework" / "partita", ROOT / "schema" / "partita_schema", ROOT / "trainers" / "partita_trainers"]
MOST_WITHOUT_ARGS = 3
GROUPS = [group.typer_instance for group in app.registered_groups if group.typer_instance is not None]
COMMANDS = {
    command.callback.__name__
    for group in (app, *GROUPS)
    for command in group.registered_commands
    if command.callback is not None
}
"""Functions of `partita.cli` whose parameters are options, each with a help text."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_every_public_function_with_more_than_three_parameters_describes_each() -> None:
    wrong = {}
    for place, function in public_functions():
        names, others = parameters_of(function)
        described = described_in(ast.get_docstring(function) or "")
        missing = names - described if len(names) > MOST_WITHOUT_ARGS else set()
        if missing or described - names - others:
            wrong[place] = f"missing: {sorted(missing)}, unknown: {sorted(described - names - others)}"
    assert wrong == {}


def test_an_undescribed_parameter_is_detected() -> None:
    function = ast.parse(
        'def f(a, b, *, c, **rest):\n    """Do it.\n\n    Args:\n        a: A.\n        c: C.\n    """'
    ).body[0]
    assert isinstance(function, Function)
    assert parameters_of(function) == ({"a", "b", "c"}, {"rest"})
    assert described_in(ast.get_docstring(function) or "") == {"a", "c"}


def public_functions() -> Iterator[tuple[str, Function]]:
    """Yield functions, methods and constructors with public names in public classes."""
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf8"))
            for name, function in functions_in(tree.body, prefix=""):
                if "cli" not in path.parts or name not in COMMANDS:
                    yield f"{path.relative_to(package.parent)}: {name}", function


def functions_in(body: list[ast.stmt], *, prefix: str) -> Iterator[tuple[str, Function]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions_in(node.body, prefix=f"{prefix}{node.name}.")
        elif isinstance(node, Function) and is_public(node):
            yield f"{prefix}{node.name}", node


def is_public(function: Function) -> bool:
    """Return whether to check a function: not commands, overloads, or methods that refer to the one they implement."""
    overload = any(ast.unparse(one) == "overload" for one in function.decorator_list)
    refers = re.search(r"\b[Ss]ee `|^Use `", ast.get_docstring(function) or "")
    public = not function.name.startswith("_") or function.name == "__init__"
    return public and not refers and not overload


def parameters_of(function: Function) -> tuple[set[str], set[str]]:
    """Return the names of the parameters without `self`, and of `*args` and `**kwargs`, which need no description."""
    args = function.args
    named = {one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
    return named - {"self", "cls"}, {one.arg for one in (args.vararg, args.kwarg) if one is not None}


def described_in(docstring: str) -> set[str]:
    """Return the names under `Args:`, which ends at the next line with the indentation of its heading."""
    section = re.search(r"^Args:\n((?: {4}.*\n?|\n)+)", docstring, re.MULTILINE)
    return set(re.findall(r"^ {4}\*{0,2}(\w+):", section[1], re.MULTILINE)) if section is not None else set()
