"""Dialogues that the model has: worlds, seats, limits, and training on them."""

from typing import Any

from .bases import ANSWER, FINETUNE
from .effects import Flip, Group
from .observers import Config, simulating, training_in_rounds

DESK: Config = {"type": "environment", "environment": "talkers_of_effects:Desk"}
SIMULATE: Config = ANSWER | {
    "input_features": [{"name": "messages", "type": "dialogue"}],
    "generation": {"max_new_tokens": 3},
    "simulation": {"world": DESK, "tasks": {"count": 3}},
}
LINES: Config = {"type": "scripted", "lines": ["say one", "say more box"]}


TALKATIVE: Config = {"generation": {"min_new_tokens": 3}}
"""Lets the model say something where it would say nothing, so that its answers show what it sees."""


def section(**keys: Any) -> Config:
    """Return a section `simulation`."""
    return {"simulation": keys}


def talk(type: str) -> Config:
    seats = {"user" if type == "user_sim" else "partner": LINES, "agent": {"type": "model"}}
    return section(world={"type": type, "first": "say red"}, seats=seats, max_turns=3)


def panel(name: str, seat: Config) -> Config:
    """Return a world in which everybody speaks, with one of the seats taken."""
    seats: Config = {"user": LINES, "partner": LINES, "others": {"guest": LINES}}
    seats |= {name: seat} if name != "others" else {"others": {"guest": seat}}
    tasks = {"count": None, "source": "talks.jsonl"}
    return section(world={"type": "custom", "target": "talkers_of_effects:Panel"}, seats=seats, tasks=tasks)


REPLAY = section(world={"type": "replay"}, tasks={"count": None, "source": "talks.jsonl"})
MODEL: Config = {"type": "model"}
PROGRAM: Config = {"type": "scripted", "program": "talkers_of_effects:Speaker"}


def seat(name: str) -> dict[str, Flip]:
    """Keys of a seat beside the agent's."""
    path = f"simulation.seats.{name}"
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


LONG = {"max_dialogue_tokens": 14, "world": DESK | {"options": {"word": "one two three"}}}
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
            "simulation.world[user_sim].type": Flip(DESK, given=talk("user_sim"), also=section(seats={"user": None})),
            "simulation.world[user_sim].first": Flip("say blue", given=talk("user_sim")),
            "simulation.world[user_sim].done": Flip("one", given=talk("user_sim")),
            "simulation.world[self_play].type": Flip(
                DESK, given=talk("self_play"), also=section(seats={"partner": None})
            ),
            "simulation.world[self_play].first": Flip("say blue", given=talk("self_play")),
            "simulation.world[self_play].done": Flip("more", given=talk("self_play")),
            "simulation.world[custom].type": Flip(DESK, given=panel("user", LINES), part="refusal"),
            "simulation.world[custom].target": Flip("talkers_of_effects:OtherPanel", given=panel("user", LINES)),
            "simulation.world[custom].options": Flip({"rounds": 2}, given=panel("user", LINES)),
            "simulation.tasks.count": 2,
            "simulation.tasks.source": Flip("more-talks.jsonl", given=REPLAY),
            "simulation.seats.agent.run": Flip("trained", given=talk("user_sim"), part="refusal"),
            "simulation.seats.agent.file": Flip("other.yaml", given=talk("user_sim"), part="refusal"),
            "simulation.seats.agent.base_model": Flip("other", given=talk("user_sim"), part="refusal"),
            "simulation.seats.agent.prompt": Flip("say two", given=talk("user_sim")),
            **seat("user"),
            **seat("partner"),
            **seat("others"),
            "simulation.seats.user": Flip("model", given=panel("user", "gold")),  # type: ignore[arg-type]
            "simulation.seats.partner": Flip("model", given=panel("partner", "gold")),  # type: ignore[arg-type]
            "simulation.seats.user[environment].type": Flip(
                MODEL, given=section(seats={"user": {"type": "environment"}}), part="refusal"
            ),
            "simulation.repeats": 2,
            "simulation.history": Flip("gold", part="files"),
            "simulation.max_turns": 1,
            "simulation.max_dialogue_tokens": 8,
            "simulation.context.policy": Flip("drop_oldest_turns", given=section(**LONG) | TALKATIVE),
            "simulation.context.keep": Flip(
                [], given=section(**LONG, context={"policy": "drop_oldest_turns"}) | TALKATIVE
            ),
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
            "simulation.transcripts": Flip("talkers_of_effects:Told", part="noted"),
        },
        long=True,
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
                "train_on": {"rounds": 1, "tasks": {"count": 4}, "max_steps": 1},
            },
        },
        "rounds",
        {
            "simulation.train_on.rounds": 2,
            "simulation.train_on.tasks.count": 6,
            "simulation.train_on.tasks.source": Flip(
                "more-talks.jsonl",
                given=section(
                    world={"type": "replay"},
                    tasks={"count": None, "source": "talks.jsonl"},
                    train_on={"tasks": {"count": None, "source": "talks.jsonl"}},
                ),
                part="files of rounds",
            ),
            "simulation.train_on.select": Flip(
                "all",
                given=section(train_on={"tasks": {"count": 12}, "target": "every_agent_turn"}),
                part="files of rounds",
            ),
            "simulation.train_on.target": Flip("every_agent_turn", part="files of rounds"),
            "simulation.train_on.mix": Flip(0.9, part="files of rounds"),
            "simulation.train_on.keep_rounds": Flip(1, given=section(train_on={"rounds": 2}), part="files of rounds"),
            "simulation.train_on.epochs": Flip(3, given=section(train_on={"max_steps": None})),
            "simulation.train_on.max_steps": 3,
            "simulation.train_on.learning_rate": Flip(0.5, part="files of rounds"),
            "simulation.train_on.guard": Flip(None, given=section(train_on={"guard": 0.05}), part="files"),
        },
        long=True,
    ),
]
