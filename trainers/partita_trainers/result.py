"""The final model of a run."""

import shutil
from pathlib import Path

from partita_trainers.base import LanguageModel


def save_result(lm: LanguageModel, folder: Path) -> None:
    """Replace `model/` in the run folder atomically, so that no files of an older model remain."""
    final, beside = folder / "model", folder / ".model.writing"
    shutil.rmtree(beside, ignore_errors=True)
    lm.save(beside)
    if final.exists():
        shutil.rmtree(final)
    beside.rename(final)
