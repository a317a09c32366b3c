"""Where the weights of a model are: its base model, and a saved adapter with what it was trained on.

A saved adapter does not contain its base model. `partita-base.json` next to it records the base model's name and, if it
was a folder, a hash of its weights, so that a missing or another base model is noticed; and the labels of its head, in
the order of its outputs.
"""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.tokenizers.hub import BASE, WEIGHTS, check_intact, find_adapter, find_base, loading
from partita_schema.common.files import write_atomically
from partita_schema.common.json_text import parse_json
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.sections.model import NewModel

logger = logging.getLogger(__name__)

FILE = "partita-base.json"
BLOCKS, BLOCK_BYTES = 64, 2**16
"""Number and size in bytes of the blocks of a weight file that are hashed."""


@dataclass(frozen=True)
class RecordedBase:
    """The base model that a saved adapter was trained on."""

    base_model: str
    """Its name, as the configuration has it."""
    weights: str | None
    """Hash of its weights; None for a model of the Hub."""
    labels: tuple[str, ...] | None = None
    """Labels of the outputs of the adapter's head; None if it has no head with labels."""

    @classmethod
    def read(cls, saved: Path) -> "RecordedBase | None":
        """Return the base model recorded next to a saved adapter; None without a record. Raise ModelError."""
        if not (saved / FILE).is_file():
            return None
        with loading(str(saved), part=FILE, key="adapter"):
            content = parse_json((saved / FILE).read_bytes())
            labels = content.get("labels")
            return cls(str(content["base_model"]), content["weights"], None if labels is None else tuple(labels))

    def write(self, saved: Path) -> None:
        """Write the record next to a saved adapter."""
        content: dict[str, Any] = {"base_model": self.base_model, "weights": self.weights}
        if self.labels is not None:
            content["labels"] = list(self.labels)
        write_atomically(saved / FILE, json.dumps(content, indent=2) + "\n")


def find_sources(config: Config, *, folder: Path, saved: Path | None) -> tuple[str | None, str | None, bool]:
    """Return the sources of base weights and adapter, and whether the base weights were saved by a run.

    The source of the base weights is None for random weights. Weights saved by a run are loaded unchanged. A warning is
    logged if the base model of a saved adapter is not the one that it was trained on.
    """
    if saved is not None:
        check_intact(str(saved))
        if (saved / "adapter_config.json").exists():
            base = base_of_adapter(saved, config, folder=folder)
            warn_of_another_base(base, saved=saved)
            return base, str(saved), (saved / BASE).is_dir()
        if (saved / "config.json").exists():
            return str(saved), None, True
        raise ModelError(f"{saved} holds no model; name a folder that `save` wrote")
    model = config.base_model
    source = None if isinstance(model, NewModel) else find_base(model, folder=folder)
    adapter = config.adapter
    if adapter is None or adapter.pretrained_adapter_weights is None:
        return source, None, False
    return source, find_adapter(adapter.pretrained_adapter_weights, folder=folder), False


def base_of_adapter(saved: Path, config: Config, *, folder: Path) -> str:
    """Return the folder or Hub id of the base model of a saved adapter: next to it, or the one of the configuration.

    Args:
        saved: Folder of the adapter.
        config: Its configuration, whose base model may be another one than in training.
        folder: Folder that relative paths of the configuration are resolved against.

    Raises:
        ModelError: The base model is a folder that is not there. The Hub is not asked for its name.
    """
    if (saved / BASE).is_dir():
        return str(saved / BASE)
    name = config.base_model
    if isinstance(name, NewModel):
        raise ModelError(
            f"{saved} holds an adapter without the base model that was created with it, in {saved / BASE}; restore it"
        )
    recorded, path = RecordedBase.read(saved), folder / Path(name).expanduser()
    unchanged = recorded is not None and recorded.base_model == name and recorded.weights is not None
    if unchanged and not path.is_dir():
        raise ModelError(
            f"base_model: {saved} is an adapter of the model in the folder {path}, which is not there; name the folder "
            "that holds the model with --set base_model=FOLDER, in Python with overrides=['base_model=FOLDER']"
        )
    return find_base(name, folder=folder)


def warn_of_another_base(base: str, *, saved: Path) -> None:
    """Log a warning if a base model in a folder has other weights than the one that a saved adapter was trained on."""
    recorded = RecordedBase.read(saved)
    if recorded is None or recorded.weights is None or not Path(base).is_dir():
        return
    if weights_hash(Path(base)) != recorded.weights:
        logger.warning(
            "%s has other weights than the base model that the adapter in %s was trained on; its answers may be "
            "worthless",
            base,
            saved,
        )


def base_identity(saved: Path, config: Config, *, folder: Path) -> list[str]:
    """Return what identifies the base model of saved weights; [] if they need none.

    Args:
        saved: Folder of the weights.
        config: Their configuration.
        folder: Folder that relative paths of the configuration are resolved against.

    Raises:
        ModelError: The base model is not there.
    """
    if (saved / BASE).is_dir() or not (saved / "adapter_config.json").exists():
        return []
    base = base_of_adapter(saved, config, folder=folder)
    return [weights_hash(Path(base)) if Path(base).is_dir() else base]


def folder_hashes(config: Config, *, folder: Path) -> dict[str, str]:
    """Return a hash of the weights in each folder that a configuration starts from, by its name. The Hub has none.

    Args:
        config: The configuration.
        folder: Folder that relative paths of the configuration are resolved against.
    """
    adapter = config.adapter.pretrained_adapter_weights if config.adapter is not None else None
    hashes = {name: hash_of(name, folder=folder) for name in (config.base_model, adapter) if isinstance(name, str)}
    return {name: found for name, found in hashes.items() if found is not None}


def hash_of(name: str, *, folder: Path) -> str | None:
    """Return a hash of the weights in the folder of a name, relative to `folder`; None if there is no such folder."""
    place = folder / Path(name).expanduser()
    return weights_hash(place) if place.is_dir() else None


def weights_hash(folder: Path) -> str:
    """Return a hash of the weight files in a folder: their names, sizes and evenly spaced blocks.

    At most 4 MiB of each file are read, smaller files as a whole. The hash does not depend on modification times.
    """
    checksum = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS and path.is_file()):
        size = path.stat().st_size
        blocks, last = min(BLOCKS, -(-size // BLOCK_BYTES)), max(0, size - BLOCK_BYTES)
        checksum.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for index in range(blocks):
                file.seek(index * last // max(1, blocks - 1))
                checksum.update(file.read(BLOCK_BYTES))
    return checksum.hexdigest()[:16]
