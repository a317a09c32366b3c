"""What can go from runs is found and removed; models, running runs and files of users stay."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from partita.runs.cleaning import DAY, Removable, Removal, removable_of_cache, removable_of_runs, remove
from partita.runs.listing import read_runs
from partita.runs.locks import LOCK, lock
from partita.runs.row_results import EARLIER
from partita_schema.common.files import temporary_path
from partita_schema.errors import ResumeError

from ..run_directories import MakeRun, write_run

KEY = "0123456789abcdef" * 2


def found(folder: Path, *, older_than_days: float = 30, days_later: float = 0) -> list[Removable]:
    runs = read_runs(folder)
    now = max(run.updated for run in runs) + days_later * DAY
    return removable_of_runs(runs, older_than_days=older_than_days, now=now)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_checkpoints_of_a_finished_run_are_removed_and_nothing_else(make_run: MakeRun) -> None:
    folder = make_run("tickets")
    before = files(folder)
    (item,) = found(folder.parent)
    assert (item.what, item.bytes) == ("checkpoints of a finished run", 5000)
    assert remove(item) == Removal(5000, [])
    assert before - files(folder) == {"checkpoints/step-000004/model.safetensors"}
    assert found(folder.parent) == []


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_checkpoints_stay_if_the_model_could_not_be_written_without_them(damage: str, make_run: MakeRun) -> None:
    model = make_run("tickets") / "model" / "model.safetensors"
    if damage == "missing":
        model.unlink()
    else:
        model.write_bytes(b"y" * 1000)
    assert found(model.parents[2]) == []


def test_unfinished_runs_are_removed_only_from_the_age_on(make_run: MakeRun) -> None:
    folder = make_run("tickets", status="failed")
    make_run("done")
    assert [item.folder.name for item in found(folder.parent)] == ["done"]
    assert [item.folder.name for item in found(folder.parent, days_later=29)] == ["done"]
    items = found(folder.parent, days_later=31)
    assert [item.what for item in items] == ["checkpoints of a finished run", "failed run, 31 days old"]
    assert [item.is_whole_run for item in items] == [False, True]
    remove(items[1])
    assert not folder.exists()
    assert (folder.parent / "done").exists()


def test_a_file_of_the_user_stays_in_a_removed_run(make_run: MakeRun) -> None:
    folder = make_run("tickets", status="interrupted")
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoints" / "mine.bin").touch()
    (item,) = found(folder.parent, days_later=31)
    remove(item)
    assert files(folder) == {"notes.txt", "checkpoints/mine.bin", ".lock"}


def test_the_references_of_all_precisions_are_removed(make_run: MakeRun) -> None:
    folder = make_run("tickets", status="interrupted")
    for name in ("references.jsonl", "references-bf16.jsonl", "references-fp16.jsonl"):
        (folder / name).touch()
    (item,) = found(folder.parent, days_later=31)
    remove(item)
    assert not list(folder.glob("references*"))


@pytest.mark.parametrize("name", ["model", "rounds", "damaged-model"])
def test_an_unfinished_run_with_a_model_stays(name: str, make_run: MakeRun) -> None:
    folder = make_run("tickets", status="failed")
    (folder / name).mkdir()
    assert found(folder.parent, days_later=100) == []


def test_a_running_run_stays_and_a_dead_one_goes(make_run: MakeRun) -> None:
    folder = make_run("tickets", status="running")
    with lock(folder):
        assert found(folder.parent, days_later=100) == []
    (item,) = found(folder.parent, days_later=100)
    assert item.what == "dead run, 100 days old"


def test_a_run_that_was_started_after_the_question_stays(make_run: MakeRun) -> None:
    folder = make_run("tickets")
    (item,) = found(folder.parent)
    before = files(folder)
    with lock(folder), pytest.raises(ResumeError, match=f"{folder} is in use by another process"):
        remove(item)
    assert files(folder) == before


def test_a_run_that_was_finished_after_the_question_stays(make_run: MakeRun) -> None:
    folder = make_run("tickets", status="failed")
    (item,) = found(folder.parent, days_later=31)
    make_run("tickets")
    before = files(folder)
    assert remove(item) == Removal(0, [])
    assert files(folder) == before


def test_unreadable_runs_and_outputs_stay(make_run: MakeRun, tmp_path: Path) -> None:
    (make_run("damaged") / "manifest.json").write_text("{")
    (tmp_path / "runs" / "waiter" / "transcripts").mkdir(parents=True)
    assert found(tmp_path / "runs", days_later=100) == []


def test_links_are_not_followed(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("tickets")
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    (folder / "checkpoints").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs" / "link").symlink_to(make_run("other"))
    assert [item.folder.name for item in found(tmp_path / "runs")] == ["other"]


def test_checkpoints_of_rounds_of_self_training_are_removed_with_the_run_locked(make_run: MakeRun) -> None:
    folder = make_run("tickets")
    make_run("tickets/rounds/1")
    items = found(folder.parent)
    assert [item.folder for item in items] == [folder, folder / "rounds" / "1"]
    with lock(folder), pytest.raises(ResumeError):
        remove(items[1])
    remove(items[1])
    assert (folder / "rounds" / "1" / "model").exists()
    assert not (folder / "rounds" / "1" / "checkpoints").exists()


def test_a_round_with_a_damaged_manifest_stays_and_the_others_are_found(make_run: MakeRun) -> None:
    folder = make_run("tickets")
    (make_run("tickets/rounds/1") / "manifest.json").write_text("{")
    make_run("tickets/rounds/2")
    assert [item.folder for item in found(folder.parent)] == [folder, folder / "rounds" / "2"]


def test_incomplete_files_of_a_killed_process_are_removed(make_run: MakeRun) -> None:
    folder = make_run("tickets", status="failed")
    (folder / ".predictions.csv.0123.partial").write_bytes(b"x" * 70)
    temporary_path(folder / "manifest.json").write_bytes(b"x" * 20)
    for name in (temporary_path(folder / "model").name, ".tokens-abc", ".ray-0123", EARLIER):
        (folder / name).mkdir()
    (folder / ".model.writing" / "model.safetensors").write_bytes(b"x" * 200)
    (item,) = found(folder.parent)
    assert (item.what, item.bytes, item.is_whole_run) == ("incomplete files", 290, False)
    remove(item)
    assert {path.name for path in folder.iterdir()} >= {"manifest.json", "checkpoints"}
    assert [path.name for path in folder.glob(".*")] == [LOCK]


def make_tokens(folder: Path) -> Path:
    tokens = folder / KEY
    tokens.mkdir(parents=True)
    (tokens / "contents.json").write_bytes(b"x" * 40)
    (folder / f"{KEY}.lock").touch()
    return tokens


@pytest.mark.parametrize(("days", "expected"), [(29, []), (31, ["cached tokens"])])
def test_old_cached_tokens_are_removed(days: int, expected: list[str], tmp_path: Path) -> None:
    tokens = make_tokens(tmp_path)
    (tmp_path / "mine").mkdir()
    now = (tmp_path / f"{KEY}.lock").stat().st_mtime + days * DAY
    items = removable_of_cache(tmp_path, older_than_days=30, now=now)
    assert [item.what for item in items] == expected
    for item in items:
        remove(item)
    assert tokens.exists() == (not expected)
    assert (tmp_path / "mine").exists()


def test_torn_tokens_are_removed_at_any_age_unless_a_process_computes_them(tmp_path: Path) -> None:
    make_tokens(tmp_path)
    (tmp_path / f".{KEY}.abc").mkdir()
    now = (tmp_path / f"{KEY}.lock").stat().st_mtime
    (item,) = removable_of_cache(tmp_path, older_than_days=30, now=now)
    assert item.what == "incomplete cached tokens"
    with (tmp_path / f"{KEY}.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert removable_of_cache(tmp_path, older_than_days=30, now=now) == []
        with pytest.raises(ResumeError, match=r"\.lock is in use by another process"):
            remove(item)
    remove(item)
    assert {path.name for path in tmp_path.iterdir()} == {KEY, f"{KEY}.lock"}


def test_a_cache_that_does_not_exist_has_nothing_to_remove(tmp_path: Path) -> None:
    assert removable_of_cache(tmp_path / "nowhere", older_than_days=0, now=0) == []


def test_the_rest_of_a_checkpoint_is_removed_if_a_file_cannot_be(without_root: Path) -> None:
    checkpoints = write_run(without_root, "tickets") / "checkpoints"
    (checkpoints / "step-000004" / "closed").mkdir()
    (checkpoints / "step-000004" / "closed" / "file").write_bytes(b"x" * 30)
    (checkpoints / "step-000008").mkdir()
    (checkpoints / "step-000008" / "file").write_bytes(b"x" * 70)
    with read_only(checkpoints / "step-000004" / "closed"):
        (item,) = found(without_root / "runs")
        removal = remove(item)
    assert removal == Removal(5070, [f"{checkpoints}/step-000004/closed/file: Permission denied"])
    assert files(checkpoints) == {"step-000004/closed/file"}


def test_an_unfinished_run_stays_in_the_list_until_all_of_it_is_removed(without_root: Path) -> None:
    folder = write_run(without_root, "tickets", status="failed")
    with read_only(folder / "checkpoints" / "step-000004"):
        (item,) = found(without_root / "runs", days_later=31)
        removal = remove(item)
    assert removal.problems == [f"{folder}/checkpoints/step-000004/model.safetensors: Permission denied"]
    assert files(folder) == {"manifest.json", "checkpoints/step-000004/model.safetensors", ".lock"}
    (item,) = found(without_root / "runs", days_later=31)
    assert remove(item).problems == []
    assert not folder.exists()


def test_a_run_and_cached_tokens_that_cannot_be_locked_stay(without_root: Path) -> None:
    folder = write_run(without_root, "tickets")
    (folder / ".lock").unlink()
    tokens = make_tokens(without_root / "tokens")
    (tokens.parent / f".{KEY}.abc").mkdir()
    (tokens.parent / f"{KEY}.lock").chmod(0o400)
    with read_only(folder):
        items = [*found(folder.parent), *removable_of_cache(tokens.parent, older_than_days=30, now=0)]
        removals = [remove(item) for item in items]
    assert [item.what for item in items] == ["checkpoints of a finished run", "incomplete cached tokens"]
    assert removals == [Removal(0, [f"{folder}: Permission denied"]), Removal(0, [f"{tokens}: Permission denied"])]
    assert (folder / "checkpoints" / "step-000004" / "model.safetensors").exists()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    folder.chmod(0o500)
    yield
    folder.chmod(0o700)
