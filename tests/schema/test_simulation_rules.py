"""What a simulation cannot be asked is told with its place and what to write instead."""

from typing import Any

import pytest

from partita_schema.load import load_config

from .refusals import last_line_of

WORLD = {"type": "environment", "environment": "desk:Desk"}
CUSTOM = {"type": "custom", "target": "plays:Panel"}
FILE: dict[str, Any] = {
    "base_model": "base",
    "input_features": [{"name": "messages", "type": "dialogue"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "simulation": {"world": WORLD, "tasks": {"count": 5}},
}


def told(**sections: Any) -> str:
    return last_line_of(FILE | sections)


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


TALK = {"type": "user_sim"}
USER = {"type": "model", "prompt": "You want {order}."}


def test_a_seat_may_be_a_word() -> None:
    seats = {"agent": "model", "user": "environment"}
    config = load_config(FILE | {"simulation": FILE["simulation"] | {"seats": seats}}).config
    assert config.simulation is not None
    assert config.simulation.seats.agent.is_own
    assert config.simulation.seats.user is not None
    assert config.simulation.seats.user.type == "environment"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"seats": {"user": "modle"}},
            "seats.user: got 'modle'; write model, gold, environment, or a mapping with type: model or scripted",
        ),
        (
            {"seats": {"user": USER | {"run": "runs/a", "base_model": "b"}}},
            "seats.user.base_model: run and base_model each name a model; keep one",
        ),
        (
            {"seats": {"user": {"type": "scripted"}}},
            "seats.user.lines: the seat says nothing; write either lines: [...] or program: module:Class",
        ),
        (
            {"seats": {"user": {"type": "scripted", "lines": ["hi"], "program": "a:B"}}},
            "seats.user.lines: the seat is said twice; write either lines: [...] or program: module:Class",
        ),
        (
            {"seats": {"user": {"type": "scripted", "lines": ["hi"], "options": {"a": 1}}}},
            "seats.user.options: options are for a program; remove them",
        ),
        (
            {"seats": {"user": USER | {"prompt": "{a.b}"}}},
            "seats.user.prompt: {a.b} is no plain column name; write {column}, and {{ and }} for braces",
        ),
        (
            {"seats": {"agent": {"type": "model", "run": "runs/a"}, "user": USER}},
            "seats.agent: the agent is the model of the file; name the other model in another seat, or as base_model",
        ),
        (
            {"world": WORLD, "seats": {"agent": {"type": "model", "prompt": "hi"}}},
            "seats.agent.prompt: is for user_sim and self_play; write prompt.system, outside of simulation",
        ),
        (
            {"world": WORLD, "seats": {"user": USER}},
            "seats.user: in world environment it is environment; write world: {type: user_sim} for another",
        ),
        (
            {"world": {"type": "replay"}, "tasks": {"source": "a.jsonl"}, "seats": {"user": "environment"}},
            "seats.user: in world replay it is gold; write world: {type: user_sim} for another",
        ),
        (
            {"world": WORLD, "seats": {"partner": "model"}},
            "seats.partner: is a seat of self_play; write user, or world: {type: self_play}",
        ),
        ({"seats": {"user": USER, "partner": "model"}}, "seats.partner: is no seat of user_sim; write user"),
        (
            {},
            "seats: nobody plays the user; write seats: {user: {type: model, prompt: ...}}, or scripted lines",
        ),
        (
            {"seats": {"user": "environment"}},
            "seats.user: user_sim has no environment; write model, scripted or gold",
        ),
        ({"seats": {"user": "gold"}}, "tasks: seats.user: gold needs dialogues; write tasks: {source: FILE}"),
        (
            {"seats": {"user": "model"}},
            "seats.user: the model of user has nothing to begin from; write prompt in seats.user, or first in world",
        ),
        (
            {"world": {"type": "self_play"}},
            "seats: the model of partner has nothing to begin from; write prompt in seats.partner, or first in world",
        ),
        (
            {"seats": {"user": USER}, "history": ["gold", "predicted"]},
            "history: nobody knows the right answers in user_sim; write predicted",
        ),
        (
            {"seats": {"user": USER, "others": {"judge": "model"}}},
            "seats.others: are seats of a world of yours; write world: {type: custom, target: module:Class}",
        ),
        (
            {"world": CUSTOM, "seats": {"others": {"checker": "model"}}},
            "seats.others.checker: the name checker is taken; write another one",
        ),
        (
            {"world": CUSTOM, "seats": {"others": {"2nd": "model"}}},
            "seats.others.2nd: got the name '2nd'; write letters, digits, _ and -, a letter first",
        ),
        (
            {"world": CUSTOM, "seats": {"others": {"judge": "modle"}}},
            (
                "seats.others.judge: got 'modle'; write model, gold, environment, "
                "or a mapping with type: model or scripted"
            ),
        ),
        (
            {"world": CUSTOM, "seats": {"others": {"judge": "environment"}}},
            "seats.others.judge: custom has no environment; write model, scripted or gold",
        ),
        (
            {"world": CUSTOM, "seats": {"partner": "gold"}},
            "tasks: seats.partner: gold needs dialogues; write tasks: {source: FILE}",
        ),
        (
            {"world": CUSTOM, "seats": {"agent": {"type": "model", "prompt": "hi"}}},
            "seats.agent.prompt: is for user_sim and self_play; write prompt.system, outside of simulation",
        ),
        (
            {"world": {"type": "custom", "target": "play.py"}},
            "world.target: got 'play.py'; write module:Class, such as my_package.parts:MyClass, or a name",
        ),
        (
            {"world": CUSTOM, "transcripts": "told.py"},
            "transcripts: got 'told.py'; write module:Class, such as my_package.parts:MyClass, or a name",
        ),
        (
            {"world": CUSTOM, "rollout": "a:"},
            "rollout: got 'a:'; write module:Class, such as my_package.parts:MyClass, or a name",
        ),
        ({"seats": {"user": USER}, "tasks": {}}, "tasks: write tasks: {count: 100}, or a source of tasks"),
        (
            {"seats": {"user": USER}, "context": {"keep": ["system"]}},
            "context.keep: keep has no effect on policy: truncate; write policy: drop_oldest_turns",
        ),
    ],
)
def test_wrong_seats_are_told(changes: dict[str, Any], text: str) -> None:
    assert told(simulation=FILE["simulation"] | {"world": TALK} | changes) == f"simulation.{text}"
