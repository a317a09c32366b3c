"""`Model.save` and `Model.push_to_hub`."""

from pathlib import Path

from partita.backends.context import ModelRuntime
from partita.backends.endpoint.verbs import SAVE, refuse_served
from partita.backends.ray.verbs import refuse_on_ray
from partita.pipeline.export import upload, write_card


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
