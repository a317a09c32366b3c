"""Where a run comes from: the command that started it, and the commit of the folder in which it was started."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

OWN = ("partita", "__main__.py")
"""Names of the program that the command line of partita starts."""
WITHOUT_COMMAND = ("", "-c", "ipykernel_launcher.py", "colab_kernel_launcher.py", "default_worker.py")
"""Names of programs whose arguments say nothing: the interpreter, notebooks, and workers of Ray."""
DATA_OPTIONS = ("--dataset", "--stdin-format")
"""Options of commands that name rows."""
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def command_line(arguments: Sequence[str] | None = None) -> str | None:
    """Return the command that started this process; None in a notebook or an interactive session.

    `arguments` are those of the process, by default `sys.argv`.
    """
    program, *others = sys.argv if arguments is None else arguments
    name = Path(program).name
    if name in WITHOUT_COMMAND:
        return None
    return shlex.join(["partita", *others] if name in OWN else ["python", program, *others])


def data_options(manifest: Mapping[str, Any]) -> list[str]:
    """Return the options that name the rows in the command that started a run, with their values."""
    command = shlex.split(manifest.get("command") or "")
    options = dict.fromkeys(DATA_OPTIONS, "")
    for word, following in zip_longest(command, command[1:], fillvalue=""):
        name, has_value, value = word.partition("=")
        if name in options:
            options[name] = value if has_value else following
    return [word for name, value in options.items() if value for word in (name, value)]


def git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder or in one above it; None without one. Starts no process."""
    try:
        git = next((path for above in (folder, *folder.parents) if (path := above / ".git").exists()), None)
        return None if git is None else commit_of(git)
    except (OSError, UnicodeDecodeError):
        return None


def commit_of(git: Path) -> str | None:
    """Return the commit of a `.git` folder, or of the file in its place that a worktree has; None if there is none."""
    if git.is_file():
        git = git.parent / git.read_text(encoding="utf8").removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text(encoding="utf8").strip()
    if not head.startswith("ref:"):
        return commit_or_none(head)
    name, shared = head.removeprefix("ref:").strip(), git
    if (git / "commondir").is_file():
        shared = git / (git / "commondir").read_text(encoding="utf8").strip()
    if (shared / name).is_file():
        return commit_or_none((shared / name).read_text(encoding="utf8").strip())
    packed = shared / "packed-refs"
    lines = packed.read_text(encoding="utf8").splitlines() if packed.is_file() else []
    return next((commit_or_none(line.split()[0]) for line in lines if line.split()[1:] == [name]), None)


def commit_or_none(text: str) -> str | None:
    """Return a text if it is the name of a commit."""
    return text if COMMIT.fullmatch(text) else None
