import json
import logging
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.generation import journal as journal_module
from partita.generation.journal import Journal
from partita.generation.record import PredictionRecord, row_key
from partita.runs.locks import try_lock
from partita_schema.common.checksums import sealed_line
from partita_schema.errors import ResumeError, WriteError

from ...properties import examples

FINGERPRINT = {"model": "m1", "data": "d1"}


def keys(rows: int, salt: str = "") -> Any:
    digests = [row_key(f"prompt {row}{salt}", row=str(row), fingerprint="f") for row in range(rows)]
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(rows, 16)


def record(row: int, text: str = "yes", **values: Any) -> PredictionRecord:
    key = keys(row + 1)[row].tobytes().hex()
    return PredictionRecord(**({"key": key, "row": row, "status": "ok", "text": text} | values))


def opened(path: Path, rows: int = 5, fingerprint: Mapping[str, str] = FINGERPRINT, **options: Any) -> Journal:
    return Journal.open(path, fingerprint=fingerprint, keys=options.pop("keys", keys(rows)), **options)


def test_records_are_read_when_the_journal_is_opened_again(tmp_path: Path) -> None:
    written = [
        record(3, "drei", tokens=2, finish_reason="stop", values={"a": [1, None]}),
        record(0, "null \u2028 \u00e4"),
    ]
    with opened(tmp_path / "j") as journal:
        journal.append(written)
    with opened(tmp_path / "j") as journal:
        assert journal.done().tolist() == [True, False, False, True, False]
        assert [journal.record(3), journal.record(0), journal.record(1)] == [*written, None]
        assert journal.count("ok") == 2


