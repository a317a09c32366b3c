"""Loading of a configuration from a file, text, dictionary or Config, with overrides.

All problems are reported in one ConfigError. Nothing is downloaded, no data is opened and torch is not imported.
"""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem, shortened
from partita_schema.yaml.overrides import apply_overrides, path_of
from partita_schema.yaml.parse import read_yaml
from partita_schema.yaml.tree import Node, dotted, tree_of
from partita_schema.yaml.variables import expand_variables

MAX_BYTES = 1_000_000
"""Maximum size of a configuration file in bytes."""


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration with its source."""

    config: Config
    """The checked configuration, with `defaults` applied to its features."""
    text: str | None
    """The YAML text as written, or None for a dictionary or Config."""
    file: str | None
    """Path of the file as passed by the caller, or None."""
    folder: Path
    """Base folder of relative paths: the folder of the file, otherwise the current folder."""
    warnings: tuple[Problem, ...]
    """Warnings about keys of a Ludwig file that have no effect."""
    origins: Mapping[str, str] = field(repr=False)
    """Origin of each value, by path: `FILE:LINE`, `default`, `--set`, `given` (a dictionary or Config), or `ludwig`
    with the original key."""


def load_config(source: "str | Path | Mapping[str, object] | Config", *, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Return the checked configuration. A str with a line break or `: ` is YAML text, any other str is a path.

    Raises:
        ConfigError: The configuration is invalid. It has every problem.
    """
    file = str(source) if isinstance(source, Path) or (isinstance(source, str) and not is_text(source)) else None
    if not isinstance(source, str | Path | Mapping | Config):
        message = f"the configuration is {shortened(repr(source))}; write a path, YAML text, a dictionary or a Config"
        raise ConfigError([Problem("", message)])
    text, syntax_problems = None, tuple[Problem, ...]()
    if isinstance(source, Config):
        root = tree_of(source.model_dump(mode="json", exclude_unset=True))
    elif isinstance(source, Mapping):
        root = tree_of(source)
    else:
        text = read_text(Path(file)) if file is not None else str(source)
        root, syntax_problems = read_yaml(sound_text(text, file), file=file)
        spared = tuple(path_of(override.partition("=")[0]) for override in overrides)
        syntax_problems = (*syntax_problems, *expand_variables(root, spared=spared))
    warnings = converted(root) if is_ludwig(root) else ()
    apply_overrides(root, overrides)
    config = checked_config(root, syntax_problems)
    return LoadedConfig(
        config=config,
        text=text,
        file=file,
        folder=Path(file).parent if file is not None else Path(),
        warnings=warnings,
        origins=origins_of(config, root),
    )


def is_text(source: str) -> bool:
    return "\n" in source or ": " in source


def is_ludwig(root: Node) -> bool:
    kind = root.find(("model_type",))
    return kind is not None and kind.value == "llm" and root.find(("version",)) is None


def converted(root: Node) -> tuple[Problem, ...]:
    """Convert a Ludwig tree in place, and return warnings."""
    from partita_schema.compat.ludwig import convert_ludwig

    return convert_ludwig(root)


def sound_text(text: str, file: str | None) -> str:
    if len(text) > MAX_BYTES:
        raise ConfigError([Problem("", f"holds more than {MAX_BYTES:,} bytes; a configuration is a few lines", file)])
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text[: error.start].count("\n") + 1
        message = "holds half a character (a surrogate); write the whole one"
        raise ConfigError([Problem("", message, file, line)]) from None
    return text


def checked_config(root: Node, syntax_problems: tuple[Problem, ...]) -> Config:
    checked = check_tree(root)
    reported = {problem.path for problem in syntax_problems}
    problems = [*syntax_problems, *(problem for problem in checked.problems if problem.path not in reported)]
    if checked.config is None or problems:
        raise ConfigError(sorted(problems, key=lambda p: (p.line is None, p.line or 0, p.column or 0)))
    if not fill_defaults(root):
        return checked.config
    again = check_tree(root)
    if again.config is None:
        raise ConfigError(again.problems)
    return again.config


