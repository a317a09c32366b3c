"""Tests that every key of the schema has an effect: another value changes the observed results."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import inputs
from .effects import GENERIC, Case, cases, merged
from .measurements import fix_measurements
from .observers import COMMANDS, Observation, observed
from .schema_keys import leaf_keys, other_value, value_at, with_value
from .table_adapters import ADAPTERS
from .table_answers import ANSWERS, ENDPOINT
from .table_data import DATA
from .table_dialogues import DIALOGUES
from .table_heads import HEADS
from .table_models import MODELS
from .table_preference import PREFERENCE
from .table_simulation import SIMULATION
from .table_single import NOT_OBSERVED, SINGLE
from .table_sweeps import SWEEPS
from .table_training import TRAINING

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),  # from compile
    pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning"),  # the observers have hooks on all modules
]
GROUPS = [
    *ADAPTERS,
    *TRAINING,
    *DATA,
    *ANSWERS,
    *ENDPOINT,
    *MODELS,
    *DIALOGUES,
    *HEADS,
    *PREFERENCE,
    *SIMULATION,
    *SWEEPS,
    *SINGLE,
]
CASES = cases(*GROUPS)
KEYS = leaf_keys()
BASES = {case.name_of_base: case for case in reversed(CASES)}
"""The first case of each base."""


def test_every_key_of_the_schema_is_tested_or_listed_with_a_reason() -> None:
    flipped = [case.key for case in CASES]
    assert len(set(flipped)) == len(flipped)
    assert set(flipped) & set(NOT_OBSERVED) == set()
    assert {*flipped, *NOT_OBSERVED} == set(KEYS)


@pytest.fixture(scope="module", autouse=True)
def forked_commands(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the commands of the observers as forks; the first of them starts the server."""
    COMMANDS.append(lambda: request.getfixturevalue("forks"))
    yield
    COMMANDS.pop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the input files of all configurations."""
    result = tmp_path_factory.mktemp("inputs")
    inputs.fill(result)
    return result


Seen = tuple[Path, Observation]


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    """Return a new folder with the inputs."""
    return inputs.place_of(folder, tmp_path)


@pytest.fixture(scope="module")
def bases() -> dict[str, Seen]:
    """Return the cache of base observations: folder and results by name."""
    return {}


@pytest.fixture
def base(
    case: Case,
    folder: Path,
    bases: dict[str, Seen],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Seen:
    """Return the observation of the base of a case; several cases share it."""
    if case.group.prepare is not None:
        case.group.prepare(folder)
    if case.name_of_base not in bases:
        place = inputs.place_of(folder, tmp_path_factory.mktemp("base"))
        bases[case.name_of_base] = place, observe(case, case.base, place, monkeypatch)
    return bases[case.name_of_base]


def observe(case: Case, config: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch) -> Observation:
    fix_measurements(monkeypatch)
    monkeypatch.chdir(place)
    monkeypatch.setenv("PARTITA_KEY_OF_EFFECTS", "secret")
    monkeypatch.setenv("PARTITA_CACHE", str(place / "cache"))
    return observed(case.group.observer, config, place)


def other_config(case: Case) -> dict[str, Any]:
    """Return the base of a case with another value of its key."""
    value = case.flip.value
    if value is GENERIC:
        value = other_value(KEYS[case.key], value_at(case.base, case.key))
    assert value != value_at(case.base, case.key), "the value is the same"
    return merged(with_value(case.base, case.key, value), case.flip.also)


def each(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """Run a test with each of these cases."""
    marks = {False: [], True: [pytest.mark.long]}
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.key, marks=marks[case.group.long]) for case in cases]
    )


@each(case for case in CASES if BASES[case.name_of_base] is case)
def test_a_repeated_observation_of_a_base_is_the_same(
    case: Case, base: Seen, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = observe(case, case.base, place, monkeypatch)
    assert again == base[1], f"{', '.join(different(base[1], again))} differs from run to run"


@each(CASES)
def test_another_value_changes_the_results(
    case: Case, base: Seen, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, before = base
    assert "refusal" not in before, before["refusal"]
    (place / "before").symlink_to(where)
    after = observe(case, other_config(case), place, monkeypatch)
    if case.part != "refusal":
        assert "refusal" not in after, after["refusal"]
    differ = different(before, after)
    assert case.part in differ, f"another {case.key} changes no {case.part}, only {', '.join(differ) or 'nothing'}"


def different(one: Observation, other: Observation) -> list[str]:
    """Return the parts in which two observations differ."""
    return sorted(part for part in {*one, *other} if one.get(part) != other.get(part))