def test_the_later_record_of_a_row_counts(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as journal:
        journal.append([record(1, None, status="error", error="boom")])
        journal.append([record(1, "better", attempt=2)])
    with opened(tmp_path / "j") as journal:
        assert journal.record(1) == record(1, "better", attempt=2)
        assert (journal.count("ok"), journal.count("error"), journal.all_attempts()[1]) == (1, 0, 2)


def test_rows_with_errors_are_done_unless_a_retry_is_requested(tmp_path: Path) -> None:
    with opened(tmp_path / "j", rows=3) as journal:
        journal.append([record(0), record(1, None, status="error"), record(2, None, status="skipped")])
        assert journal.done().tolist() == [True, True, True]
        assert journal.done(retry_errors=True).tolist() == [True, False, True]


@given(st.data())
@examples(50)
def test_a_journal_truncated_anywhere_keeps_complete_records_and_resumes(
    tmp_path_factory: Any, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "j"
    with opened(path) as journal:
        for row in range(5):
            journal.append([record(row, "\u00e4" * row)])
    whole = path.read_bytes()
    cut = data.draw(st.integers(min_value=0, max_value=len(whole)))
    path.write_bytes(whole[:cut])
    kept = max(0, whole[:cut].count(b"\n") - 1)
    with opened(path) as journal:
        assert journal.done().tolist() == [row < kept for row in range(5)]
        journal.append([record(row, "\u00e4" * row) for row in range(kept, 5)])
    assert path.read_bytes() == whole


def test_a_damaged_line_in_the_middle_loses_only_its_row(tmp_path: Path, caplog: Any) -> None:
    with opened(tmp_path / "j") as journal:
        journal.append([record(0), record(1), record(2)])
    lines = (tmp_path / "j").read_bytes().split(b"\n")
    lines[2] = b"\0" * 20
    (tmp_path / "j").write_bytes(b"\n".join(lines))
    with caplog.at_level(logging.WARNING), opened(tmp_path / "j") as journal:
        assert journal.done().tolist() == [True, False, True, False, False]
    assert "1 damaged and 0 outdated records; their rows count as not done" in caplog.text


def test_no_flipped_bit_gives_a_wrong_record(tmp_path: Path) -> None:
    path, rng = tmp_path / "j", random.Random(3)
    written = [record(row, "yes" * row, tokens=row, values={"a": row}, logprob=-0.5) for row in range(5)]
    with opened(path) as journal:
        journal.append(written)
    whole, kept = path.read_bytes(), 0
    for _ in range(300):
        place = rng.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with opened(path) as journal:
            results = [journal.record(row) for row in range(5)]
            assert all(one in (None, other) for one, other in zip(results, written, strict=True)), place
            assert sum(one is None for one in results) <= 2, "a newline damages the record before it and the one after"
            journal.append([one for one, other in zip(written, results, strict=True) if other is None])
            kept += sum(other is not None for other in results)
        with opened(path) as journal:
            assert [journal.record(row) for row in range(5)] == written
    assert kept > 1000


def test_a_damaged_first_line_keeps_the_records_of_this_job(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "j"
    with opened(path) as journal:
        journal.append([record(0), record(3)])
    path.write_bytes(path.read_bytes().replace(b"m1", b"m2", 1))
    with pytest.raises(ResumeError, match="has a damaged first line; run the same predict command again"):
        Journal.read_only(path)
    with caplog.at_level(logging.WARNING), opened(path) as journal:
        assert journal.done().tolist() == [True, False, False, True, False]
        journal.append([record(1)])
        with pytest.raises(ResumeError, match="is being written by another process"):
            opened(path)
    assert f"{path}: its first line is damaged; 2 records of this job are reused" in caplog.text
    with opened(path) as journal:
        assert journal.done().tolist() == [True, True, False, True, False]


def test_a_record_of_another_prompt_counts_as_absent(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as journal:
        journal.append([record(0), record(1)])
    changed = keys(5).copy()
    changed[1] = keys(5, salt="!")[1]
    with opened(tmp_path / "j", keys=changed) as journal:
        assert journal.done().tolist() == [True, False, False, False, False]


def test_a_changed_fingerprint_is_refused_with_the_changed_part(tmp_path: Path) -> None:
    opened(tmp_path / "j").close()
    with pytest.raises(ResumeError) as caught:
        opened(tmp_path / "j", rows=6, fingerprint={"model": "m2", "prompt": "p", "data": "d1"})
    assert str(caught.value) == (
        f"{tmp_path / 'j'} holds answers of another job: model changed (m1 -> m2); prompt changed (none -> p); "
        "rows changed (5 -> 6). Undo the change, write to another path, or start again with --fresh, which forgets "
        "these answers"
    )


def test_changed_hashes_are_not_shown(tmp_path: Path) -> None:
    opened(tmp_path / "j", fingerprint={"model": "9718e4c4e49cf29d7ce18de0e2e6cf1e", "prompt": "p"}).close()
    with pytest.raises(ResumeError, match=r"holds answers of another job: model changed; prompt changed \(p -> q\)\."):
        opened(tmp_path / "j", fingerprint={"model": "3f312dd592a740aadf89d5a87a619224", "prompt": "q"})


def test_fresh_discards_existing_records(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as journal:
        journal.append([record(0)])
    with opened(tmp_path / "j", fingerprint={"model": "m2"}, fresh=True) as journal:
        assert not journal.done().any()
    with opened(tmp_path / "j", fingerprint={"model": "m2"}) as journal:
        assert not journal.done().any()


def test_a_reader_keeps_the_records_of_its_job_when_another_one_starts_afresh(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as journal:
        journal.append([record(0, "yes")])
    with Journal.read_only(tmp_path / "j") as reader:
        with opened(tmp_path / "j", fingerprint={"model": "m2", "data": "d1"}, fresh=True) as journal:
            journal.append([record(0, "no!")])
            with pytest.raises(ResumeError, match="is being written by another process"):
                opened(tmp_path / "j")
        assert reader.record(0) == record(0, "yes")
    with Journal.read_only(tmp_path / "j") as reader:
        assert reader.record(0) == record(0, "no!")
    assert [path.name for path in tmp_path.iterdir()] == ["j"]


def test_a_reader_passes_over_answers_to_other_prompts_of_its_rows(tmp_path: Path, caplog: Any) -> None:
    with opened(tmp_path / "j") as journal:
        journal.append([record(0, "first prompt")])
    other = keys(5)[::-1].copy()
    with opened(tmp_path / "j", keys=other) as journal:
        journal.append([record(0, "other prompt", key=other[0].tobytes().hex())])
    caplog.clear()
    for known, text in ((keys(5), "first prompt"), (other, "other prompt"), (None, "other prompt")):
        with Journal.read_only(tmp_path / "j", keys=known) as reader:
            found = reader.record(0)
            assert found is not None
            assert found.text == text
    assert not caplog.messages


def test_a_journal_that_was_replaced_while_it_was_opened_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path / "j").close()

    def replace_and_lock(descriptor: int, path: Path) -> bool:
        monkeypatch.setattr(journal_module, "try_lock", try_lock)
        opened(tmp_path / "j", fresh=True).close()
        return try_lock(descriptor, path)

    monkeypatch.setattr(journal_module, "try_lock", replace_and_lock)
    with pytest.raises(ResumeError, match="is being written by another process"):
        opened(tmp_path / "j")


@pytest.mark.parametrize("content", ['{"a": 1}\n', "some text", '{"journal": "x"}\n'])
def test_a_file_that_is_not_a_journal_is_refused_and_not_changed(tmp_path: Path, content: str) -> None:
    (tmp_path / "j").write_text(content, encoding="utf-8")
    with pytest.raises(ResumeError, match="is not a journal of predictions; write to another path"):
        opened(tmp_path / "j")
    assert (tmp_path / "j").read_text(encoding="utf-8") == content


def test_a_journal_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(sealed_line(b'{"journal": 2, "rows": 5, "fingerprint": {}}'))
    with pytest.raises(ResumeError, match=r"was written by a newer partita \(journal 2\); update partita"):
        opened(tmp_path / "j")


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    message = "is being written by another process; wait for it to end"
    with opened(tmp_path / "j"), pytest.raises(ResumeError, match=message):
        opened(tmp_path / "j")
    opened(tmp_path / "j").close()


def test_a_reader_needs_no_lock(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as journal:
        journal.append([record(2, "zwei")])
        with Journal.read_only(tmp_path / "j") as reader:
            assert (len(reader), reader.record(2)) == (5, record(2, "zwei"))


def test_reading_a_missing_journal_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="cannot be read: No such file or directory"):
        Journal.read_only(tmp_path / "j")
    (tmp_path / "j").touch()
    with pytest.raises(ResumeError, match="holds no answers yet"):
        Journal.read_only(tmp_path / "j")


def test_lone_surrogates_are_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as journal:
        journal.append([record(0, "a\ud800b")])
        assert journal.record(0) == record(0, "a\ud800b")


def test_keys_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    opened(tmp_path / "j").close()
    line = {"key": keys(1)[0].tobytes().hex(), "row": 0, "status": "ok", "text": "yes", "mood": "new"}
    with (tmp_path / "j").open("ab") as file:
        file.write(sealed_line(json.dumps(line).encode()))
    with opened(tmp_path / "j") as journal:
        assert journal.record(0) == record(0)


FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from partita.generation.journal import Journal
from partita.generation.record import PredictionRecord
from partita_schema.errors import WriteError
keys = np.zeros((1000, 16), dtype=np.uint8)
journal = Journal.open(Path(sys.argv[1]), fingerprint={}, keys=keys)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    for row in range(0, 1000, 2):
        journal.append([PredictionRecord(key="00" * 16, row=row + n, status="ok", text="x" * 20) for n in range(2)])
except WriteError as error:
    print(row, error)
journal.close()
"""


def test_a_full_disk_is_reported_and_written_records_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "j"
    error_text = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(path)], capture_output=True, text=True, check=True
    ).stdout
    failed, message = error_text.strip().split(" ", 1)
    assert message == (
        f"{path} cannot be written: File too large; raise the limit on the size of files, or write to another path. "
        "The answers so far are saved; start the same command again afterwards"
    )
    with Journal.open(path, fingerprint={}, keys=np.zeros((1000, 16), dtype=np.uint8)) as journal:
        assert int(failed) > 10
        assert journal.done().tolist() == [row < int(failed) for row in range(1000)]
    assert path.read_bytes().endswith(b"}\n")


def test_an_interrupted_write_leaves_no_partial_line(tmp_path: Path, monkeypatch: Any) -> None:
    write = os.write

    def interrupted(descriptor: int, data: Any) -> int:
        write(descriptor, data[:10])
        raise KeyboardInterrupt

    with opened(tmp_path / "j") as journal:
        journal.append([record(0)])
        before = (tmp_path / "j").read_bytes()
        monkeypatch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal.append([record(1)])
        monkeypatch.undo()
        assert (tmp_path / "j").read_bytes() == before
        assert journal.record(1) is None


def test_a_disk_that_cannot_sync_is_reported(tmp_path: Path, monkeypatch: Any) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with opened(tmp_path / "j") as journal:
        monkeypatch.setattr(os, "fsync", broken)
        with pytest.raises(WriteError, match="cannot be written: Input/output error"):
            journal.sync()
        monkeypatch.undo()


def test_a_closed_journal_is_flushed_to_disk(tmp_path: Path, forced: Any) -> None:
    with opened(tmp_path / "j") as journal:
        journal.append([record(0)])
        journal.append([record(1)])
    assert forced(tmp_path / "j") == (tmp_path / "j").stat().st_size > 0


def test_records_are_flushed_to_disk_periodically(tmp_path: Path, forced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SYNC_SECONDS", 0.0)
    with opened(tmp_path / "j") as journal:
        started = forced(tmp_path / "j")
        journal.append([record(0)])
        assert forced(tmp_path / "j") == (tmp_path / "j").stat().st_size > started


def test_only_the_owner_can_read_a_journal(tmp_path: Path) -> None:
    with opened(tmp_path / "j") as journal:
        journal.append([record(0)])
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600
    (tmp_path / "j").chmod(0o644)
    with opened(tmp_path / "j") as journal:
        assert journal.done()[0]
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("exists", [True, False])
def test_a_journal_is_not_opened_through_a_symbolic_link(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "theirs").write_text("untouched", encoding="utf-8")
    (tmp_path / "j").symlink_to(tmp_path / "theirs")
    with pytest.raises(WriteError) as caught:
        opened(tmp_path / "j", fresh=True)
    assert str(caught.value).endswith(
        "/j cannot be written: Too many levels of symbolic links; symbolic links are not followed there; "
        "remove the link, or name its target"
    )
    assert (tmp_path / "theirs").exists() is exists
    with pytest.raises(ResumeError, match=r"j cannot be read: Too many levels of symbolic links"):
        Journal.read_only(tmp_path / "j")


def test_a_pipe_is_refused_as_journal(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "j")
    with pytest.raises(WriteError, match="j cannot be written: Not a regular file; write to another path"):
        opened(tmp_path / "j")
