"""Tests of the registry: classes by built-in name, by name from an installed package, or as `module:Class`."""

import sys
from pathlib import Path

import pytest

from partita import ConfigError
from partita.simulation.checkers import Exact
from partita.simulation.registry import CHECKERS, ENVIRONMENTS

from .packages import install


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a package with an environment and a checker; return the name of its module."""
    (tmp_path / "hotel_of_tests.py").write_text("class Desk: ...\nclass Rooms: ...\n", encoding="utf8")
    install(
        tmp_path,
        "[partita.environments]\nhotel = hotel_of_tests:Desk\n"
        "[partita.checkers]\nrooms = hotel_of_tests:Rooms\nexact = hotel_of_tests:Rooms\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hotel_of_tests", raising=False)
    return "hotel_of_tests"


def test_a_package_provides_names_for_its_classes(package: str) -> None:
    environment = ENVIRONMENTS.load("hotel", key="simulation.world.environment", folder=None)
    checker = CHECKERS.load("rooms", key="simulation.checker.type", folder=None)

    assert (environment.__module__, environment.__name__) == (package, "Desk")
    assert (checker.__module__, checker.__name__) == (package, "Rooms")


def test_installed_packages_do_not_override_built_in_names(package: str) -> None:
    assert CHECKERS.load("exact", key="simulation.checker.type", folder=None) is Exact


def test_a_class_can_be_used_without_a_name(tmp_path: Path) -> None:
    (tmp_path / "inn_of_tests.py").write_text("class Inn: ...\n", encoding="utf8")

    assert ENVIRONMENTS.load("inn_of_tests:Inn", key="k", folder=tmp_path).__name__ == "Inn"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("exat", "simulation.checker.type: no checker is named exat; did you mean exact?"),
        ("rewards", "simulation.checker.type: no checker is named rewards; did you mean reward?"),
        (
            "majority",
            (
                "simulation.checker.type: no checker is named majority; "
                "write one of contains, exact, json_equal, regex, reward, rooms, or module:Class"
            ),
        ),
        (
            "hotel_of_tests:Room",
            "simulation.checker.type: module hotel_of_tests has no class Room; did you mean Rooms?",
        ),
    ],
)
def test_an_unknown_name_is_reported_with_the_known_ones(package: str, written: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        CHECKERS.load(written, key="simulation.checker.type", folder=None)
    assert str(error.value) == text


def test_environments_only_have_names_from_packages() -> None:
    with pytest.raises(ConfigError) as error:
        ENVIRONMENTS.load("booking", key="simulation.world.environment", folder=None)
    assert str(error.value) == "simulation.world.environment: no environment is named booking; write module:Class"