def fill_defaults(root: Node) -> bool:
    """Copy `defaults` to the text inputs that do not override them. Return whether `defaults` is set."""
    defaults = root.find(("defaults", "text", "preprocessing"))
    features = root.find(("input_features",))
    if defaults is None or features is None:
        return False
    for _, feature in features.children():
        written = feature.find(("type",))
        if written is not None and written.value != "text":
            continue
        own = feature.mapping().setdefault("preprocessing", Node({}))
        for key, value in defaults.mapping().items():
            own.mapping().setdefault(key, value.copy())
    return True


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError if it does not exist or cannot be YAML."""
    file = str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError([Problem("", f"there is no such file{near_files(path)}", file)]) from None
    except IsADirectoryError:
        raise ConfigError([Problem("", about_folder(path), file)]) from None
    except (OSError, ValueError) as error:
        raise ConfigError([Problem("", f"cannot be read ({error}); check the path", file)]) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError([Problem("", f"holds more than {MAX_BYTES:,} bytes; a configuration is a few lines", file)])
    return decoded(raw, file)


def about_folder(path: Path) -> str:
    """Return the error text for a folder. For the folder of a run, suggest its resolved.yaml."""
    resolved = path / "resolved.yaml"
    if resolved.is_file():
        return f"is the folder of a run; write {resolved}, which holds every value of the run with its origin"
    names = yaml_names(path)
    return "is a folder; write the YAML file in it" + (f": {', '.join(names[:5])}" if names else "")


def yaml_names(folder: Path) -> list[str]:
    """Return the names of up to 1,000 YAML files in a folder."""
    try:
        return sorted(child.name for child in folder.iterdir() if child.suffix in (".yaml", ".yml"))[:1000]
    except OSError:
        return []


def decoded(raw: bytes, file: str) -> str:
    utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if b"\0" in raw and not utf16:
        raise ConfigError([Problem("", "holds zero bytes: no text, or UTF-16 without a mark; save it as UTF-8", file)])
    try:
        return raw.decode("utf-16" if utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        name = "UTF-16, with whose mark the file begins" if utf16 else "UTF-8"
        message = f"byte 0x{raw[error.start]:02x} is not {name}; save the file as UTF-8"
        raise ConfigError([Problem("", message, file, line)]) from None


def near_files(path: Path) -> str:
    """Return `; did you mean ...?`, or the YAML files in the folder."""
    folder = path.parent
    if not folder.is_dir():
        return f"; there is no folder {folder}"
    from partita_schema.common.text import nearest

    names = yaml_names(folder)
    near = nearest(path.name, names) or [name for name in names if Path(name).stem == path.stem]
    if near:
        return f"; did you mean {' or '.join(str(folder / name) for name in near)}?"
    return f"; YAML files there: {', '.join(names[:5])}" if names else "; there is no YAML file in its folder"


def origins_of(config: Config, root: Node) -> dict[str, str]:
    """Return the origin of each value, by path."""
    origins: dict[str, str] = {}

    def visit(value: object, path: tuple[str | int, ...]) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                visit(item, (*path, str(key)))
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                visit(item, (*path, index))
        else:
            origins[dotted(path)] = origin_of(root.find(path))

    visit(config.model_dump(mode="json"), ())
    return origins


def origin_of(node: Node | None) -> str:
    if node is None:
        return "default"
    if node.origin is not None:
        return node.origin
    return str(node.key_position or node.position) if node.position else "given"


@dataclass(frozen=True)
class Checked:
    """The result of a check: a configuration, or problems."""

    config: Config | None
    problems: tuple[Problem, ...]


def check_tree(root: Node) -> Checked:
    """Return the configuration of a tree, or every problem in file order."""
    try:
        return Checked(Config.model_validate(root.plain()), ())
    except ValidationError as error:
        from partita_schema.problems.repair import problems_of

        return Checked(None, problems_of(root, error))
