"""`Model.save` and `Model.push_to_hub`."""

from pathlib import Path

from partita.on_ray import refuse_on_ray
from partita.runtime import ModelRuntime
from partita.saving import upload, write_card
from partita.served import SAVE, refuse_served


def save(runtime: ModelRuntime, folder: str | Path) -> Path:
    """Write the model with the metadata for `Model.load`."""
    return write(runtime, Path(folder), origin=runtime.loaded.folder)


def push_to_hub(runtime: ModelRuntime, name: str, *, private: bool = True) -> str:
    """Upload what `save` writes to a Hub repository and return its URL."""
    refuse_served(runtime.config, what=SAVE)
    refuse_on_ray(runtime.config, verb="save")
    return upload(name, private=private, write=lambda folder: write(runtime, folder, origin=None))


def write(runtime: ModelRuntime, folder: Path, *, origin: Path | None) -> Path:
    """Write the model; relative paths are resolved against `origin`, or without one against the saved folder."""
    refuse_served(runtime.config, what=SAVE)
    refuse_on_ray(runtime.config, verb="save")
    pipeline = runtime.ready()
    pipeline.lm.save(folder)
    write_card(folder, config=runtime.config, labels=pipeline.labels, origin=origin)
    return folder
