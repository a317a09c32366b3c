"""Tests of invalid simulation settings: reported with key and advice."""

from typing import Any

import pytest

from partita_schema.load import load_config

from ..refusals import last_line_of

WORLD = {"type": "environment", "environment": "desk:Desk"}
CUSTOM = {"type": "custom", "target": "plays:Panel"}
FILE: dict[str, Any] = {
    "base_model": "base",
    "input_features": [{"name": "messages", "type": "dialogue"}],
    "output_features": [{"name": "answer", "type": "text"}],
    "simulation": {"world": WORLD, "tasks": {"count": 5}},
}


def problem_text(**sections: Any) -> str:
    return last_line_of(FILE | sections)


def test_a_single_history_may_be_a_string() -> None:
    for written in ("gold", ["gold"]):
        config = load_config(FILE | {"simulation": FILE["simulation"] | {"history": written}}).config
        assert config.simulation is not None
        assert config.simulation.history == ("gold",)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"world": {"type": "replay"}},
            "simulation.tasks.count: replay takes dialogues of a dataset; write source, or data.test",
        ),
        ({"tasks": {}}, "simulation.tasks: write tasks: {count: 100}, or a source of tasks"),
        (
            {"tasks": {"count": 5, "source": "tasks.jsonl"}},
            "simulation.tasks.count: count and source cannot both be set; write one of them",
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
def test_wrong_simulations_are_reported(changes: dict[str, Any], text: str) -> None:
    assert problem_text(simulation=FILE["simulation"] | changes) == text


def test_a_gymnasium_id_is_not_a_class() -> None:
    for written in ("Letters-v0", "games:Letters-v0", "Space/Letters-v0", "games:Letters"):
        world = {"type": "environment", "environment": written, "interface": "gymnasium"}
        load_config(FILE | {"simulation": FILE["simulation"] | {"world": world}})
    world = {"type": "environment", "environment": "games:Letters-v0"}
    assert problem_text(simulation=FILE["simulation"] | {"world": world}).startswith(
        "simulation.world.environment: got 'games:Letters-v0'; write module:Class"
    )


def test_a_simulation_needs_a_dialogue_input() -> None:
    assert problem_text(input_features=[{"name": "text", "type": "text"}]) == (
        "simulation: no input is a dialogue; add {name: messages, type: dialogue} to input_features, or remove it"
    )


ROUNDS: dict[str, Any] = FILE | {
    "data": {"source": "rows.jsonl"},
    "trainer": {"type": "finetune"},
    "simulation": FILE["simulation"] | {"self_training": {"tasks": {"count": 5}}},
}


def test_self_training_has_defaults() -> None:
    self_training = load_config(ROUNDS).config.simulation.self_training  # type: ignore[union-attr]

    assert self_training is not None
    assert (
        self_training.rounds,
        self_training.select,
        self_training.target,
        self_training.mix,
        self_training.keep_rounds,
        self_training.guard,
    ) == (
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
            "simulation.self_training.tasks: write tasks: {count: 600}, or a source of tasks",
        ),
        (
            {"tasks": {"count": 5, "source": "tasks.jsonl"}},
            "simulation.self_training.tasks.count: count and source cannot both be set; write one of them",
        ),
        (
            {"epochs": 1, "max_steps": 5},
            "simulation.self_training.max_steps: epochs and max_steps cannot both be set; write one of them",
        ),
        (
            {"select": "correct"},
            "simulation.self_training.select: got correct; did you mean corrected?",
        ),
    ],
)
def test_wrong_self_training_settings_are_reported(changes: dict[str, Any], text: str) -> None:
    self_training = {"tasks": {"count": 5}, **changes}

    assert problem_text(**ROUNDS | {"simulation": FILE["simulation"] | {"self_training": self_training}}) == text


def test_self_training_on_replay_needs_dialogues() -> None:
    simulation = {"world": {"type": "replay"}, "self_training": {"tasks": {"count": 5}}}

    assert problem_text(**ROUNDS | {"simulation": simulation}) == (
        "simulation.self_training.tasks.count: replay takes dialogues of a dataset; write source, or nothing for "
        "those of "
        "data.source"
    )


