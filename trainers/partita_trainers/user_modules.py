"""Python modules that a configuration names as `module:Class`: their import, and the source that was imported.

A process imports a module once. A second file of the same name is therefore refused, and a hash is that of the source
as it was imported, not of a file that has been edited since.
"""

import ast
import importlib
import importlib.util
import inspect
import logging
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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


def check_arguments(kind: Callable[..., object], /, *args: object, **options: object) -> None:
    """Raise TypeError if a class or function cannot be called so; those that do not say what they take are accepted."""
    with suppress(ValueError):  # classes and functions of C
        inspect.signature(kind).bind(*args, **options)


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
    root, file = root_of(module), file_of(module)
    if root is None or file is None:
        return False
    relative = file.relative_to(root)
    return digests_in(root, relative, module.__name__) == digests_in(folder, relative, module.__name__)


def digests_in(root: Path, relative: Path, name: str) -> dict[Path, str]:
    """Return a hash of a module in a folder, and of each that it imports from there, by path relative to the folder."""
    sources = user_sources(root / relative, name=name, root=root)
    return {path.relative_to(root): source.digest for path, source in sources.items()}


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


_sources: dict[Path, tuple[object, Source]] = {}
"""By file of an imported module: the spec of its import, and the source."""


def source_of(file: Path, name: str) -> Source | None:
    """Return the source of a module as it was imported, or as it is if it is not imported; None if it cannot be read.

    The source of an imported module is that of the first call, which `load_class` makes at the import.
    """
    imported = sys.modules.get(name)
    spec = imported.__spec__ if imported is not None and file_of(imported) == file else None
    known, source = _sources.get(file, (None, None))
    if source is not None and spec is not None and known is spec:  # a reload has a new spec
        return source
    try:
        content = file.read_bytes()
    except OSError:
        return None
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    source = Source(digest_of(content), tuple(imports_in(content, package=package)))
    if spec is not None:
        _sources[file] = spec, source
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
                try:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                except ImportError:  # beyond the top: the import fails, and the module may catch that
                    continue
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def user_sources(file: Path, *, name: str, root: Path | None) -> dict[Path, Source]:
    """Return the sources of a module, and of those that it imports from a folder, also indirectly, in order of files.

    Imports are followed by their names, so that the result does not depend on what has been imported.

    Args:
        file: File of the module.
        name: Name of the module.
        root: The folder; None for the module alone.
    """
    found: dict[Path, Source] = {}
    waiting = [(file, name)]
    while waiting:
        one, called = waiting.pop()
        source = source_of(one, called) if one not in found else None
        if source is None:
            continue
        found[one] = source
        if root is not None:
            names = {part for full in source.imports for part in parents(full)}
            waiting += [(there, part) for part in names if (there := file_in(root, part)) is not None]
    return dict(sorted(found.items()))


def file_in(root: Path, name: str) -> Path | None:
    """Return the file of a module in a folder; None if it is not there, or part of partita."""
    first, *rest = name.split(".")
    if first in OWN_PACKAGES or not first:
        return None
    path = root.joinpath(first, *rest)
    return next(
        (one.resolve() for one in (path / "__init__.py", path.with_name(f"{path.name}.py")) if one.is_file()), None
    )


def sources_of(module: ModuleType) -> dict[Path, Source]:
    """Return the sources of an imported module, and of what it imports from its folder; see `user_sources`.

    Of an installed package, or of partita, only the module itself: its version says what else it runs.
    """
    file = file_of(module)
    return {} if file is None else user_sources(file, name=module.__name__, root=root_of(module))


def root_of(module: ModuleType) -> Path | None:
    """Return the folder that a module was found in; None for an installed package and for partita."""
    top = module.__name__.partition(".")[0]
    file = file_of(sys.modules.get(top, module))
    if file is None or top in OWN_PACKAGES:
        return None
    root = folder_of(file)
    standard = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    is_installed = root in standard or root.name in ("site-packages", "dist-packages")
    return None if is_installed or any(root.glob("*.dist-info")) else root


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
    """Return a hash of the source of a module, and of each that it imports from its folder; see `sources_of`."""
    return [source.digest for source in sources_of(module).values()]


def warn_of_changes(module: ModuleType) -> None:
    """Warn if the source of a module, or of one that it imports from its folder, has changed since its import."""
    for file, source in sources_of(module).items():
        if file.is_file() and (current := digest_of(file.read_bytes())) != source.digest:
            warn_of_change(file, current)


@cache
def warn_of_change(file: Path, current: str) -> None:
    """Warn once that a file with this hash is not what this process has imported."""
    logger.warning("%s has changed since this process imported it, and the code from before runs; restart Python", file)
