"""The configuration of a finished run or a saved model."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from partita.runs.manifest import MANIFESTS, manifest_path, read_manifest, read_status, sibling_runs
from partita.runs.settings import check_has_effect
from partita_schema.code import code_of
from partita_schema.config import Config
from partita_schema.errors import ConfigError, PartitaError, Problem
from partita_schema.load import LoadedConfig, load_config
from partita_schema.yaml.overrides import ORIGIN as OVERRIDES


def load_finished(folder: Path, *, overrides: Sequence[str] = (), trust_remote_code: bool = False) -> LoadedConfig:
    """Return the configuration of a run directory or a saved model.

    Args:
        folder: The run directory or the saved model.
        overrides: Values for keys of its configuration.
        trust_remote_code: Whether the code that it names may run.

    Raises:
        PartitaError: The folder is neither, its run is not finished, or its manifest cannot be read.
        ConfigError: An override is invalid or has no effect, or the folder names code that may not run.
    """
    manifest, path = read_manifest(folder), manifest_path(folder)
    if path is None or not manifest:
        raise PartitaError(
            f"{folder} is neither a run directory nor a saved model: it has no {' or '.join(MANIFESTS)}"
            f"{sibling_runs(folder)}"
        )
    if manifest.get("status") != "done":
        raise PartitaError(
            f"the run in {folder} is not finished ({read_status(folder)}); partita runs show "
            f"{shlex.quote(str(folder))} prints the command that continues it"
        )
    if "config" not in manifest:
        raise PartitaError(f"{path} has no config, so its prompt and outputs are unknown; restore it")
    try:
        loaded = load_config(manifest["config"], overrides=overrides, finished=True)
    except ConfigError as error:
        raise ConfigError([replace(problem, file=problem.file or str(path)) for problem in error.problems]) from None
    if overrides:
        check_overrides(folder, load_config(manifest["config"], finished=True).config, loaded.config)
    if not trust_remote_code:
        refuse_code(loaded, path, of="model")
    return replace(loaded, folder=Path(manifest.get("folder", ".")))


def check_overrides(folder: Path, recorded: Config, wanted: Config) -> None:
    """Raise ConfigError if overrides change values of a folder that cannot have an effect.

    Args:
        folder: The run directory or the saved model.
        recorded: Its configuration.
        wanted: The configuration with overrides.
    """
    if wanted.trust_remote_code and not recorded.trust_remote_code:
        message = (
            "has no effect for a folder; set the option --trust-remote-code instead, or in Python "
            "Model.load(folder, trust_remote_code=True)"
        )
        raise ConfigError([Problem("trust_remote_code", message)])
    if wanted.defaults != recorded.defaults:
        message = "has no effect on a run, whose inputs have their own values; set input_features.0.preprocessing.KEY"
        raise ConfigError([Problem("defaults", message)])
    weights = trained_weights(folder)
    if weights is not None:
        old, new = (config.model_dump(mode="json") for config in (recorded, wanted))
        check_has_effect(old, new, folder=folder, base_is_loaded=(weights / "adapter_config.json").exists())


def trained_weights(folder: Path) -> Path | None:
    """Return the folder of the weights of a run or a saved model; None if nothing was trained."""
    inner = folder / "model" if (folder / "model").is_dir() else folder
    return inner if (inner / "tokenizer_config.json").exists() else None


def refuse_code(loaded: LoadedConfig, manifest: Path, *, of: str) -> None:
    """Raise ConfigError if a saved model names code that would run now.

    Args:
        loaded: Its configuration.
        manifest: The file that it is from.
        of: The step that would run the code, as for `code_of`.
    """
    allow = "allow them with --trust-remote-code, in Python with Model.load(folder, trust_remote_code=True)"
    code = code_of(loaded.config, of=of)
    theirs = [one for one in code if loaded.origins.get(one.key) != OVERRIDES]
    problems = [
        Problem(
            one.key,
            f"{OVERRIDES} names {one.value}, and classes that are not in installed packages may come from the "
            f"folder of the model; look at them, then {allow}",
        )
        for one in code
        if one not in theirs
    ]
    if theirs:
        message = (
            f"would run code or contact addresses chosen by the author of this folder "
            f"({'; '.join(map(str, theirs))}); look at them, then {allow}, or name your own YAML file instead of "
            "the folder"
        )
        problems.insert(0, Problem("", message, file=str(manifest)))
    if problems:
        raise ConfigError(problems)