def test_self_training_needs_a_trainer_and_rows() -> None:
    assert problem_text(**ROUNDS | {"trainer": {"type": "none"}}) == (
        "simulation.self_training: trainer: {type: none} trains no rounds; write type: finetune, or remove "
        "self_training"
    )
    stream = {"source": {"type": "jsonl", "path": "rows.jsonl", "streaming": True}}
    assert problem_text(**ROUNDS | {"data": stream, "trainer": {"type": "finetune", "max_steps": 5}}) == (
        "simulation.self_training: rounds are mixed with rows by index; remove streaming, or train on data first and "
        "write rounds in a separate file, with base_model: runs/NAME/model"
    )
    assert problem_text(**ROUNDS | {"data": {}, "base_model": {"type": "scratch", "size": "tiny"}}) == (
        "data: a new model cannot speak yet; write data.source, rows to learn from"
    )
    assert problem_text(**ROUNDS | {"adapter": {"type": "adalora"}}) == (
        "adapter.type: peft cannot train adalora further once it has reduced ranks, as rounds do; write lora"
    )


def test_transcripts_can_be_a_source() -> None:
    source = {"type": "simulation", "path": "runs/desk/transcripts/predicted.jsonl", "select": "all"}

    assert load_config(ROUNDS | {"data": {"source": source}}).config.data.source.target == "last_agent_turn"  # type: ignore[union-attr]


TALK = {"type": "user_sim"}
USER = {"type": "model", "prompt": "You want {order}."}


