"""Tests of journals of several ranks: adopted at the next start, merged at the end."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from partita.distributed.thread_group import ThreadGroup
from partita.generation.journal import Journal
from partita.generation.journals import open_journals
from partita.generation.record import PredictionRecord
from partita.runs.files import rank_path
from partita_schema.errors import ResumeError
from partita_trainers.process_group import ProcessGroup

ROWS = 6
FINGERPRINT = {"model": "m1", "answers": "a1"}


def keys() -> npt.NDArray[np.uint8]:
    return np.arange(ROWS * 16, dtype=np.uint8).reshape(ROWS, 16)


def answer(row: int, *, text: str = "yes", key: bytes | None = None) -> PredictionRecord:
    return PredictionRecord(key=(key or keys()[row].tobytes()).hex(), row=row, status="ok", text=text, attempt=1)


def write_journal(
    path: Path, rank: int, records: list[PredictionRecord], *, fingerprint: dict[str, str] = FINGERPRINT
) -> Path:
    """Write the answers of a rank that was killed."""
    place = rank_path(path, rank)
    with Journal.open(place, fingerprint=fingerprint, keys=keys()) as journal:
        journal.append(records)
    return place


@pytest.mark.parametrize("name", ["answers.jsonl", "answers[v2]?.jsonl"])
def test_answers_of_killed_ranks_are_merged_by_any_number_of_processes(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with Journal.open(path, fingerprint=FINGERPRINT, keys=keys()) as journal:
        journal.append([answer(0)])
    left = [write_journal(path, 1, [answer(2), answer(3)]), write_journal(path, 7, [answer(5)])]

    with open_journals(path, fingerprint=FINGERPRINT, keys=keys()) as journals:
        assert journals.before.tolist() == [True, False, True, True, False, True]
        assert [journals.attempts(row) for row in range(ROWS)] == [1, 0, 1, 1, 0, 1]
    assert not any(place.exists() for place in left)
    with Journal.read_only(path) as journal:
        record = journal.record(3)
        assert record is not None
        assert record.text == "yes"


def test_partial_lines_and_changed_rows_are_not_merged(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    place = write_journal(path, 1, [answer(1), answer(2, key=bytes(16)), answer(4)])
    place.write_bytes(place.read_bytes()[:-10])

    with open_journals(path, fingerprint=FINGERPRINT, keys=keys()) as journals:
        assert np.flatnonzero(journals.before).tolist() == [1]


def test_files_of_another_job_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    place = write_journal(path, 1, [answer(1)], fingerprint={"model": "m2", "answers": "a1"})

    with open_journals(path, fingerprint=FINGERPRINT, keys=keys()) as journals:
        assert not journals.before.any()
    assert not place.exists()


def test_fresh_discards_files_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    place = write_journal(path, 1, [answer(1)])

    with open_journals(path, fingerprint=FINGERPRINT, keys=keys(), fresh=True) as journals:
        assert not journals.before.any()
    assert not place.exists()


def test_merging_waits_for_a_rank_that_still_writes(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with (
        Journal.open(rank_path(path, 1), fingerprint=FINGERPRINT, keys=keys()),
        pytest.raises(ResumeError, match=r"rank-1\.jsonl is being written by another process; wait for it to end"),
        open_journals(path, fingerprint=FINGERPRINT, keys=keys()),
    ):
        raise AssertionError("it must not open")


def test_ranks_write_separate_journals_that_are_merged_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    write_journal(path, 1, [answer(0)])

    def work(process_group: ProcessGroup) -> tuple[list[bool], str]:
        with open_journals(path, fingerprint=FINGERPRINT, keys=keys(), process_group=process_group) as journals:
            before: list[bool] = journals.before.tolist()
            for row in range(1 + process_group.rank, ROWS, process_group.world_size):
                journals.own.append([answer(row, text=f"of {process_group.rank}")])
            name = journals.own.path.name
            journals.join()
        return before, name

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(work, ThreadGroup.of(3, timeout_seconds=20)))

    assert [before for before, _ in results] == [[True] + [False] * (ROWS - 1)] * 3
    assert [name for _, name in results] == ["answers.jsonl", "answers.rank-1.jsonl", "answers.rank-2.jsonl"]
    assert sorted(place.name for place in tmp_path.iterdir()) == ["answers.jsonl"]
    with Journal.read_only(path) as journal:
        texts = [record.text for row in range(ROWS) if (record := journal.record(row)) is not None]
    assert texts == ["yes", "of 0", "of 1", "of 2", "of 0", "of 1"]
