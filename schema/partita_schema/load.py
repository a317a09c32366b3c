"""Loading of a configuration from files, text, dictionaries or a Config, with overrides.

All problems are reported in one ConfigError. Nothing is downloaded, no data is opened and torch is not imported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from partita_schema.checked import check_tree
from partita_schema.config import Config
from partita_schema.errors import ConfigError, Problem
from partita_schema.layers import ConfigSource, in_file_order, is_ludwig, read_layers
from partita_schema.yaml.overrides import apply_overrides, path_of
from partita_schema.yaml.tree import Node, dotted
from partita_schema.yaml.variables import expand_variables


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration with its source."""

    config: Config
    """The checked configuration, with `defaults` applied to its features."""
    text: str | None
    """The YAML text as written, or merged from several files. None for a dictionary or Config."""
    file: str | None
    """Path of the file as passed by the caller, the last one of several, or None."""
    folder: Path
    """Base folder of relative paths: the folder of the file, otherwise the current folder."""
    files: tuple[str, ...]
    """All files that were read, each after those that it extends."""
    warnings: tuple[Problem, ...]
    """Warnings about keys of a Ludwig file that have no effect."""
    origins: Mapping[str, str] = field(repr=False)
    """Origin of each value, by path: `FILE:LINE`, `default`, `--set`, `given` (a dictionary or Config), or `ludwig`
    with the original key."""


def load_config(source: ConfigSource, *, overrides: Sequence[str] = (), finished: bool = False) -> LoadedConfig:
    """Return the checked configuration, merged with the files that it extends.

    Args:
        source: A path, YAML text, a dictionary or a Config; or a list of these, each merged over those before it. A str
            with a line break or `: ` is YAML text, any other str is a path.
        overrides: Values for keys, such as `trainer.epochs=1`.
        finished: Whether this is the configuration of a finished run, which is not trained again.

    Raises:
        ConfigError: The configuration is invalid. It has every problem.
    """
    layers = read_layers(source)
    root = layers.root
    spared = tuple(path_of(override.partition("=")[0]) for override in overrides)
    problems = (*layers.problems, *expand_variables(root, spared=spared))
    warnings = converted(root) if is_ludwig(root) else ()
    folder = Path(layers.file).parent if layers.file is not None else Path()
    if len(layers.files) > 1 or (layers.files and layers.file is None):
        from partita_schema.yaml.relative_paths import rewrite_relative_paths

        rewrite_relative_paths(root, folder=folder)
    apply_overrides(root, overrides)
    config = checked_config(root, problems, files=layers.files, finished=finished)
    return LoadedConfig(
        config=config,
        text=layers.text,
        file=layers.file,
        folder=folder,
        files=layers.files,
        warnings=warnings,
        origins=origins_of(config, root),
    )


def converted(root: Node) -> tuple[Problem, ...]:
    """Convert a Ludwig tree in place, and return warnings."""
    from partita_schema.compat.ludwig import convert_ludwig

    return convert_ludwig(root)


def checked_config(root: Node, syntax_problems: tuple[Problem, ...], *, files: Sequence[str], finished: bool) -> Config:
    """Return the configuration in a tree, with the defaults of its text inputs filled in.

    Args:
        root: The tree.
        syntax_problems: Problems of the text of the files, which are reported with the others.
        files: The files in the order in which problems are listed.
        finished: Whether the file is that of a finished run, which may answer in another number format.

    Raises:
        ConfigError: With all problems.
    """
    checked = check_tree(root, finished=finished)
    reported = {(problem.path, problem.file) for problem in syntax_problems}
    others = [problem for problem in checked.problems if (problem.path, problem.file) not in reported]
    problems = [*syntax_problems, *others]
    if checked.config is None or problems:
        from partita_schema.compat.tools.names import hint_of_tool

        raise ConfigError([*hint_of_tool(root, problems, files=files), *in_file_order(problems, files)])
    config = checked.config
    if fill_defaults(root):
        again = check_tree(root, finished=finished)
        if again.config is None:
            raise ConfigError(again.problems)
        config = again.config
    if config.sweep is not None:
        from partita_schema.sweep_values import problems_of_sweep, read_values

        if wrong := problems_of_sweep(root):
            raise ConfigError(in_file_order(list(wrong), files))
        if read_values(root):
            config = check_tree(root, finished=finished).config or config
    return config


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
