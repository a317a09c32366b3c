"""The model that a run comes to, where it is looked for."""

import shutil
from pathlib import Path

from partita_trainers.base import LanguageModel


def save_result(lm: LanguageModel, folder: Path) -> None:
    """Write `model/` in the folder of a run: beside, then under its name, so that nothing of an older one stays."""
    final, beside = folder / "model", folder / ".model.writing"
    shutil.rmtree(beside, ignore_errors=True)
    lm.save(beside)
    if final.exists():
        shutil.rmtree(final)
    beside.rename(final)
