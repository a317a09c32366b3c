"""From `simulation.seats` to those who speak, and what of them decides the dialogues."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from partita.data.parts import source_digest
from partita.data.rows import digest
from partita.inference.oom_backoff import BatchLimit, Capacity
from partita.lm.continuation import decode_continuation
from partita.pipeline import Pipeline
from partita.simulation.conversation import Conversation
from partita.simulation.dialogue import AGENT
from partita.simulation.outside import made
from partita.simulation.registry import SEATS
from partita.simulation.rollout import Rollout
from partita.simulation.seats import GoldTurns, Lines, OneByOne, Seat
from partita.simulation.speaking import Voice
from partita.simulation.turns import TurnEncoder
from partita.simulation.worlds import World
from partita.tuning.sizes import BatchSizeTuner
from partita_schema.errors import ConfigError, DataError, Problem
from partita_schema.prompt import template_fields
from partita_schema.seats import (
    CustomWorld,
    GoldSeat,
    ModelSeat,
    ScriptedSeat,
    SelfPlayWorld,
    UserSimWorld,
    seats_beside_agent,
)
from partita_schema.simulation import Simulation
from partita_trainers.batch_size.probe import BatchSize

SpokenSeat: TypeAlias = ModelSeat | ScriptedSeat | GoldSeat
"""A seat whose words come from elsewhere than the world."""
ROOM = 2048
"""Tokens of a dialogue where neither the model nor the file has a limit."""


@dataclass(frozen=True)
class SeatModel:
    """A model that speaks for a seat."""

    pipeline: Pipeline
    sizing: BatchSizeTuner
    fingerprint: str
    """A hash of all its weights."""

    @property
    def identity(self) -> str:
        """A hash of all that decides its answers."""
        config = self.pipeline.config
        sections = config.model_dump(mode="json", include={"prompt", "generation", "input_features", "output_features"})
        return digest(self.fingerprint, repr(sections), repr(config.data.dialogue.model_dump(mode="json")))


def other_seats(section: Simulation) -> dict[str, SpokenSeat]:
    """Who speaks beside the agent, by name; in worlds of an environment and of a data set nobody."""
    seats, world = section.seats, section.world
    found: dict[str, Any] = {}
    if isinstance(world, UserSimWorld):
        found = {"user": seats.user}
    elif isinstance(world, SelfPlayWorld):
        found = {"partner": seats.partner or ModelSeat(type="model")}
    elif isinstance(world, CustomWorld):
        found = {place.removeprefix("others."): seat for place, seat in seats_beside_agent(seats).items()}
    assert all(isinstance(seat, ModelSeat | ScriptedSeat | GoldSeat) for seat in found.values()), "as the schema asks"
    return found


def place_of(section: Simulation, name: str) -> str:
    """Where a seat stands in the file."""
    return f"simulation.seats.{'others.' if name in section.seats.others else ''}{name}"


def build_conversation(section: Simulation) -> Conversation:
    """The world in which two seats talk."""
    world = section.world
    assert isinstance(world, UserSimWorld | SelfPlayWorld)
    (other,) = other_seats(section)
    return Conversation(
        other,
        max_turns=section.max_turns,
        done=world.done,
        agent_may_end=isinstance(world, SelfPlayWorld),
        first=world.first,
        first_by_agent=isinstance(world, UserSimWorld),
        instruction=section.seats.agent.prompt,
    )


def check_columns(section: Simulation, tasks: Sequence[tuple[str, Mapping[str, object]]]) -> None:
    """Raises DataError where a text of the file names a column that a task, by its key, does not have."""
    for where, template in templates(section):
        for key, values in tasks:
            missing = [name for name in template_fields(template) if name not in values]
            if missing:
                raise DataError(
                    f"tasks: {key}: {where} names {{{missing[0]}}}; the task has {', '.join(map(str, values))}"
                )


def templates(section: Simulation) -> Iterator[tuple[str, str]]:
    """Texts with columns in them, and where they stand."""
    texts: dict[str, str | None] = {}
    if isinstance(section.world, UserSimWorld | SelfPlayWorld):
        texts["simulation.world.first"] = section.world.first
        texts["simulation.seats.agent.prompt"] = section.seats.agent.prompt
    for name, seat in other_seats(section).items():
        place = place_of(section, name)
        if isinstance(seat, ModelSeat):
            texts[f"{place}.prompt"] = seat.prompt
        elif isinstance(seat, ScriptedSeat):
            texts |= {f"{place}.lines[{number}]": line for number, line in enumerate(seat.lines)}
    yield from ((where, text) for where, text in texts.items() if text is not None)


# Programs


def build_programs(section: Simulation, *, folder: Path) -> tuple[dict[str, Callable[[], Seat]], dict[str, str]]:
    """What makes the programs that speak, by seat, and hashes of them. Raises ConfigError where one is not there."""
    programs: dict[str, Callable[[], Seat]] = {}
    about: dict[str, str] = {}
    for name, seat in other_seats(section).items():
        if not isinstance(seat, ModelSeat):
            programs[name], about[f"seat {name}"] = build_program(seat, key=place_of(section, name), folder=folder)
    return programs, about


def build_program(seat: ScriptedSeat | GoldSeat, *, key: str, folder: Path) -> tuple[Callable[[], Seat], str]:
    """What makes the program of a seat that stands at `key`, and a hash. Raises ConfigError where it is not there."""
    if isinstance(seat, GoldSeat):
        return GoldTurns, "gold"
    if seat.program is None:
        lines = seat.lines
        return lambda: Lines(lines), digest(*lines)
    kind = SEATS.load(seat.program, key=f"{key}.program", folder=folder)
    make = made(kind, seat.options, key=f"{key}.options")
    if callable(getattr(kind, "act", None)):
        return make, source_digest(kind)
    if not callable(getattr(kind, "reply", None)):
        message = f"{kind.__name__} has neither act(contexts) nor reply(context); write one of them"
        raise ConfigError([Problem(f"{key}.program", message)])
    return lambda: OneByOne(make()), source_digest(kind)


# Models


class Cast:
    """Those who speak in the dialogues of a simulation."""

    def __init__(
        self,
        section: Simulation,
        models: Mapping[str, SeatModel],
        programs: Mapping[str, Callable[[], Seat]],
        *,
        seed: int,
        rollout: type[Rollout] = Rollout,
    ) -> None:
        """Models and what makes programs, by seat; `rollout` has the dialogues.

        Raises ConfigError where a model has no room for an answer.
        """
        self.section, self.models, self.programs, self.seed = section, models, programs, seed
        self.rollout = rollout
        self.rooms = {seat: room_of(model.pipeline, section, seat=seat) for seat, model in models.items()}

    def begin(
        self, world: World, sizes: Mapping[str, BatchSize], *, capacity: Capacity, stopping: Callable[[], bool]
    ) -> Rollout:
        """What has dialogues, as many at a time as the agent has `capacity` for; other models answer up to `sizes`."""
        seats: dict[str, Voice | Callable[[], Seat]] = dict(self.programs)
        for seat in self.models:
            seats[seat] = self.voice(seat, capacity if seat == AGENT else capacity_of(sizes[seat], capacity))
        limits = self.section.limits
        return self.rollout(world, seats, lanes=capacity.rows, seed=self.seed, limits=limits, stopping=stopping)

    def voice(self, seat: str, capacity: Capacity) -> Voice:
        """The model that speaks for a seat."""
        pipeline, room = self.models[seat].pipeline, self.rooms[seat]
        other = other_seats(self.section).get(seat)
        told = other.prompt if isinstance(other, ModelSeat) else None  # what the agent is told stands in the dialogue
        most_tokens = room - pipeline.max_new_tokens
        return Voice(
            pipeline.lm,
            turn_encoder(pipeline, self.section, seat=seat, prompt=told, most_tokens=most_tokens),
            options=pipeline.generation,
            capacity=capacity,
            room=room,
            max_new_tokens=pipeline.max_new_tokens,
            seed=self.seed,
        )


def room_of(pipeline: Pipeline, section: Simulation, *, seat: str) -> int:
    """Tokens of a prompt and its answer. Raises ConfigError where an answer alone has more."""
    limits = [limit for limit in (pipeline.encoder.max_length, section.max_dialogue_tokens) if limit is not None]
    room = min(limits, default=ROOM)
    if room <= pipeline.max_new_tokens:
        whose = "" if seat == AGENT else f" of seat {seat}"
        message = f"{room} tokens leave no room for a prompt{whose} beside an answer of {pipeline.max_new_tokens}; "
        message += "write a smaller generation.max_new_tokens"
        raise ConfigError([Problem("simulation.max_dialogue_tokens", message)])
    return room


def turn_encoder(
    pipeline: Pipeline, section: Simulation, *, seat: str, prompt: str | None, most_tokens: int
) -> TurnEncoder:
    """What makes a seat's prompts."""
    feature = pipeline.config.dialogue_input
    assert feature is not None, "the schema asks for one"
    drops = section.context.policy == "drop_oldest_turns"
    return TurnEncoder(
        pipeline.encoder,
        feature.name,
        partial(decode_continuation, pipeline.lm.tokenizer),
        seat=seat,
        prompt=prompt,
        most_tokens=most_tokens if drops else None,
        keep=section.context.keep,
    )


def find_sizes(
    models: Mapping[str, SeatModel], section: Simulation, *, dialogues: int, rows: int | None
) -> dict[str, BatchSize]:
    """Rows that each model answers at a time.

    Sizes are looked for with all models in memory, but each without the answers of the others: of what fits, each
    takes its share.
    """
    found = {}
    for seat, model in models.items():
        room = room_of(model.pipeline, section, seat=seat)
        size = model.sizing.generation(np.full(dialogues, room - model.pipeline.max_new_tokens), rows=rows)
        if len(models) > 1 and size.max_fitting is not None:
            size = replace(size, rows=min(size.rows, max(1, size.max_fitting // len(models))))
        found[seat] = size
    return found


def capacity_of(size: BatchSize, agent: Capacity) -> Capacity:
    """What a model of another seat may put on the device at once; the agent's guard holds for all."""
    rows = min(size.rows, agent.rows)
    return Capacity(rows, BatchLimit(rows))
