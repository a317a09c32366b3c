"""Work that Ray runs on several ranks: training, simulation and some evaluations."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from partita.backends.ray.rank_launcher import RayRankLauncher
from partita.backends.ray.rank_monitor import TRAINING, RankWork, follow
from partita.distributed.world import get_world
from partita.runs.files import writing
from partita.runs.opening import holds_nothing
from partita_schema.config import Config
from partita_schema.errors import PartitaError
from partita_schema.sections.backend import RayBackendConfig


def check_is_alone() -> None:
    """Raise PartitaError if this process was started as one of several."""
    if get_world().world_size > 1:
        raise PartitaError(
            f"backend: {{type: ray}} starts the processes itself, and here are {get_world().world_size}; start the "
            "command "
            "by itself, or remove backend"
        )


def run_on_ranks(call: partial[Any], config: Config, *, quiet: bool, storage: Path, work: RankWork = TRAINING) -> Any:
    """Run `call` on every Ray rank and return rank 0's result. If a rank is lost, all ranks are restarted.

    Args:
        call: Called on each rank.
        config: The configuration, with `backend: {type: ray}`.
        quiet: Show no progress.
        storage: Folder for Ray's files.
        work: What the ranks do, for messages.
    """
    backend = config.backend
    if not isinstance(backend, RayBackendConfig):
        raise AssertionError("only a file with backend: {type: ray} has ranks on Ray")
    ranks = RayRankLauncher(
        backend,
        call,
        work=work,
        device=config.model_parameters.device,
        threads=os.environ.get("OMP_NUM_THREADS", ""),
        quiet=quiet,
        storage=storage,
    )
    return follow(
        ranks,
        workers=ranks.workers,
        max_failures=backend.max_failures,
        timeout_seconds=backend.timeout_seconds,
        quiet=quiet,
        work=work,
    )


def enter_start_folder(start: Path, *, folder: Path, mark: Path, option: str) -> None:
    """Change to the folder where the command was started.

    Args:
        start: The folder where the command was started.
        folder: The folder of the run.
        mark: The marker folder of `shared_marker`.
        option: The option that names the folder, for the error.

    Raises:
        PartitaError: The marker does not exist on this machine: the folder of the run is not shared.
    """
    if not mark.is_dir():
        raise PartitaError(
            f"the folder of the run, {folder}, is another one on {get_world().node}: name one with {option} that all "
            "machines of the cluster see under this name"
        )
    if start.is_dir():
        os.chdir(start)


@contextmanager
def shared_marker(folder: Path) -> Iterator[Path]:
    """Create the folder of a run, and yield a marker folder in it by which other machines recognize it.

    A new folder that holds nothing at the end is removed. Ranks keep it, because they may be restarted.
    """
    existed = folder.exists()
    mark = folder.resolve() / f".ray-{uuid4().hex}"
    with writing(folder):
        mark.mkdir()
    try:
        yield mark
    finally:
        shutil.rmtree(mark, ignore_errors=True)
        if not existed and holds_nothing(folder):
            shutil.rmtree(folder, ignore_errors=True)
