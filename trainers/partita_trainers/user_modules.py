"""Python modules that a configuration names as `module:Class`: their import, and the source that was imported.

A process imports a module once. A second file of the same name is therefore refused, and a hash is that of the source
as it was imported, not of a file that has been edited since.
"""

import ast
import importlib
import importlib.util
import logging
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from partita_schema.common.text import nearest
from partita_schema.errors import ConfigError, Problem

logger = logging.getLogger(__name__)

OWN_PACKAGES = ("partita", "partita_schema", "partita_trainers")


@contextmanager
def importable(folder: Path | None) -> Iterator[None]:
    """Allow imports from `folder` inside the context, after all other paths."""
    path = str(folder.resolve()) if folder is not None else None
    if path is None or path in sys.path:
        yield
        return
    sys.path.append(path)
    try:
        yield
    finally:
        sys.path.remove(path)


def load_class(target: str, *, key: str = "trainer.target", folder: Path | None = None) -> type:
    """Return the class at `module:Class`.

    Args:
        target: Module and class.
        key: The key that names them.
        folder: Folder of the configuration file, in which the module is searched after all other paths.

    Raises:
        ConfigError: There is no such module or class, or another module of this name was imported before.
    """
    module_name, _, class_name = target.partition(":")
    with importable(folder):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            message = f"there is no module {error.name}; install it or put its folder on PYTHONPATH"
            raise ConfigError([Problem(key, message)]) from None
        check_is_found(module, key=key)
    warn_of_changes(module)
    attribute = getattr(module, class_name, None)
    if isinstance(attribute, type):
        return attribute
    hidden = hidden_file(module, folder)
    if hidden is not None:
        message = (
            f"the module {module_name} is {module.__file__}, because installed modules come first, and has no class "
            f"{class_name}; rename {hidden}"
        )
        raise ConfigError([Problem(key, message)])
    classes = [name for name, value in vars(module).items() if isinstance(value, type)]
    near = nearest(class_name, classes)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError([Problem(key, f"module {module_name} has no class {class_name}{hint}")])


def check_is_found(module: ModuleType, *, key: str) -> None:
    """Raise ConfigError if an import would now find other source than what this process has imported under the name."""
    top = module.__name__.partition(".")[0]
    imported = file_of(sys.modules[top])
    specs = (finder.find_spec(top, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    spec = next((spec for spec in specs if spec is not None), None)
    if imported is None or spec is None or not spec.has_location or spec.origin is None:
        return
    found = Path(spec.origin).resolve()
    if found != imported and not is_copy(module, folder_of(found)):
        message = (
            f"the module {top} is {found}, and this process has imported {imported} under that name; rename one of "
            "them, or use another process"
        )
        raise ConfigError([Problem(key, message)])


def is_copy(module: ModuleType, folder: Path) -> bool:
    """Return whether a folder has the same source as the one that a module, and what it imports, was imported from."""
    root = root_of(module)
    sources = {file: source_of(one, file) for one in user_modules(module) if (file := file_of(one)) is not None}
    return root is not None and all(
        (copy := folder / file.relative_to(root)).is_file() and digest_of(copy.read_bytes()) == source.digest
        for file, source in sources.items()
    )


def hidden_file(module: ModuleType, folder: Path | None) -> Path | None:
    """Return the file in a folder that has the name of an installed module; None without one."""
    if folder is None or root_of(module) is not None:
        return None
    top = module.__name__.partition(".")[0]
    own = (folder.resolve() / f"{top}.py", folder.resolve() / top / "__init__.py")
    return next((path for path in own if path.is_file() and path != file_of(sys.modules[top])), None)


def file_of(module: ModuleType) -> Path | None:
    """Return the file of a module; None if it has none."""
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file is not None else None


@dataclass(frozen=True)
class Source:
    """The source of a module."""

    digest: str
    """A hash of the file."""
    imports: tuple[str, ...]
    """Names of what it imports: modules, and whatever else stands in `from module import name`."""


_sources: dict[str, tuple[object, Source]] = {}
"""By module name: the spec of an import, and the source."""


def source_of(module: ModuleType, file: Path) -> Source:
    """Return the source of a module as it was when it was first asked for, which `load_class` does at the import."""
    spec, source = _sources.get(module.__name__, (None, None))
    if source is None or spec is not module.__spec__:  # a reload has a new spec
        content = file.read_bytes()
        imports = tuple(imports_in(content, package=module.__package__ or ""))
        source = Source(digest_of(content), imports)
        _sources[module.__name__] = module.__spec__, source
    return source


def imports_in(content: bytes, *, package: str) -> Iterator[str]:
    """Yield the names that a source file imports, relative ones in terms of its package."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # a compiled module
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def user_modules(module: ModuleType) -> list[ModuleType]:
    """Return a module and those that it imports from the same folder or below, also indirectly, in order of names.

    Of an installed package, or of partita, only the module itself: its version says what else it runs.
    """
    found, waiting = {module.__name__: module}, [module]
    root = root_of(module)
    while root is not None and waiting:
        one = waiting.pop()
        file = file_of(one)
        imports = source_of(one, file).imports if file is not None else ()
        for name in (part for full in imports for part in parents(full)):
            other = sys.modules.get(name)
            there = file_of(other) if other is not None and name not in found else None
            if other is not None and there is not None and there.is_relative_to(root):
                found[name] = other
                waiting.append(other)
    return [found[name] for name in sorted(found)]


def root_of(module: ModuleType) -> Path | None:
    """Return the folder that a module was found in; None for an installed package and for partita."""
    top = module.__name__.partition(".")[0]
    file = file_of(sys.modules.get(top, module))
    if file is None or top in OWN_PACKAGES:
        return None
    root = folder_of(file)
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    return None if root in installed else root


def folder_of(file: Path) -> Path:
    """Return the folder in which a module is found, given its file."""
    return file.parent.parent if file.name == "__init__.py" else file.parent


def digest_of(content: bytes) -> str:
    """Return a hash of a file's content."""
    return sha256(content).hexdigest()


def parents(name: str) -> Sequence[str]:
    """Return `a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def source_digests(module: ModuleType) -> list[str]:
    """Return a hash of the source of a module, and of each that it imports from its folder; see `user_modules`."""
    return [source_of(one, file).digest for one in user_modules(module) if (file := file_of(one)) is not None]


def warn_of_changes(module: ModuleType) -> None:
    """Warn if the source of a module, or of one that it imports from its folder, has changed since its import."""
    for one in user_modules(module):
        file = file_of(one)
        if file is not None and file.is_file():
            current = digest_of(file.read_bytes())
            if source_of(one, file).digest != current:
                warn_of_change(file, current)


@cache
def warn_of_change(file: Path, current: str) -> None:
    """Warn once that a file with this hash is not what this process has imported."""
    logger.warning("%s has changed since this process imported it, and the code from before runs; restart Python", file)