def test_an_agent_may_be_a_string() -> None:
    agents = {"agent": "model", "user": "environment"}
    config = load_config(FILE | {"simulation": FILE["simulation"] | {"agents": agents}}).config
    assert config.simulation is not None
    assert config.simulation.agents.agent.is_own
    assert config.simulation.agents.user is not None
    assert config.simulation.agents.user.type == "environment"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"agents": {"user": "modle"}},
            "agents.user: got 'modle'; write model, gold, environment, or a mapping with type: model or scripted",
        ),
        (
            {"agents": {"user": USER | {"run": "runs/a", "base_model": "b"}}},
            "agents.user.base_model: run and base_model each name a model; write one of them",
        ),
        (
            {"agents": {"user": {"type": "scripted"}}},
            (
                "agents.user.lines: the agent has neither lines nor a program; write either lines: [...] or program: "
                "module:Class"
            ),
        ),
        (
            {"agents": {"user": {"type": "scripted", "lines": ["hi"], "program": "a:B"}}},
            (
                "agents.user.lines: the agent has both lines and a program; write either lines: [...] or program: "
                "module:Class"
            ),
        ),
        (
            {"agents": {"user": {"type": "scripted", "lines": ["hi"], "options": {"a": 1}}}},
            "agents.user.options: options are for a program; remove them",
        ),
        (
            {"agents": {"user": USER | {"prompt": "{a.b}"}}},
            "agents.user.prompt: {a.b} is not a plain column name; write {column}, and {{ and }} for braces",
        ),
        (
            {"agents": {"agent": {"type": "model", "run": "runs/a"}, "user": USER}},
            (
                "agents.agent: the agent is the model of the file; name the other model in a different agent, or as "
                "base_model"
            ),
        ),
        (
            {"world": WORLD, "agents": {"agent": {"type": "model", "prompt": "hi"}}},
            "agents.agent.prompt: is for user_sim and self_play; write prompt.system, outside of simulation",
        ),
        (
            {"world": WORLD, "agents": {"user": USER}},
            "agents.user: in world environment it is environment; write world: {type: user_sim} for another",
        ),
        (
            {"world": {"type": "replay"}, "tasks": {"source": "a.jsonl"}, "agents": {"user": "environment"}},
            "agents.user: in world replay it is gold; write world: {type: user_sim} for another",
        ),
        (
            {"world": WORLD, "agents": {"partner": "model"}},
            "agents.partner: is an agent of self_play; write user, or world: {type: self_play}",
        ),
        ({"agents": {"user": USER, "partner": "model"}}, "agents.partner: is not an agent of user_sim; write user"),
        (
            {},
            "agents: no agent plays the user; write agents: {user: {type: model, prompt: ...}}, or scripted lines",
        ),
        (
            {"agents": {"user": "environment"}},
            "agents.user: user_sim has no environment; write model, scripted or gold",
        ),
        ({"agents": {"user": "gold"}}, "tasks: agents.user: gold needs dialogues; write tasks: {source: FILE}"),
        (
            {"agents": {"user": "model"}},
            "agents.user: the model of user has no text to start from; write prompt in agents.user, or first in world",
        ),
        (
            {"world": {"type": "self_play"}},
            "agents: the model of partner has no text to start from; write prompt in agents.partner, or first in world",
        ),
        (
            {"agents": {"user": USER}, "history": ["gold", "predicted"]},
            "history: there are no reference answers in user_sim; write predicted",
        ),
        (
            {"agents": {"user": USER, "others": {"judge": "model"}}},
            "agents.others: are agents of a custom world; write world: {type: custom, target: module:Class}",
        ),
        (
            {"world": CUSTOM, "agents": {"others": {"checker": "model"}}},
            "agents.others.checker: the name checker is taken; write another one",
        ),
        (
            {"world": CUSTOM, "agents": {"others": {"2nd": "model"}}},
            "agents.others.2nd: got the name '2nd'; write letters, digits, _ and -, a letter first",
        ),
        (
            {"world": CUSTOM, "agents": {"others": {"judge": "modle"}}},
            (
                "agents.others.judge: got 'modle'; write model, gold, environment, "
                "or a mapping with type: model or scripted"
            ),
        ),
        (
            {"world": CUSTOM, "agents": {"others": {"judge": "environment"}}},
            "agents.others.judge: custom has no environment; write model, scripted or gold",
        ),
        (
            {"world": CUSTOM, "agents": {"partner": "gold"}},
            "tasks: agents.partner: gold needs dialogues; write tasks: {source: FILE}",
        ),
        (
            {"world": CUSTOM, "agents": {"agent": {"type": "model", "prompt": "hi"}}},
            "agents.agent.prompt: is for user_sim and self_play; write prompt.system, outside of simulation",
        ),
        (
            {"world": {"type": "custom", "target": "play.py"}},
            "world.target: got 'play.py'; write module:Class, such as my_package.parts:MyClass, or a name",
        ),
        (
            {"world": CUSTOM, "transcripts": "mine.py"},
            "transcripts: got 'mine.py'; write module:Class, such as my_package.parts:MyClass, or a name",
        ),
        (
            {"world": CUSTOM, "rollout": "a:"},
            "rollout: got 'a:'; write module:Class, such as my_package.parts:MyClass, or a name",
        ),
        ({"agents": {"user": USER}, "tasks": {}}, "tasks: write tasks: {count: 100}, or a source of tasks"),
        (
            {"agents": {"user": USER}, "context": {"keep": ["system"]}},
            "context.keep: keep has no effect on policy: truncate; write policy: drop_oldest_turns",
        ),
    ],
)
def test_wrong_agents_are_reported(changes: dict[str, Any], text: str) -> None:
    assert problem_text(simulation=FILE["simulation"] | {"world": TALK} | changes) == f"simulation.{text}"


@pytest.mark.parametrize(
    ("checker", "text"),
    [
        (
            {"type": "reward"},
            "type: reward needs a reward model; add model, the directory of a run with trainer: {type: reward}",
        ),
        (
            {"type": "reward", "model": "runs/rm", "options": {"model": "runs/rm"}},
            "options: a reward model has none; remove options",
        ),
        ({"type": "reward", "model": "runs/rm", "rounds": 1}, "rounds: a reward model has none; remove rounds"),
        ({"type": "exact", "model": "runs/rm"}, "model: model is for type: reward; remove model"),
        ({"type": "exact", "turns": "mean"}, "turns: turns is for type: reward; remove turns"),
        ({"type": "exact", "threshold": 0.5}, "threshold: threshold is for type: reward; remove threshold"),
    ],
)
def test_wrong_settings_of_a_reward_model_as_checker_are_reported(checker: dict[str, Any], text: str) -> None:
    assert problem_text(simulation=FILE["simulation"] | {"checker": checker}) == f"simulation.checker.{text}"
