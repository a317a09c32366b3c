"""A simulation from its section in the file to its report."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from partita.assembly import Assembly
from partita.data.parts import source_digest
from partita.data.reading.sources import open_rows
from partita.data.rows import Rows, digest
from partita.inference.predict import ShowProgress
from partita.report.transcript_page import page
from partita.runs.files import write_atomically, writing
from partita.simulation.adapters import adapted, load_environment, tools_of
from partita.simulation.closing import Closing
from partita.simulation.contract import Environment, TooSlowError
from partita.simulation.dialogue import AGENT, Dialogue, derived_seed
from partita.simulation.hosted import HostedError, Hosts
from partita.simulation.outside import made, not_made
from partita.simulation.registry import CHECKERS
from partita.simulation.report import Outcomes, SimulationReport, outcomes_of
from partita.simulation.seating import (
    Cast,
    SeatModel,
    build_conversation,
    build_programs,
    check_columns,
    find_sizes,
    other_seat,
)
from partita.simulation.sharing import have
from partita.simulation.transcripts import Transcripts, open_transcripts
from partita.simulation.worlds import CheckedWorld, EnvironmentWorld, ReplayWorld, World
from partita.tuning.sizes import BatchSizes, Sizing
from partita_schema.config import Config
from partita_schema.dialogue_formats import FormatError, read_dialogue
from partita_schema.errors import ConfigError, DataError, Problem
from partita_schema.seats import GoldSeat, ModelSeat
from partita_schema.simulation import EnvironmentWorld as EnvironmentSection
from partita_schema.simulation import ReplayWorld as ReplaySection
from partita_schema.simulation import Simulation
from partita_trainers.team import ALONE, Team, together

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """What a dialogue is about."""

    key: str
    values: Mapping[str, Any]


def section_of(config: Config) -> Simulation:
    """The section of the file. Raises ConfigError where there is none."""
    if config.simulation is None:
        message = "the file says nothing of dialogues; write simulation: {world: ..., tasks: ...}"
        raise ConfigError([Problem("simulation", message)])
    return config.simulation


def simulate(
    assembly: Assembly,
    *,
    folder: Path,
    sizing: Sizing,
    seed: int,
    model: str,
    others: Mapping[str, SeatModel] | None = None,
    batch_size: int | None,
    fresh: bool,
    progress: ShowProgress,
    rows: Rows | None = None,
    team: Team = ALONE,
) -> tuple[SimulationReport, BatchSizes]:
    """All dialogues of the file, with their transcripts in `folder`, and the size that they were had with.

    Those that are in the transcripts already are not had again. `model` is a hash of all weights, `others` are models
    that speak in other seats. `rows` take the place of the data set that replay has its dialogues from. The ranks of
    `team` call it together and come to the same; each has the dialogues that it claims. Raises SimulationError where
    too many fail.
    """
    section = section_of(assembly.config)
    models = {AGENT: SeatModel(assembly, sizing, model), **(others or {})}
    name, seat = other_seat(section) or ("", None)
    if isinstance(seat, ModelSeat) and seat.is_own:
        models[name] = models[AGENT]
    with ExitStack() as held:
        with together(team, "opening the tasks and the world"):
            tasks, about = open_tasks(assembly.config, section, folder=assembly.folder, rows=rows)
            check_columns(section, [(task.key, task.values) for task in tasks])
            world, parts = build_world(section, folder=assembly.folder, held=held)
            programs, about_programs = build_programs(section, folder=assembly.folder)
            cast = Cast(section, models, programs, seed=seed)
        sizes = find_sizes(models, section, dialogues=len(tasks) * section.repeats, rows=batch_size)
        parts |= about_programs | {f"seat {name}": other.identity for name, other in (others or {}).items()}
        decided_by = {"model": model, "tasks": about, **parts, **settings_of(assembly.config, section, seed=seed)}
        found: dict[str, Outcomes] = {}
        had: dict[str, list[Dialogue]] = {}
        for history in section.history:
            dialogues = [
                new_dialogue(task, repeat, section, seed=seed, shows_gold=history == "gold")
                for task in tasks
                for repeat in range(section.repeats)
            ]
            with (
                open_transcripts(folder, history, decided_by=decided_by, fresh=fresh, team=team) as transcripts,
                sizing.work("generation", sizes[AGENT]) as capacity,
            ):
                have(
                    in_order(dialogues, section),
                    transcripts,
                    begin=partial(cast.begin, world, sizes),
                    capacity=capacity,
                    limits=section.limits,
                    name=f"{history} history",
                    progress=progress,
                    team=team,
                )
                found[history] = team.lead(
                    partial(come_to, transcripts, dialogues, repeats=section.repeats), "what the dialogues came to"
                )
                had[history] = [transcripts.done[dialogue.key] for dialogue in dialogues] if team.rank == 0 else []
            tell(history, found[history])
        team.lead(partial(write_page, folder, found, had), "the page of the dialogues")
        return SimulationReport(found, str(folder)), BatchSizes(generation=sizes[AGENT])


def come_to(transcripts: Transcripts, dialogues: Sequence[Dialogue], *, repeats: int) -> Outcomes:
    """What all dialogues came to; their file is written."""
    return outcomes_of(transcripts.finish([dialogue.key for dialogue in dialogues]), repeats=repeats)


def in_order(dialogues: Sequence[Dialogue], section: Simulation) -> Sequence[Dialogue]:
    """Dialogues in the order in which they are begun: of a data set the longest first, as far as that is known.

    What is begun last should not take long: the other processes have ended then.
    """
    if not isinstance(section.world, ReplaySection):
        return dialogues

    def length(dialogue: Dialogue) -> tuple[int, int]:
        messages = dialogue.task["messages"]
        answers = sum(bool(message.get("learned")) for message in messages)
        return min(answers, section.max_turns), sum(len(message["content"]) for message in messages)

    return sorted(dialogues, key=length, reverse=True)


def write_page(folder: Path, found: Mapping[str, Outcomes], had: Mapping[str, list[Dialogue]]) -> None:
    """A page to be read beside the transcripts."""
    title = "/".join(folder.resolve().parts[-2:])
    with writing(folder):
        write_atomically(folder / "index.html", page(found, had, title=f"Dialogues in {title}"))


def tell(history: str, outcomes: Outcomes) -> None:
    """Say how many dialogues did not come to an end of their own."""
    for status, count in sorted(outcomes.statuses.items()):
        if status != "done":
            logger.info("%s history: %s of %s dialogues %s", history, count, outcomes.dialogues, status)


# What the file says


def open_tasks(
    config: Config, section: Simulation, *, folder: Path, rows: Rows | None = None
) -> tuple[list[Task], str]:
    """Tasks, and a hash of them; `rows` take the place of the file's. Raises DataError where rows cannot be used."""
    tasks = section.tasks
    if tasks.count is not None:
        return [Task(f"task-{number}", {"number": number}) for number in range(tasks.count)], str(tasks.count)
    source = tasks.source if tasks.source is not None else config.data.test
    if rows is None and source is None:
        message = "replay needs dialogues; write tasks: {source: FILE}, or data.test"
        raise ConfigError([Problem("simulation.tasks", message)])
    if rows is None:
        rows = open_rows(source, folder=folder, name="tasks")
    other = other_seat(section)
    replays = isinstance(section.world, ReplaySection)
    if not replays and (other is None or not isinstance(other[1], GoldSeat)):
        return list(tasks_of(rows, lambda row: row)), rows.fingerprint
    dialogue = config.dialogue_input
    assert dialogue is not None, "the schema asks for one"

    def read(row: Mapping[str, Any]) -> Mapping[str, Any]:
        found = read_dialogue(row, column=dialogue.source_column, form=config.data.dialogue.format)
        return found if replays else {**row, **found}

    return list(tasks_of(rows, read)), rows.fingerprint


