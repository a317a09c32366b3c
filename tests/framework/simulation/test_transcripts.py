"""Tests of transcript files: files of killed ranks are merged once; files of other jobs are not."""

import errno
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from partita import ResumeError, WriteError
from partita.data.episode import Episode, from_line
from partita.report.simulated import read_simulations
from partita.simulation.transcripts import Transcripts, discard, open_transcripts

DECIDED = {"model": "a"}


def dialogue(number: int, status: str = "done") -> Episode:
    result = Episode(f"task-{number}", f"task-{number}", {}, number)
    result.end("failed" if status == "failed" else "done", "environment: no" if status == "failed" else None)
    return result


def keep(folder: Path, *numbers: int, rank: int, decided_by: dict[str, str] = DECIDED) -> Path:
    with Transcripts(folder, "gold", decided_by=decided_by, rank=rank) as transcripts:
        for number in numbers:
            transcripts.add(dialogue(number))
    return transcripts.partial_path


def test_files_of_killed_ranks_are_merged_once(tmp_path: Path) -> None:
    keep(tmp_path, 0, 1, rank=0)
    torn = keep(tmp_path, 1, 5, 6, rank=3)
    torn.write_bytes(torn.read_bytes()[:-10])
    keep(tmp_path, 7, rank=1, decided_by={"model": "another"})

    with open_transcripts(tmp_path, "gold", decided_by=DECIDED) as transcripts:
        assert sorted(transcripts.done) == ["task-0", "task-1", "task-5"]
    assert [path.name for path in tmp_path.iterdir()] == [".gold.jsonl"]
    with open_transcripts(tmp_path, "gold", decided_by=DECIDED) as transcripts:
        assert sorted(transcripts.done) == ["task-0", "task-1", "task-5"]
        assert transcripts.last_failure is None
        transcripts.add(dialogue(8, "failed"))
        assert transcripts.last_failure == "environment: no"


def test_half_of_a_surrogate_pair_is_recorded(tmp_path: Path) -> None:
    said = Episode("task-0", "task-0", {}, 0)
    said.observe("a \ud83d b")
    said.end("done", None)
    with Transcripts(tmp_path, "gold", decided_by=DECIDED) as transcripts:
        transcripts.add(said)
    with open_transcripts(tmp_path, "gold", decided_by=DECIDED) as transcripts:
        assert transcripts.done["task-0"].messages == said.messages


def test_a_write_of_a_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data[:7])))
    keep(tmp_path, 0, 1, rank=0)
    monkeypatch.undo()
    with open_transcripts(tmp_path, "gold", decided_by=DECIDED) as transcripts:
        assert sorted(transcripts.done) == ["task-0", "task-1"]


def test_a_write_that_fails_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        write(descriptor, bytes(data[:7]))
        raise OSError(errno.ENOSPC, "No space left on device")

    with Transcripts(tmp_path, "gold", decided_by=DECIDED) as transcripts:
        transcripts.add(dialogue(0))
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(WriteError, match="No space left on device"):
            transcripts.add(dialogue(1))
        monkeypatch.undo()
        transcripts.add(dialogue(2))
    with open_transcripts(tmp_path, "gold", decided_by=DECIDED) as transcripts:
        assert sorted(transcripts.done) == ["task-0", "task-2"]


def test_closed_transcripts_are_on_the_disk(tmp_path: Path, forced: Any) -> None:
    path = keep(tmp_path, 0, 1, rank=0)
    assert forced(path) == path.stat().st_size > 0


def test_finished_transcripts_are_in_the_requested_order_and_on_disk(tmp_path: Path, forced: Any) -> None:
    keep(tmp_path, 2, 0, 1, rank=0)
    with open_transcripts(tmp_path, "gold", decided_by=DECIDED) as transcripts:
        result = transcripts.finish(["task-0", "task-1", "task-2"])
    assert [one.key for one in result] == ["task-0", "task-1", "task-2"]
    path = tmp_path / "gold.jsonl"
    assert [line.split(b'"')[3] for line in path.read_bytes().splitlines()] == [b"task-0", b"task-1", b"task-2"]
    assert forced(path) == path.stat().st_size > 0


