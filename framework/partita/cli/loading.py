"""Loading the model that a command works on, in the processes that its configuration asks for."""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from partita.backends.refusals import USE_THIS_PROCESS
from partita_schema.common.garbage_collection import permanent_imports
from partita_schema.errors import ConfigError, Problem

if TYPE_CHECKING:
    from partita.model import Model
    from partita_schema.config import Config


@contextmanager
def loading_libraries(*, line: bool = True) -> Iterator[None]:
    """Import libraries in the context, and show that the command waits for them.

    `line` says whether to print a line where standard error is no terminal.
    """
    from partita.runs.waiting import waiting

    with waiting("loading libraries", line=line), permanent_imports():
        yield


def open_model(
    paths: Sequence[Path],
    *,
    overrides: list[str],
    quiet: bool,
    trust_remote_code: bool = False,
    one_process: bool = False,
) -> "Model":
    """Load the model of YAML files, which are merged, or of a run directory, in this process.

    A file states with its own key `trust_remote_code` whether its code may run; the option overrides the key. For a
    directory, only the option allows the code that it names. Its model is loaded here also if several processes or
    Ray have trained it.

    Args:
        paths: YAML files, or a run directory or a saved model.
        overrides: Values for keys of the file, as of `--set`.
        quiet: Show no progress.
        trust_remote_code: Whether the option of this name was set.
        one_process: Whether to refuse a file that asks for several processes.

    Raises:
        ConfigError: If there is no such file or run, a run is named with other files, or the configuration is invalid.
    """
    overrides = in_this_process(paths, overrides)
    config = checked_config(paths, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code)
    if one_process and asks_for_processes(config):
        raise ConfigError([Problem("backend", f"this command runs in one process; {USE_THIS_PROCESS}")])
    return load_model(paths, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code)


def in_this_process(paths: Sequence[Path], overrides: list[str]) -> list[str]:
    """Return overrides with which the model of a folder is loaded in this process, unless they choose a backend."""
    from partita.runs.manifest import read_manifest

    if not paths[0].is_dir() or any(one.startswith("backend") for one in overrides):
        return overrides
    recorded = read_manifest(paths[0]).get("config", {}).get("backend") or {}
    return [*overrides, "backend={type: local}"] if recorded.get("type") in ("torchrun", "ray") else overrides


def load_model(paths: Sequence[Path], *, overrides: list[str], quiet: bool, trust_remote_code: bool) -> "Model":
    """Load libraries, and the model of checked paths; see `open_model` for the arguments."""
    from partita.distributed.world import LAUNCHED

    with loading_libraries(line=LAUNCHED not in os.environ):  # the launcher has printed the line
        from partita.model import Model
    if paths[0].is_dir():
        return Model.load(paths[0], overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code)
    return Model(list(paths), overrides=with_trust(overrides, trust_remote_code), quiet=quiet)


def with_trust(overrides: list[str], trust_remote_code: bool) -> list[str]:
    """Return overrides of a file, with the option that replaces its key `trust_remote_code`."""
    return [*overrides, "trust_remote_code=true"] if trust_remote_code else overrides


def checked_config(paths: Sequence[Path], *, overrides: list[str], quiet: bool, trust_remote_code: bool) -> "Config":
    """Return the configuration of YAML files, or of a run directory, without loading libraries.

    See `open_model` for the arguments and errors.
    """
    from partita.distributed.world import get_world
    from partita.runs.log import show_log

    show_log(quiet=quiet, rank=get_world().rank)
    for path in paths:
        check_there(path)
    folders = [path for path in paths if path.is_dir()]
    if folders and len(paths) > 1:
        message = "is a folder, and only YAML files can be merged; name it alone, and change its values with --set"
        raise ConfigError([Problem("", message, file=str(folders[0]))])
    with loading_libraries(line=False):
        if folders:
            from partita.runs.finished import load_finished

            return load_finished(folders[0], overrides=overrides, trust_remote_code=trust_remote_code).config
        from partita_schema.load import load_config

        return load_config(list(paths), overrides=with_trust(overrides, trust_remote_code)).config


def check_there(path: Path) -> None:
    """Raise ConfigError if a path is neither a file nor a run, and list the existing ones."""
    if path.exists() or path.suffix in (".yaml", ".yml"):
        return
    from partita.runs.manifest import RUNS, sibling_runs
    from partita_schema.yaml.files import near_files

    if re.match(r"[a-z_]+[\w.]*=", str(path)):
        near = f"; to override a key, write --set {shlex.quote(str(path))}"
    else:
        near = sibling_runs(path) or near_files(path) + sibling_runs(RUNS / path.name)
    raise ConfigError([Problem("", f"there is no such file or run{near}", file=str(path))])


def start_model(
    paths: Sequence[Path],
    *,
    overrides: list[str],
    quiet: bool,
    trust_remote_code: bool = False,
    one_process: bool = False,
) -> "Model":
    """Load the model, in each of the processes that its file asks for; the launching process does not return.

    Only rank 0 logs and prints results. See `open_model` for the arguments, except `one_process`: whether the command
    uses standard input or output, which several processes cannot share.

    Raises:
        ConfigError: As in `open_model`; or with `one_process`, if the file asks for several processes.
    """
    from partita.backends.launch import end_with_launcher
    from partita.distributed.world import get_world

    rank = get_world().rank
    quiet = quiet or rank > 0
    config = checked_config(paths, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code)
    launch_processes(config, one_process=one_process)  # the launching process itself loads no model
    model = load_model(paths, overrides=overrides, quiet=quiet, trust_remote_code=trust_remote_code)
    end_with_launcher()
    if rank > 0:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 -- until the process ends
    return model


def launch_processes(config: "Config", *, one_process: bool) -> None:
    """Run the command in the processes that a configuration asks for, and exit; return if this is one of them already.

    Raises:
        ConfigError: With `one_process`, if the configuration asks for several processes.
    """
    from partita.distributed.world import get_world

    launches = asks_for_processes(config)
    if one_process and (launches or get_world().world_size > 1):
        raise ConfigError([Problem("backend", "several processes cannot share standard input or output; name a file")])
    if launches:
        with loading_libraries():
            import torch.distributed.launcher.api  # noqa: F401
        from partita.backends.launch import launch

        raise SystemExit(launch(config, sys.argv[1:]))


def asks_for_processes(config: "Config") -> bool:
    """Return whether a configuration asks for several processes, and this is not one of them."""
    with loading_libraries(line=False):
        from partita.backends.launch import is_to_be_launched

        return is_to_be_launched(config)
