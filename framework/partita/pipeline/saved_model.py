"""Metadata of a saved model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.pipeline.build import Labels
from partita.runs.manifest import MANIFESTS
from partita_schema.common.checksums import sealed
from partita_schema.common.files import write_atomically
from partita_schema.config import Config
from partita_schema.records import FORMAT_VERSION


def write_metadata(
    folder: Path, *, config: Config, labels: Labels, origin: Path | None, notes: Mapping[str, Any] | None = None
) -> None:
    """Write partita.json, the description of a saved model. It does not say in which processes it was trained.

    Args:
        folder: Folder of the saved model.
        config: The configuration.
        labels: Labels by output.
        origin: Folder that relative paths of the file are resolved against; None for the saved folder.
        notes: Further keys, from the manifest of the run.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "status": "done",
        "config": config.model_dump(mode="json", exclude_unset=True, exclude={"backend"}),
        "folder": str(origin.resolve()) if origin is not None else ".",
        "labels": {name: list(values) for name, values in labels.items()},
        **(notes or {}),
    }
    write_atomically(folder / MANIFESTS[1], json.dumps(sealed(content), indent=2) + "\n")
