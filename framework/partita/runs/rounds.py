"""The rounds of self-training in a run directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partita.runs.manifest import read_manifest

ROUNDS = "rounds"
"""Folder of a run with a directory for each round."""


def num_kept_rounds(manifest: Mapping[str, Any]) -> int:
    """Return how many rounds of self-training a run has kept; 0 without self-training."""
    return sum(bool(one.get("kept")) for one in manifest.get("rounds", []))


def round_folder(run: Path, number: int) -> Path:
    """Return the directory of a round of self-training; 0 is the training before the first round."""
    return run / ROUNDS / str(number)


def manifest_of_training(run: Path, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the manifest of the training that made the weights of a run; with self-training, of the last kept round.

    Args:
        run: The run directory.
        manifest: The manifest of the run.

    Raises:
        PartitaError: The manifest of the round is damaged.
    """
    kept = num_kept_rounds(manifest)
    return read_manifest(round_folder(run, kept)) if kept else manifest
