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
            {"world": {"type": "environment", "environment": "desk.py"}},
            (
                "simulation.world.environment: got 'desk.py'; write module:Class, such as my_package.parts:MyClass, "
                "or a name"
            ),
        ),
    ],
)
def test_wrong_simulations_are_told(changes: dict[str, Any], text: str) -> None:
    assert told(simulation=FILE["simulation"] | changes) == text


def test_an_id_of_gymnasiums_is_no_class() -> None:
    for written in ("Letters-v0", "games:Letters-v0", "Space/Letters-v0", "games:Letters"):
        world = {"type": "environment", "environment": written, "interface": "gymnasium"}
        load_config(FILE | {"simulation": FILE["simulation"] | {"world": world}})
    world = {"type": "environment", "environment": "games:Letters-v0"}
    assert told(simulation=FILE["simulation"] | {"world": world}).startswith(
        "simulation.world.environment: got 'games:Letters-v0'; write module:Class"
    )


def test_dialogues_need_a_dialogue() -> None:
    assert told(input_features=[{"name": "text", "type": "text"}]) == (
        "simulation: no input is a dialogue; add {name: messages, type: dialogue} to input_features, or remove it"
    )


ROUNDS: dict[str, Any] = FILE | {
    "data": {"source": "rows.jsonl"},
    "trainer": {"type": "finetune"},
    "simulation": FILE["simulation"] | {"train_on": {"tasks": {"count": 5}}},
}


def test_rounds_have_defaults() -> None:
    train_on = load_config(ROUNDS).config.simulation.train_on  # type: ignore[union-attr]

    assert train_on is not None
    assert (train_on.rounds, train_on.select, train_on.target, train_on.mix, train_on.keep_rounds, train_on.guard) == (
        1,
        "corrected",
        "last_agent_turn",
        0.4,
        4,
        0.05,
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"tasks": {}},
            "simulation.train_on.tasks: write tasks: {count: 600}, or a source of tasks",
        ),
        (
            {"tasks": {"count": 5, "source": "tasks.jsonl"}},
            "simulation.train_on.tasks.count: count and source say the same; keep one",
        ),
        (
            {"epochs": 1, "max_steps": 5},
            "simulation.train_on.max_steps: epochs and max_steps both say how long a round is; keep one",
        ),
        (
            {"select": "correct"},
            "simulation.train_on.select: got correct; did you mean corrected?",
        ),
    ],
)
def test_wrong_rounds_are_told(changes: dict[str, Any], text: str) -> None:
    train_on = {"tasks": {"count": 5}, **changes}

    assert told(**ROUNDS | {"simulation": FILE["simulation"] | {"train_on": train_on}}) == text


def test_rounds_of_replay_take_dialogues() -> None:
    simulation = {"world": {"type": "replay"}, "train_on": {"tasks": {"count": 5}}}

    assert told(**ROUNDS | {"simulation": simulation}) == (
        "simulation.train_on.tasks.count: replay takes dialogues of a data set; write source, or nothing for those of "
        "data.source"
    )


def test_rounds_need_a_trainer_and_rows() -> None:
    assert told(**ROUNDS | {"trainer": {"type": "none"}}) == (
        "simulation.train_on: trainer: {type: none} trains no rounds; write type: finetune, or remove train_on"
    )
    stream = {"source": {"type": "jsonl", "path": "rows.jsonl", "streaming": True}}
    assert told(**ROUNDS | {"data": stream, "trainer": {"type": "finetune", "max_steps": 5}}) == (
        "simulation.train_on: rounds are mixed with rows by index; remove streaming, or train on data first and write "
        "rounds in a file of their own, with base_model: runs/NAME/model"
    )
    assert told(**ROUNDS | {"data": {}, "base_model": {"type": "scratch", "size": "tiny"}}) == (
        "data: a new model cannot speak yet; write data.source, rows to learn from"
    )


def test_transcripts_are_a_source() -> None:
    source = {"type": "simulation", "path": "runs/desk/transcripts/predicted.jsonl", "select": "all"}

    assert load_config(ROUNDS | {"data": {"source": source}}).config.data.source.target == "last_agent_turn"  # type: ignore[union-attr]
