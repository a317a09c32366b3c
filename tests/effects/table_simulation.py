"""Simulations: worlds, agents, limits, and self-training."""

from typing import Any

from .bases import ANSWER, FINETUNE
from .effects import Flip, Group, merged
from .inputs import write_rewards
from .observers import Config, simulating, training_in_rounds

DESK: Config = {"type": "environment", "environment": "talkers_of_effects:Desk"}
SIMULATE: Config = ANSWER | {
    "input_features": [{"name": "messages", "type": "dialogue"}],
    "generation": {"max_new_tokens": 3},
    "simulation": {"world": DESK, "tasks": {"count": 3}},
}
LINES: Config = {"type": "scripted", "lines": ["say one", "say more box"]}


TALKATIVE: Config = {"generation": {"min_new_tokens": 3}}
"""Prevents empty answers, so that the answers depend on the prompt."""


def section(**keys: Any) -> Config:
    """Return a section `simulation`."""
    return {"simulation": keys}


def talk(type: str) -> Config:
    agents = {"user" if type == "user_sim" else "partner": LINES, "agent": {"type": "model"}}
    return section(world={"type": type, "first": "say red"}, agents=agents, max_turns=3)


def panel(name: str, agent: Config) -> Config:
    """Return a world in which all agents speak, with a configuration for one of them."""
    agents: Config = {"user": LINES, "partner": LINES, "others": {"guest": LINES}}
    agents |= {name: agent} if name != "others" else {"others": {"guest": agent}}
    tasks = {"count": None, "source": "talks.jsonl"}
    return section(world={"type": "custom", "target": "talkers_of_effects:Panel"}, agents=agents, tasks=tasks)


REPLAY = section(world={"type": "replay"}, tasks={"count": None, "source": "talks.jsonl"})
MODEL: Config = {"type": "model"}
PROGRAM: Config = {"type": "scripted", "program": "talkers_of_effects:Speaker"}


def agent(name: str) -> dict[str, Flip]:
    """Return the keys of an agent other than the model under test."""
    path = f"simulation.agents.{name}"
    return {
        f"{path}[model].type": Flip(PROGRAM, given=panel(name, MODEL)),
        f"{path}[model].run": Flip("trained", given=panel(name, MODEL)),
        f"{path}[model].file": Flip("other.yaml", given=panel(name, MODEL)),
        f"{path}[model].base_model": Flip("other", given=panel(name, MODEL)),
        f"{path}[model].prompt": Flip("red red red red blue box", given=panel(name, MODEL) | TALKATIVE),
        f"{path}[scripted].type": Flip(MODEL, given=panel(name, LINES)),
        f"{path}[scripted].lines": Flip(["red", "blue"], given=panel(name, LINES)),
        f"{path}[scripted].program": Flip("talkers_of_effects:OtherSpeaker", given=panel(name, PROGRAM)),
        f"{path}[scripted].options": Flip({"word": "two"}, given=panel(name, PROGRAM)),
        f"{path}[gold].type": Flip(MODEL, given=panel(name, {"type": "gold"})),
    }


