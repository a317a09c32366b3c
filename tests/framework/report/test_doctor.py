"""Tests of the machine report: installed and missing packages, how to install them, and a Hub that never answers."""

import socket
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest

from partita.report import doctor
from partita.report.doctor import EXTRAS, Requirement, ask_hub, diagnose, numbers, requirements


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_ENDPOINT", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Start a server that accepts connections and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server


def test_the_report_names_versions_devices_memory_disk_and_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    diagnosis = diagnose()
    lines = list(diagnosis.lines())
    assert lines[0].startswith(f"partita {version('partita')}, Python 3.")
    assert any(line.split() == ["torch", version("torch")] for line in lines)
    assert any(line.startswith("  cpu: ") for line in lines)
    assert f"  current folder: {diagnosis.disk[0][2] / 2**30:,.1f} GiB free in {Path.cwd()}" in lines
    assert "Hub: not asked: HF_HUB_OFFLINE is set" in lines
    assert lines[-1] == "no problems found"
    assert not diagnosis.problems


def test_waiting_for_a_hub_that_does_not_answer_is_limited(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://user:secret@127.0.0.1:{listener.getsockname()[1]}")
    said = ask_hub(seconds=0.2)
    assert said in ("127.0.0.1 does not answer within 0.2 s", "127.0.0.1 cannot be reached: timed out")
    listener.close()
    assert ask_hub(seconds=5).startswith("127.0.0.1 cannot be reached: ")


def test_missing_packages_come_with_the_command_that_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    results = (
        Requirement("torch", "99.1", "", "2.13.0+cpu"),
        Requirement("peft", "0.21", "", None),
        Requirement("ray", "2.51", "ray", None),
        Requirement("matplotlib", "3.10", "plot", "3.10.1"),
    )
    monkeypatch.setattr(doctor, "requirements", lambda: iter(results))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    diagnosis = diagnose()
    assert diagnosis.problems == (
        "torch 2.13.0+cpu is older than 99.1; run pip install 'torch>=99.1'",
        "peft is missing; run pip install 'peft>=0.21'",
    )
    lines = list(diagnosis.lines())
    assert (
        lines[lines.index("extras that are not installed:") + 1] == "  backend: {type: ray}: pip install 'partita[ray]'"
    )
    assert not any("partita[plot]" in line for line in lines)


def problems_of(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(doctor, "requirements", lambda: iter(()))
    return diagnose().problems


@pytest.mark.parametrize("inside", ["", "folder/in it"], ids=["file", "folder in a file"])
def test_a_cache_that_is_a_file_is_a_problem(inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / inside
    monkeypatch.setenv("PARTITA_CACHE", str(cache))
    [problem] = problems_of(monkeypatch)
    assert problem == (
        f"the cache of partita cannot be written to {cache}: Not a directory; name another folder in the environment "
        "variable PARTITA_CACHE"
    )


def test_a_cache_that_cannot_be_written_is_a_problem(without_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = without_root / "closed"
    closed.mkdir(mode=0o000)
    monkeypatch.setenv("PARTITA_CACHE", str(closed / "cache" / "of partita"))
    [problem] = problems_of(monkeypatch)
    closed.chmod(0o700)
    assert problem == (
        f"the cache of partita cannot be written to {closed}/cache/of partita: Permission denied; name another folder "
        "in the environment variable PARTITA_CACHE"
    )


def test_a_cache_that_does_not_exist_yet_is_no_problem_and_is_not_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "new" / "cache"))
    assert problems_of(monkeypatch) == ()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_temporary_files_that_does_not_exist_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    [problem] = problems_of(monkeypatch)
    assert problem == (
        f"temporary files cannot be written to {tmp_path}/none: No such file or directory; name another folder in the "
        "environment variable TMPDIR"
    )


def test_every_extra_except_the_one_for_developers_is_explained() -> None:
    assert {one.extra for one in requirements()} == {"", *EXTRAS}


def test_versions_are_compared_numerically() -> None:
    assert numbers("2.13.0+cpu") == (2, 13, 0)
    assert numbers("10.0rc1") == (10, 0)
    assert numbers("") == ()
