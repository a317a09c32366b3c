"""A run records the command that started it and the commit that is checked out."""

from pathlib import Path

import pytest

from partita.runs.origin import command_line, git_commit

COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/usr/bin/partita", "train", "my file.yaml"], "partita train 'my file.yaml'"),
        (["/lib/partita/__main__.py", "train", "a.yaml"], "partita train a.yaml"),
        (["train.py", "--epochs", "3"], "python train.py --epochs 3"),
        (["/lib/ipykernel_launcher.py", "-f", "kernel.json"], None),
        (["-c"], None),
        ([""], None),
    ],
)
def test_the_command_is_one_that_can_be_run_again(arguments: list[str], command: str | None) -> None:
    assert command_line(arguments) == command


def repository(folder: Path, head: str) -> Path:
    """Write the part of a repository that is read."""
    git = folder / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text(f"{head}\n", encoding="utf8")
    return git


def test_the_commit_of_a_branch_is_found_from_a_folder_inside(tmp_path: Path) -> None:
    git = repository(tmp_path, "ref: refs/heads/main")
    (tmp_path / "deep/er").mkdir(parents=True)
    assert git_commit(tmp_path / "deep/er") is None  # nothing is committed yet
    (git / "packed-refs").write_text(f"# pack-refs\n{OTHER} refs/heads/mainly\n{COMMIT} refs/heads/main\n", "utf8")
    assert git_commit(tmp_path / "deep/er") == COMMIT
    (git / "refs/heads/main").write_text(f"{OTHER}\n", encoding="utf8")
    assert git_commit(tmp_path / "deep/er") == OTHER


def test_the_commit_of_a_worktree_and_of_a_detached_head_is_found(tmp_path: Path) -> None:
    git = repository(tmp_path / "main", COMMIT)
    assert git_commit(tmp_path / "main") == COMMIT
    own, worktree = git / "worktrees/other", tmp_path / "worktree"
    own.mkdir(parents=True)
    worktree.mkdir()
    (worktree / ".git").write_text(f"gitdir: {own}\n", encoding="utf8")
    (own / "HEAD").write_text("ref: refs/heads/other\n", encoding="utf8")
    (own / "commondir").write_text("../..\n", encoding="utf8")
    (git / "refs/heads/other").write_text(f"{OTHER}\n", encoding="utf8")
    assert git_commit(worktree) == OTHER


@pytest.mark.parametrize("head", ["ref: ../../rows.jsonl", "ref: refs/heads/.invalid", "nonsense", ""])
def test_what_is_no_commit_is_left_out(tmp_path: Path, head: str) -> None:
    repository(tmp_path, head)
    (tmp_path / "rows.jsonl").write_text('{"text": "a secret"}\n', encoding="utf8")
    assert git_commit(tmp_path) is None


def test_a_file_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    (tmp_path / ".git").write_bytes(b"\xff\xfe")
    assert git_commit(tmp_path) is None
    (tmp_path / ".git").write_text("gitdir: /nowhere", encoding="utf8")
    assert git_commit(tmp_path) is None
