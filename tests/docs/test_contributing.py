"""Tests that the modules and folders named in the codebase tour, the recipes and the decisions exist."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["benchmarks", "docs", "examples", "framework", "schema", "tests", "trainers"]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf8")


def rows_under(heading: str) -> list[str]:
    """Return the first cell of each row of the table after a heading."""
    table = TEXT.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [cell.removesuffix("/") for cell in re.findall(r"^\| `([\w./]+)` \|", table, re.MULTILINE)]


def test_the_tour_lists_every_folder_in_the_order_of_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["name"] == "layers of the framework")
    assert [layer.removesuffix(".py") for layer in rows_under("layer")] == layers[1:], "all but __main__"
    folders = {path.parent.name for path in (ROOT / "framework" / "partita").glob("*/__init__.py")}
    assert folders == set(layers) - {"__main__", "model"}


def test_every_name_that_a_recipe_looks_for_in_a_file_is_there() -> None:
    named = re.findall(r"`(\w+)`(?: and `(\w+)`)?\s+(?:of|in)\s+`((?:\w+/)+\w+\.py)`", TEXT)
    wanted = [(name, path) for *names, path in named for name in names if name and "NAME" not in path]
    assert len(wanted) > 10
    files = {f"/{path.relative_to(ROOT)}": path for top in FOLDERS for path in (ROOT / top).rglob("*.py")}
    for name, path in wanted:
        [file] = [file for place, file in files.items() if place.endswith(f"/{path}")]
        assert re.search(rf"\b{name}\b", file.read_text(encoding="utf8")), (name, path)


PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_and_folder_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf8")
    paths = re.findall(r"`((?:\w+/)*\w+\.py|(?:framework|schema|trainers|tests|benchmarks)/[\w/]+)`", text)
    known = [f"/{path.relative_to(ROOT)}" for top in FOLDERS for path in (ROOT / top).rglob("*")]
    missing = [path for path in paths if not any(one.endswith(f"/{path.removesuffix('/')}") for one in known)]
    assert [path for path in missing if "NAME" not in path] == []
