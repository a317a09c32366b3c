"""The file of a SentencePiece vocabulary, which transformers reads but does not write.

`tokenizer.json` has the same tokens. llama.cpp splits words by the scores in this file, so a saved model keeps it.
"""

import shutil
from contextlib import suppress
from pathlib import Path

NAME = "tokenizer.model"


def copy_vocabulary(source: str | None, folder: Path, *, revision: str | None, download: bool = False) -> bool:
    """Copy the file of a model to a folder that has none; return whether the folder has one now.

    Args:
        source: Folder or Hub id of the model; None for a new model, which has no such file.
        folder: Folder to copy to.
        revision: Commit, branch or tag on the Hub.
        download: Whether to look for the file on the Hub if it has not been downloaded yet.
    """
    target = folder / NAME
    if source is not None and not target.exists():
        if Path(source).is_dir():
            found: str | Path | None = Path(source) / NAME
        else:
            found = downloaded(source, revision=revision, download=download)
        if found is not None and Path(found).is_file():
            shutil.copyfile(found, target)
    return target.is_file()


def downloaded(source: str, *, revision: str | None, download: bool) -> str | None:
    """Return the path of the file of a model on the Hub; None if it has none, or is not downloaded.

    Args:
        source: Hub id of the model.
        revision: Commit, branch or tag.
        download: Whether to download it.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    with suppress(HfHubHTTPError, OSError):  # most models have none
        return hf_hub_download(source, NAME, revision=revision, local_files_only=not download)
    return None