def test_a_damaged_line_loses_only_its_dialogue_and_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, rng = keep(tmp_path, 0, 1, 2, rank=0), random.Random(5)
    whole = path.read_bytes()
    head = whole.index(b"\n") + 1
    for _ in range(100):
        place = rng.randrange(8 * head, 8 * len(whole))
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        caplog.clear()
        with open_transcripts(tmp_path, "gold", decided_by=DECIDED) as transcripts:
            results = {key: had.line() for key, had in transcripts.done.items()}
        assert results.items() <= {f"task-{number}": dialogue(number).line() for number in range(3)}.items()
        assert len(results) >= 1
        assert (len(results) == 3) or re.search(r"damaged lines?; their dialogues are run again", caplog.text)


def test_a_damaged_first_line_is_refused(tmp_path: Path) -> None:
    path = keep(tmp_path, 0, rank=0)
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"b"', 1))
    with (
        pytest.raises(
            ResumeError, match="is damaged, so it is not known what decided its dialogues; write --fresh to start over"
        ),
        open_transcripts(tmp_path, "gold", decided_by=DECIDED),
    ):
        pass


def test_the_file_of_a_running_rank_is_not_merged(tmp_path: Path) -> None:
    keep(tmp_path, 0, rank=0)
    with Transcripts(tmp_path, "gold", decided_by=DECIDED, rank=2) as other:
        other.add(dialogue(1))
        with (
            pytest.raises(ResumeError, match="is in use by another process"),
            open_transcripts(tmp_path, "gold", decided_by=DECIDED),
        ):
            pass
    assert other.partial_path.exists()


def test_discarded_dialogues_count_as_not_run(tmp_path: Path) -> None:
    keep(tmp_path, 0, rank=0)
    keep(tmp_path, 1, rank=1)
    discard(tmp_path, "gold")
    assert not list(tmp_path.iterdir())

    keep(tmp_path, 0, rank=0)
    keep(tmp_path, 1, rank=1)
    with open_transcripts(tmp_path, "gold", decided_by=DECIDED, fresh=True) as transcripts:
        assert not transcripts.done
        transcripts.add(dialogue(2))
        keep(tmp_path, 3, rank=1)
        result = transcripts.finish(["task-2", "task-3"])
    assert [one.key for one in result] == ["task-2", "task-3"]
    assert (tmp_path / "gold.jsonl").read_bytes().count(b"\n") == 2


def test_a_report_is_without_damaged_dialogues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep(tmp_path, 0, 1, 2, rank=0)
    with open_transcripts(tmp_path, "gold", decided_by=DECIDED) as transcripts:
        transcripts.finish(["task-0", "task-1", "task-2"])
    path = tmp_path / "gold.jsonl"
    path.write_bytes(path.read_bytes().replace(b"task-1", b"task-7"))

    assert [episode.key for episode in read_simulations(tmp_path)["gold"]] == ["task-0", "task-2"]
    assert caplog.messages == [f"{path}: 1 damaged line; the report leaves them out"]


def finish(folder: Path, count: int, *, fresh: bool = False, said: str = "hello") -> list[Episode]:
    """Finish a simulation of `count` dialogues in which one answer was cut."""
    with open_transcripts(folder, "gold", decided_by=DECIDED, fresh=fresh) as transcripts:
        for number in range(count):
            if f"task-{number}" not in transcripts.done:
                episode = Episode(f"task-{number}", f"task-{number}", {}, number)
                episode.observe(said)
                episode.act("tea", (1, 2), is_cut=number == 1)
                episode.end("done")
                transcripts.add(episode)
        return transcripts.finish([f"task-{number}" for number in range(count)])


