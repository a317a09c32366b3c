"""Checks that the weights of local base models and adapters have not changed since the trials of a sweep began."""

from pathlib import Path

from partita.sweeps.same_rows import manifests_of
from partita.tokenizers.saved_adapters import hash_of
from partita_schema.errors import ResumeError

ADVICE = "restore them, or name another folder for the sweep with --folder"


def check_same_weights(folder: Path, *, origin: Path, finished: bool) -> None:
    """Compare the weights in the folders that trials started from with those of today, each folder once.

    Args:
        folder: Folder of the sweep.
        origin: Folder that relative paths of the configuration are resolved against.
        finished: Whether all trials have ended. A folder that is gone is then not needed.

    Raises:
        ResumeError: Weights have changed, or are gone.
    """
    present: dict[str, str | None] = {}
    for run, manifest in manifests_of(folder):
        for name, recorded in manifest.get("initial_weights", {}).items():
            if name not in present:
                present[name] = hash_of(name, folder=origin)
            if present[name] is None and not finished:
                raise ResumeError(f"{name}, from which {run} was trained, has no weights any more; {ADVICE}")
            if present[name] not in (None, recorded):
                raise ResumeError(f"the weights in {name} have changed since {run} was trained; {ADVICE}")
