"""Environment variables in configuration values: `${NAME}` and `${NAME:-default}`.

Values from YAML and --set are expanded. Keys, Python dictionaries, and texts with column names in braces
(`prompt.template`, prompts of simulations) are not. `$${` is a literal `${`. A quoted value stays a string. A plain
value is read as if the expanded text were in the file, but always as one scalar.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from partita_schema.errors import Problem
from partita_schema.yaml.parse import plain_value
from partita_schema.yaml.tree import Node, Path, dotted

VARIABLE = re.compile(r"\$\$(?=\{)|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<rest>:-(?P<default>[^{}]*))?\})?")
SECRET = re.compile(r"(^|_)(KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
"""Names of variables that may contain a secret, which must not be written to the files of a run."""


class VariableError(ValueError):
    """A reference that cannot be expanded. The text says what to write instead."""


def expand_variables(root: Node, *, spared: tuple[Path, ...] = (), at: Path = ()) -> Iterator[Problem]:
    """Expand every value below `root` in place, and yield a problem for each that cannot be expanded.

    Args:
        root: The tree, or a part of it.
        spared: Paths that are overridden, where a missing variable does not matter.
        at: Path of `root` in the whole tree.
    """
    for key, child in root.children():
        path = (*at, key)
        if path not in spared:
            yield from expand_variables(child, spared=spared, at=path)
    if not isinstance(root.value, str) or root.position is None or "${" not in root.value or is_template(at):
        return
    written = root.value
    try:
        text = expanded(written, os.environ)
    except VariableError as error:
        yield Problem(dotted(at), str(error), root.position.file, root.position.line, root.position.column)
        return
    if text != written.replace("$${", "${"):
        root.reference = written
        # One line, because the origin is written as a comment.
        root.origin = f"{root.origin or root.position}: {' '.join(written.split())[:60]}"
    root.value = text if root.text is None else plain_value(text)
    root.text = text if root.text is not None else None


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Return the text with variables replaced by their values. Raises VariableError."""

    def value_of(match: re.Match[str]) -> str:
        if match.group() == "$$":
            return "$"
        name = match["name"]
        if name is None:
            raise VariableError("${ opens no variable; write ${NAME} or ${NAME:-default}, or $${ for the text ${")
        if SECRET.search(name):
            raise VariableError(
                f"{name} looks like a secret, and values of the configuration are written into the files of a run; "
                "write backend.api_key_env: NAME for the key of a server, or rename the variable"
            )
        value = variables.get(name, "")
        if not value and match["rest"] is not None:
            return match["default"] or ""
        if name not in variables:
            raise VariableError(
                f"the environment variable {name} is not set; run `export {name}=...` first, or write "
                f"${{{name}:-default}}, or $${{{name}}} for the text itself"
            )
        try:
            value.encode()
        except UnicodeEncodeError:
            raise VariableError(f"the environment variable {name} is not UTF-8; set it to a text") from None
        return value

    return VARIABLE.sub(value_of, text)


def escaped(value: Any, path: Path = ()) -> Any:
    """Return a value as it must be written so that it is not expanded: `${` becomes `$${`."""
    if isinstance(value, dict):
        return {key: escaped(item, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item, (*path, index)) for index, item in enumerate(value)]
    return value.replace("${", "$${") if isinstance(value, str) and not is_template(path) else value


def is_template(path: Path) -> bool:
    """Return whether braces in the text at a path are column names, so that `${price}` is a dollar sign before a
    column."""
    names = [part for part in path if isinstance(part, str)]
    if names[-2:] == ["prompt", "template"] or names == ["simulation", "world", "first"]:
        return True
    return names[:2] == ["simulation", "agents"] and names[-1] in ("prompt", "lines") and "options" not in names
