"""Programs are found by a name of ours, by one that a package brings, or as `module:Class`."""

import sys
from pathlib import Path

import pytest

from partita import ConfigError
from partita.simulation.checkers import Exact
from partita.simulation.registry import CHECKERS, ENVIRONMENTS

from .packages import install


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package that names an environment and a checker; the name of its module."""
    (tmp_path / "hotel_of_tests.py").write_text("class Desk: ...\nclass Rooms: ...\n", encoding="utf8")
    install(
        tmp_path,
        "[partita.environments]\nhotel = hotel_of_tests:Desk\n"
        "[partita.checkers]\nrooms = hotel_of_tests:Rooms\nexact = hotel_of_tests:Rooms\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hotel_of_tests", raising=False)
    return "hotel_of_tests"


def test_a_package_brings_names_for_its_classes(package: str) -> None:
    environment = ENVIRONMENTS.load("hotel", key="simulation.world.environment", folder=None)
    checker = CHECKERS.load("rooms", key="simulation.checker.type", folder=None)

    assert (environment.__module__, environment.__name__) == (package, "Desk")
    assert (checker.__module__, checker.__name__) == (package, "Rooms")


def test_a_built_in_name_means_the_same_whatever_is_installed(package: str) -> None:
    assert CHECKERS.load("exact", key="simulation.checker.type", folder=None) is Exact


def test_a_class_needs_no_name(tmp_path: Path) -> None:
    (tmp_path / "inn_of_tests.py").write_text("class Inn: ...\n", encoding="utf8")

    assert ENVIRONMENTS.load("inn_of_tests:Inn", key="k", folder=tmp_path).__name__ == "Inn"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("exat", "simulation.checker.type: no checker is named exat; did you mean exact?"),
        (
            "majority",
            (
                "simulation.checker.type: no checker is named majority; "
                "write one of contains, exact, json_equal, regex, rooms, or module:Class"
            ),
        ),
        (
            "hotel_of_tests:Room",
            "simulation.checker.type: module hotel_of_tests has no class Room; did you mean Rooms?",
        ),
    ],
)
def test_a_name_that_is_not_there_is_reported_with_those_that_are(package: str, written: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        CHECKERS.load(written, key="simulation.checker.type", folder=None)
    assert str(error.value) == text


def test_environments_have_no_names_but_those_that_packages_bring() -> None:
    with pytest.raises(ConfigError) as error:
        ENVIRONMENTS.load("booking", key="simulation.world.environment", folder=None)
    assert str(error.value) == "simulation.world.environment: no environment is named booking; write module:Class"
