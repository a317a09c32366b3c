"""Tests that lock files pin the requirements of pyproject.toml with hashes, and separate development tools."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(name: str) -> dict[str, tuple[str, int]]:
    """Return version and number of hashes of each package in a lock file."""
    text = (ROOT / name).read_text(encoding="utf8")
    entries = re.split(r"\n(?=\S)", re.sub(r"(?m)^\s*#.*\n", "", text))
    results = {}
    for entry in filter(str.strip, entries):
        match = re.match(r"(?P<name>[\w.-]+)==(?P<version>[^\s;]+)", entry)
        assert match is not None, entry
        results[canonical(match["name"])] = (match["version"], entry.count("--hash=sha256:"))
    return results


def names(requirements: list[str]) -> set[str]:
    return {canonical(re.split(r"[<>=!~;\[ ]", one)[0]) for one in requirements} - {"torch", "partita"}


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_every_pin_has_hashes_and_none_is_for_a_device(name: str) -> None:
    result = pins(name)
    assert all(hashes for _, hashes in result.values())
    assert not [one for one in result if one == "torch" or one.startswith(("nvidia-", "triton", "cuda-"))]


def test_the_runtime_lock_has_the_requirements_and_no_development_tools() -> None:
    runtime, tools = pins("requirements.lock"), names(PROJECT["optional-dependencies"]["dev"])
    assert names(PROJECT["dependencies"]) <= set(runtime)
    assert not {"pytest", "mypy", "ruff", "hypothesis", "import-linter"} & set(runtime)
    assert tools <= set(pins("requirements-dev.lock"))


def test_containers_made_from_the_runtime_lock_can_serve_and_chat() -> None:
    extras = PROJECT["optional-dependencies"]
    for file in ("Dockerfile", "Dockerfile.cuda"):
        assert "--requirement requirements.lock" in (ROOT / file).read_text(encoding="utf8")
    assert names(extras["serve"]) | names(extras["chat"]) <= set(pins("requirements.lock"))


def test_both_locks_agree() -> None:
    runtime, development = pins("requirements.lock"), pins("requirements-dev.lock")
    assert {name: development[name] for name in runtime} == runtime


def test_torch_is_pinned_in_a_separate_file() -> None:
    lines = (ROOT / "requirements-torch.txt").read_text(encoding="utf8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["torch==2.13.0"]
