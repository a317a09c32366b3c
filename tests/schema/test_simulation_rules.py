"""What a simulation cannot be asked is told with its place and what to write instead."""

from typing import Any

import pytest

from partita_schema.errors import ConfigError
from partita_schema.load import load_config

WORLD = {"type": "environment", "environment": "desk:Desk"}
FILE: dict[str, Any] = {
    "base_model": "base",
    "input_features": [{"name": "messages", "type": "dialogue"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "simulation": {"world": WORLD, "tasks": {"count": 5}},
}


def told(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(FILE | sections)
    return str(caught.value).splitlines()[-1].strip()


def test_a_single_history_may_be_a_word() -> None:
    for written in ("gold", ["gold"]):
        config = load_config(FILE | {"simulation": FILE["simulation"] | {"history": written}}).config
        assert config.simulation is not None
        assert config.simulation.history == ("gold",)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"world": {"type": "replay"}},
            "simulation.tasks.count: replay takes dialogues of a data set; write source, or data.test",
        ),
        ({"tasks": {}}, "simulation.tasks: write tasks: {count: 100}, or a source of tasks"),
        (
            {"tasks": {"count": 5, "source": "tasks.jsonl"}},
            "simulation.tasks.count: count and source say the same; keep one",
        ),
        ({"history": ["gold", "gold"]}, "simulation.history: write predicted and gold once each"),
        (
            {"world": {"type": "environment", "environment": "desk"}},
            "simulation.world.environment: got 'desk'; write module:Class, such as my_package.parts:MyClass",
        ),
    ],
)
def test_wrong_simulations_are_told(changes: dict[str, Any], text: str) -> None:
    assert told(simulation=FILE["simulation"] | changes) == text


def test_dialogues_need_a_dialogue() -> None:
    assert told(input_features=[{"name": "text", "type": "text"}]) == (
        "simulation: no input is a dialogue; add {name: messages, type: dialogue} to input_features, or remove it"
    )
