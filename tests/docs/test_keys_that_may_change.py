"""The guide on training lists exactly the keys that may change between starts of a run, and when it is used."""

import re
from pathlib import Path

import pytest

from partita.runs.settings import BESIDE_ROUNDS, FREE_KEYS, USE_KEYS

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "training.md"
RESUMING = "A run can only be resumed with the file that started it. These keys may change:"
USING = "provided that nothing differs that affects the training. These keys may differ:"


def items_after(sentence: str) -> list[str]:
    """Return the items of the list after a sentence of the guide."""
    text = GUIDE.read_text(encoding="utf8").split(sentence, 1)[1].strip()
    return re.split(r"\n(?=- )", text.split("\n\n", 1)[0])


def keys_of(item: str) -> set[str]:
    """Return the keys of an item: single ones, or those of the section before a colon."""
    section, _, keys = item.rpartition(": ")
    names = re.findall(r"`([a-z_.]+)`", keys)
    return {f"{section.strip('-` ')}.{name}" for name in names} if section else set(names)


@pytest.mark.parametrize(("sentence", "keys"), [(RESUMING, FREE_KEYS), (USING, USE_KEYS)], ids=["resume", "use"])
def test_the_lists_of_the_guide_are_complete(sentence: str, keys: tuple[str, ...]) -> None:
    *items, simulation = items_after(sentence)
    assert set().union(*map(keys_of, items)) == {key for key in keys if not key.startswith("simulation.")}
    assert simulation.startswith("- `simulation`")


def test_the_keys_of_the_simulation_that_may_change_with_self_training_are_listed() -> None:
    free = [key for key in (*BESIDE_ROUNDS, *FREE_KEYS) if key.startswith("simulation.")]
    assert set(re.findall(r"`([a-z_.]+)`", items_after(RESUMING)[-1])) == {
        "simulation",
        *(key.removeprefix("simulation.") for key in free),
    }
