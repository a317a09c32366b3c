import tempfile
from pathlib import Path

import numpy as np
import pytest

from partita.data.formats.text_files import RowStoreWriter
from partita_schema.errors import WriteError


def test_rows_are_returned_in_the_requested_order() -> None:
    with RowStoreWriter() as writer:
        for number in range(5):
            writer.add(b'{"n": %d}' % number, file=0, number=number + 1)
        spool = writer.finish()
    assert len(spool) == 5
    assert spool.read(np.array([4, 0, 4])) == [{"n": 4}, {"n": 0}, {"n": 4}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
@pytest.mark.parametrize("size", [10, 100_000])
def test_a_full_disk_is_reported_with_the_folder_and_the_fix(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Path("/dev/full").open("w+b"))  # noqa: SIM115
    message = (
        f"^the rows cannot be stored in {tempfile.gettempdir()}: No space left on device; make room, or set TMPDIR"
    )
    with pytest.raises(WriteError, match=message), RowStoreWriter() as writer:  # noqa: PT012 - either line may find out
        writer.add(b"." * size, file=0, number=1)
        writer.finish()
