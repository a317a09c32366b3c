"""The folder of an export while it is written: it gets its name once it is complete."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from partita.export.report import REPORT
from partita.runs.files import writing
from partita_schema.errors import WriteError


def partial_folder(output: Path) -> Path:
    """Return the path of a new folder next to `output`, or inside if `output` is a folder already."""
    target = output.resolve()
    parent = target if target.exists() else target.parent
    return parent / f"{target.name}.partial-{secrets.token_hex(4)}"


@contextmanager
def completed(folder: Path, output: Path) -> Iterator[None]:
    """Create a folder for the files of `output`, and move them there on exit; an exception removes them.

    Args:
        folder: What `partial_folder` returned.
        output: The folder of the export; does not exist, or is empty.

    Raises:
        WriteError: The files cannot be written.
    """
    target = output.resolve()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise WriteError(f"the folder {output} cannot be created: {error.strerror}; name another one") from error
    try:
        with writing(folder):
            yield
            if folder.parent != target:
                folder.rename(target)
                return
            for path in sorted(folder.iterdir(), key=lambda path: path.name == REPORT):
                path.rename(target / path.name)
            folder.rmdir()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
