"""Every key of the schema has an effect: with another value, something else happens."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import material
from .effects import GENERIC, Case, cases, merged
from .observers import Observation, observed
from .schema_keys import leaf_keys, other_value, value_at, with_value
from .table_adapters import ADAPTERS
from .table_answers import ANSWERS, ENDPOINT
from .table_data import DATA
from .table_dialogues import DIALOGUES
from .table_models import MODELS
from .table_simulation import SIMULATION
from .table_single import NOT_OBSERVED, SINGLE
from .table_training import TRAINING

GROUPS = [*ADAPTERS, *TRAINING, *DATA, *ANSWERS, *ENDPOINT, *MODELS, *DIALOGUES, *SIMULATION, *SINGLE]
CASES = cases(*GROUPS)
KEYS = leaf_keys()


def test_every_key_of_the_schema_is_flipped_or_named_with_a_reason() -> None:
    flipped = [case.key for case in CASES]
    assert len(set(flipped)) == len(flipped)
    assert set(flipped) & set(NOT_OBSERVED) == set()
    assert {*flipped, *NOT_OBSERVED} == set(KEYS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The material of all configurations."""
    found = tmp_path_factory.mktemp("material")
    material.fill(found)
    gc.collect()
    gc.freeze()  # each run collects garbage, and looks through all libraries for it
    yield found
    gc.unfreeze()


@pytest.fixture(scope="module")
def bases(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Observation]]:
    """Configurations that several keys are flipped on: where they were observed, and what was seen."""
    return {}


def observe(case: Case, config: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch) -> Observation:
    monkeypatch.chdir(place)
    monkeypatch.setenv("PARTITA_KEY_OF_EFFECTS", "secret")
    monkeypatch.setenv("PARTITA_CACHE", str(place / "cache"))
    return observed(case.group.observer, config, place)


def other_config(case: Case) -> dict[str, Any]:
    """The base of a case with another value of its key."""
    value = case.flip.value
    if value is GENERIC:
        value = other_value(KEYS[case.key], value_at(case.base, case.key))
    assert value != value_at(case.base, case.key), "the value is the same"
    return merged(with_value(case.base, case.key, value), case.flip.also)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # of compile
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # the observers have hooks on all modules
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.key, marks=[pytest.mark.long] if case.group.long else []) for case in CASES],
)
def test_another_value_makes_a_difference(
    case: Case,
    folder: Path,
    bases: dict[str, tuple[Path, Observation]],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if case.group.prepare is not None:
        case.group.prepare(folder)
    base = json.dumps([case.group.name, case.base], sort_keys=True)
    if base not in bases:
        place = material.place_of(folder, tmp_path_factory.mktemp("base"))
        bases[base] = place, observe(case, case.base, place, monkeypatch)
    place, before = bases[base]
    other = material.place_of(folder, tmp_path_factory.mktemp("other"))
    (other / "before").symlink_to(place)
    after = observe(case, other_config(case), other, monkeypatch)
    assert "refusal" not in before, before["refusal"]
    differ = sorted(part for part in {*before, *after} if before.get(part) != after.get(part))
    if case.part != "refusal":
        assert "refusal" not in after, after["refusal"]
    assert case.part in differ, f"another {case.key} changes no {case.part}, only {', '.join(differ) or 'nothing'}"