def correct(path: Path, number: int, correction: Any) -> bytes:
    """Correct an answer as the guide says, and return the line."""
    lines = path.read_bytes().splitlines(keepends=True)
    edited = json.loads(lines[number])
    del edited["checksum"]
    edited["messages"][1]["correction"] = correction
    lines[number] = json.dumps(edited).encode() + b"\n"
    path.write_bytes(b"".join(lines))
    return lines[number]


def test_corrections_stay_when_the_simulation_is_run_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    finish(tmp_path, 3)
    path = tmp_path / "gold.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    edited = correct(path, 1, "two teas")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")

    assert [one.key for one in finish(tmp_path, 3)] == ["task-0", "task-1", "task-2"]
    assert path.read_bytes() == whole[0] + edited + whole[2]
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith("gold")] == ["gold.jsonl"]
    assert not caplog.messages


def test_finished_transcripts_are_not_written_again(tmp_path: Path) -> None:
    finish(tmp_path, 3)
    path = tmp_path / "gold.jsonl"
    before = path.stat().st_ino, path.stat().st_mtime_ns
    finish(tmp_path, 3)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before
    finish(tmp_path, 4)
    assert path.read_bytes().count(b"\n") == 4


def test_a_file_with_edits_that_cannot_be_read_is_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    finish(tmp_path, 5)
    path = tmp_path / "gold.jsonl"
    whole = path.read_bytes()
    correct(path, 0, "")
    correct(path, 1, "two teas")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"tea", b"two teas")
    lines[3] = correct(path, 3, "two teas").replace(b'"hello"', b'"goodbye"')
    lines[4] = b'{"dialogue": 5}\n'
    path.write_bytes(b"".join([*lines, lines[1], b"teas\n"]))
    written = path.read_bytes()

    finish(tmp_path, 5)
    assert path.read_bytes() == whole.replace(whole.splitlines()[1], lines[1].rstrip())
    assert (tmp_path / "gold.jsonl.edited-1").read_bytes() == written
    other = "is there twice, not of this simulation, or has other messages"
    assert caplog.messages == [
        (
            f"{path}: 6 edited or damaged lines not kept; the file as it was is {path}.edited-1: "
            "correct these lines there and copy them back:\n"
            "  line 1: the correction '' is not a text\n"
            "  line 3: is not as it was written (its checksum differs)\n"
            f"  line 4: task-3 {other}\n"
            "  line 5: KeyError: 'task'\n"
            f"  line 6: task-1 {other}\n"
            "  line 7: is not JSON (Expecting value: line 1 column 1 (char 0))"
        )
    ]


def test_a_fresh_simulation_renames_a_file_with_edits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gold.jsonl"
    for number in (1, 2):
        finish(tmp_path, 2, fresh=True)
        assert not caplog.messages
        whole = path.read_bytes()
        correct(path, 1, "two teas")
        written = path.read_bytes()
        if number == 1:
            finish(tmp_path, 2, fresh=True)
        else:
            discard(tmp_path, "gold")
            finish(tmp_path, 2)
        copy = tmp_path / f"gold.jsonl.edited-{number}"
        assert path.read_bytes() == whole
        assert copy.read_bytes() == written
        assert caplog.messages == [
            f"{path}: the new simulation does not use its 1 edited or damaged line; the file is now {copy}"
        ]
        caplog.clear()


def test_edits_of_other_dialogues_with_the_same_name_are_not_kept(tmp_path: Path) -> None:
    finish(tmp_path, 2)
    path = tmp_path / "gold.jsonl"
    correct(path, 1, "two teas")
    (tmp_path / ".gold.jsonl").unlink()
    finish(tmp_path, 2, said="good evening")
    assert b"correction" not in path.read_bytes()
    assert b"correction" in (tmp_path / "gold.jsonl.edited-1").read_bytes()


def test_answers_that_were_cut_are_restored_from_a_transcript(tmp_path: Path) -> None:
    lines = [episode.line() for episode in finish(tmp_path, 2)]
    assert [line.get("cut") for line in lines] == [None, [1]]
    assert [[reply.is_cut for reply in from_line(line).replies] for line in lines] == [[False], [True]]