TWO_OUTPUTS: Config = {
    "output_features": [{"name": "state", "type": "json"}, {"name": "answer", "type": "text"}],
    "data": {"dialogue": {"answers": "in_sequence"}},
}
LONG = {"max_dialogue_tokens": 14, "world": DESK | {"options": {"word": "one two three"}}}
JUDGED = {"type": "reward", "model": "rewards-talks1", "threshold": -100.0}
STRICT = {"checker": {"type": "talkers_of_effects:Strict"}}
SIMULATION = [
    Group(
        "simulation",
        simulating,
        SIMULATE,
        "transcripts",
        {
            "simulation.world[environment].type": Flip(
                {"type": "replay"}, also=section(tasks={"count": None, "source": "talks.jsonl"})
            ),
            "simulation.world[environment].environment": "talkers_of_effects:OtherDesk",
            "simulation.world[environment].interface": Flip(
                "tools",
                given=section(world=DESK | {"environment": "talkers_of_effects:Counter", "interface": "partita"}),
            ),
            "simulation.world[environment].options": {"word": "more"},
            "simulation.world[environment].isolation": "process",
            "simulation.world[replay].type": Flip(DESK, given=REPLAY),
            "simulation.world[user_sim].type": Flip(DESK, given=talk("user_sim"), also=section(agents={"user": None})),
            "simulation.world[user_sim].first": Flip("say blue", given=talk("user_sim")),
            "simulation.world[user_sim].done": Flip("one", given=talk("user_sim")),
            "simulation.world[self_play].type": Flip(
                DESK, given=talk("self_play"), also=section(agents={"partner": None})
            ),
            "simulation.world[self_play].first": Flip("say blue", given=talk("self_play")),
            "simulation.world[self_play].done": Flip("more", given=talk("self_play")),
            "simulation.world[custom].type": Flip(DESK, given=panel("user", LINES), part="refusal"),
            "simulation.world[custom].target": Flip("talkers_of_effects:OtherPanel", given=panel("user", LINES)),
            "simulation.world[custom].options": Flip({"rounds": 2}, given=panel("user", LINES)),
            "simulation.tasks.count": 2,
            "simulation.tasks.source": Flip("more-talks.jsonl", given=REPLAY),
            "simulation.agents.agent.run": Flip("trained", given=talk("user_sim"), part="refusal"),
            "simulation.agents.agent.file": Flip("other.yaml", given=talk("user_sim"), part="refusal"),
            "simulation.agents.agent.base_model": Flip("other", given=talk("user_sim"), part="refusal"),
            "simulation.agents.agent.prompt": Flip("say two", given=talk("user_sim")),
            **agent("user"),
            **agent("partner"),
            **agent("others"),
            "simulation.agents.user": Flip("model", given=panel("user", "gold")),  # type: ignore[arg-type]
            "simulation.agents.partner": Flip("model", given=panel("partner", "gold")),  # type: ignore[arg-type]
            "simulation.agents.user[environment].type": Flip(
                MODEL, given=section(agents={"user": {"type": "environment"}}), part="refusal"
            ),
            "simulation.repeats": 2,
            "simulation.repeats_share_seed": Flip(True, given=section(repeats=2)),
            "simulation.history": Flip("gold", part="files"),
            "simulation.max_turns": 1,
            "simulation.max_dialogue_tokens": 8,
            "simulation.context.policy": Flip("drop_oldest_turns", given=section(**LONG) | TALKATIVE),
            "simulation.context.keep": Flip(
                [], given=section(**LONG, context={"policy": "drop_oldest_turns"}) | TALKATIVE
            ),
            "simulation.reply": Flip("answer", given=TWO_OUTPUTS | talk("user_sim")),
            "simulation.checker.type": Flip("exact", given=section(**STRICT)),
            "simulation.checker.options": Flip(
                {"word": "red"}, given=section(checker=STRICT["checker"] | {"rounds": 1})
            ),
            "simulation.checker.rounds": Flip(1, given=section(**STRICT)),
            "simulation.limits.step_seconds": Flip(0.1, given=section(world=DESK | {"options": {"pause": 0.3}})),
            "simulation.limits.dialogue_seconds": Flip(0.1, given=section(world=DESK | {"options": {"pause": 0.3}})),
            "simulation.limits.fail_fraction": Flip(
                0.5,
                given=section(
                    world=DESK | {"options": {"breaks": True}}, tasks={"count": 24}, limits={"fail_fraction": 1.0}
                ),
                part="refusal",
            ),
            "simulation.rollout": Flip("talkers_of_effects:Watched", part="noted"),
            "simulation.transcripts": Flip("talkers_of_effects:NotedTranscripts", part="noted"),
        },
        long=True,
    ),
    Group(
        "reward checker",
        simulating,
        merged(SIMULATE, section(checker=JUDGED)),
        "transcripts",
        {
            "simulation.checker.model": "rewards-talks2",
            "simulation.checker.turns": "mean",
            "simulation.checker.threshold": 100.0,
        },
        long=True,
        prepare=write_rewards,
    ),
    Group(
        "rounds",
        training_in_rounds,
        FINETUNE
        | {
            "input_features": [{"name": "messages", "type": "dialogue"}],
            "data": {"source": "talks.jsonl"},
            "simulation": {
                "world": DESK,
                "tasks": {"count": 2},
                "self_training": {"rounds": 1, "tasks": {"count": 4}, "max_steps": 1},
            },
        },
        "rounds",
        {
            "simulation.self_training.rounds": 2,
            "simulation.self_training.tasks.count": 6,
            "simulation.self_training.tasks.source": Flip(
                "more-talks.jsonl",
                given=section(
                    world={"type": "replay"},
                    tasks={"count": None, "source": "talks.jsonl"},
                    self_training={"tasks": {"count": None, "source": "talks.jsonl"}},
                ),
                part="files of rounds",
            ),
            "simulation.self_training.attempts": Flip(2, part="files of rounds"),
            "simulation.self_training.select": Flip(
                "all",
                given=section(self_training={"tasks": {"count": 12}, "target": "every_agent_turn"})
                | {"generation": {"min_new_tokens": 3}},  # empty answers are not learned
                part="files of rounds",
            ),
            "simulation.self_training.target": Flip("every_agent_turn", part="files of rounds"),
            "simulation.self_training.mix": Flip(0.9, part="files of rounds"),
            "simulation.self_training.keep_rounds": Flip(
                1, given=section(self_training={"rounds": 2}), part="files of rounds"
            ),
            "simulation.self_training.epochs": Flip(3, given=section(self_training={"max_steps": None})),
            "simulation.self_training.max_steps": 3,
            "simulation.self_training.learning_rate": Flip(0.5, part="files of rounds"),
            "simulation.self_training.guard": Flip(None, given=section(self_training={"guard": 0.05}), part="files"),
        },
        long=True,
    ),
]