def tasks_of(rows: Rows, read: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Iterator[Task]:
    """A task of each row. Raises DataError where one cannot be read."""
    if rows.bad:
        raise DataError(f"tasks: {rows.bad[0].key}: {rows.bad[0].reason}")
    place = 0
    for chunk in rows.iterate():
        for row in chunk:
            key = rows.key(place)
            try:
                yield Task(key, read(row))
            except FormatError as error:
                raise DataError(f"tasks: {key}: {error}") from error
            place += 1
    if not place:
        raise DataError("tasks: there are no rows")


def build_world(section: Simulation, *, folder: Path, held: ExitStack) -> tuple[World, dict[str, str]]:
    """The world, and hashes of the programs of the user's in it; what it needs is `held` until it is needed no more.

    Raises ConfigError where a program is not there.
    """
    parts: dict[str, str] = {}
    world: World
    if isinstance(section.world, ReplaySection):
        world = ReplayWorld(max_turns=section.max_turns)
    elif not isinstance(section.world, EnvironmentSection):
        world = build_conversation(section)
    else:
        kind, code = load_environment(section.world, folder=folder)
        make = environments(kind, section, folder=folder, held=held)
        closing = Closing()
        held.callback(closing.end, section.limits.step_seconds)
        world = EnvironmentWorld(make, max_turns=section.max_turns, closing=closing)
        parts["environment"] = source_digest(code)
    if section.checker is None:
        return world, parts
    kind = CHECKERS.load(section.checker.type, key="simulation.checker.type", folder=folder)
    checker = made(kind, section.checker.options, key="simulation.checker.options")()
    parts["checker"] = source_digest(kind)
    return CheckedWorld(world, checker, rounds=section.checker.rounds), parts


def environments(
    kind: Callable[..., Any], section: Simulation, *, folder: Path, held: ExitStack
) -> Callable[[], Environment]:
    """What makes environments of a class, in this process or each in one of its own. Raises ConfigError."""
    world = section.world
    assert isinstance(world, EnvironmentSection), "replay has none"
    key = "simulation.world.options"
    tools = tools_of(kind, interface=world.interface)
    if world.isolation == "thread":
        return made(adapted(kind, interface=world.interface, tools=tools), world.options, key=key)
    hosts = held.enter_context(Hosts(world, tools=tools, folder=folder, step_seconds=section.limits.step_seconds))
    try:
        hosts.check()
    except (HostedError, TooSlowError) as error:
        raise not_made(kind, world.options, str(error), key=key) from error
    return hosts.make


def new_dialogue(task: Task, repeat: int, section: Simulation, *, seed: int, shows_gold: bool) -> Dialogue:
    """A dialogue that has not begun."""
    key = task.key if section.repeats == 1 else f"{task.key}#{repeat + 1}"
    return Dialogue(key, task.key, task.values, derived_seed(seed, key), shows_gold=shows_gold)


def settings_of(config: Config, section: Simulation, *, seed: int) -> dict[str, str]:
    """Hashes of what the file says that decides dialogues, by section."""
    sections = config.model_dump(mode="json", include={"prompt", "generation", "input_features", "output_features"})
    # These decide nothing of what is said.
    undecided: Any = {"limits": True, "history": True, "tasks": True, "world": {"isolation"}}
    said = section.model_dump(mode="json", exclude=undecided)
    sections |= {"simulation": [said, seed], "data.dialogue": config.data.dialogue.model_dump(mode="json")}
    return {name: digest(repr(value)) for name, value in sections.items()}
