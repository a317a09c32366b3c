"""Tests that project files agree: addresses, version, licence, and scripts that are called."""

import importlib.util
import re
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]
REPOSITORY = PROJECT["urls"]["Homepage"]
ADDRESS = re.compile(r"https://github\.com/partita[\w/.-]*")
OF_OUTSIDERS = [
    *("SECURITY.md", "CITATION.cff", "mkdocs.yml", "pyproject.toml", "docs/installation.md"),
    ".github/ISSUE_TEMPLATE/config.yml",
]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf8"))


@pytest.mark.parametrize("name", OF_OUTSIDERS)
def test_all_addresses_point_to_the_repository(name: str) -> None:
    addresses = ADDRESS.findall((ROOT / name).read_text(encoding="utf8"))
    assert addresses
    assert all(address == REPOSITORY or address.startswith(f"{REPOSITORY}/") for address in addresses)


def test_the_citation_has_the_version_the_licence_and_the_authors() -> None:
    citation = read("CITATION.cff")
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    assert citation["keywords"] == PROJECT["keywords"]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf8"), re.MULTILINE))


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_files_for_the_git_host_are_valid_and_call_existing_targets(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf8"))
    text = path.read_text(encoding="utf8")
    called = {target for line in re.findall(r"run: make (.+)", text) for target in line.split() if "=" not in target}
    assert called <= make_targets()
    for script in re.findall(r"run: bash (\S+)", text):
        assert (ROOT / script).is_file()


def test_the_workflow_runs_the_script_for_contributors() -> None:
    steps = read(".github/workflows/ci.yml")["jobs"]["all"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["bash .ci/run"]


def test_all_supported_pythons_are_tested() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    (setup,) = (step for step in jobs["all"]["steps"] if "setup-python" in step.get("uses", ""))
    tested = {setup["with"]["python-version"], *jobs["python"]["strategy"]["matrix"]["python-version"]}
    declared = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    assert tested == set(declared)


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_split_reference_has_every_section_and_every_row(hooks: ModuleType) -> None:
    whole = (ROOT / "docs" / "config-reference.md").read_text(encoding="utf8")
    split = "\n".join(hooks.split(whole).pages.values())
    headings, rows = r"^#+ (.+)$", r"^\| \[?`(\w+)"
    assert not Counter(re.findall(headings, whole, re.M)) - Counter(re.findall(headings, split, re.M))
    assert Counter(re.findall(rows, whole, re.M)) == Counter(re.findall(rows, split, re.M))


def test_each_page_of_the_reference_starts_with_its_title_and_is_in_the_navigation(hooks: ModuleType) -> None:
    pages = hooks.load(str(ROOT / "docs")).pages
    assert all(len(re.findall(r"^# ", page, re.MULTILINE)) == 1 and page.startswith("# ") for page in pages.values())
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf8")
    assert set(pages) == set(re.findall(r"config-reference/\w+\.md", navigation))
