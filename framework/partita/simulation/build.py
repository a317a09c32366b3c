"""Build tasks, world and checker from the `simulation` section, and hash the settings that decide dialogues."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.data.episode import AGENT, Episode, derived_seed
from partita.data.formatting.turns import build_turn_writer
from partita.data.rows import Rows
from partita.data.sources.sources import errors_at, open_rows
from partita.data.user_objects import source_digest
from partita.simulation.adapters import adapt, load_environment, tools_of
from partita.simulation.agent_sections import build_conversation, other_agents
from partita.simulation.contract import Environment, StepTimeoutError
from partita.simulation.environment_server import EnvironmentServer, RemoteError
from partita.simulation.registry import CHECKERS, ROLLOUTS, TRANSCRIPTS, WORLDS, creation_error, factory
from partita.simulation.rollout import Rollout
from partita.simulation.transcripts import Transcripts
from partita.simulation.worlds import BackgroundCloser, CheckedWorld, CustomWorld, EnvironmentWorld, ReplayWorld, World
from partita_schema.config import Config
from partita_schema.dialogues.common_form import FormatError, is_structured
from partita_schema.errors import ConfigError, DataError, Problem
from partita_schema.sections.agents import CustomWorldConfig, GoldAgentConfig
from partita_schema.sections.simulation import EnvironmentWorldConfig, ReplayWorldConfig, Simulation
from partita_schema.turn_outputs import build_turn_outputs, read_with_outputs


@dataclass(frozen=True)
class Task:
    """The task of an episode: a row of the tasks file, or a number."""

    key: str
    values: Mapping[str, Any]


def section_of(config: Config) -> Simulation:
    """Return the `simulation` section. Raises ConfigError if the file has none."""
    if config.simulation is None:
        message = "the file does not describe a simulation; write simulation: {world: ..., tasks: ...}"
        raise ConfigError([Problem("simulation", message)])
    return config.simulation


def open_tasks(
    config: Config, section: Simulation, *, folder: Path, rows: Rows | None = None
) -> tuple[list[Task], str]:
    """Read the tasks and return them with their hash.

    Args:
        config: Validated configuration.
        section: Its `simulation` section.
        folder: Folder that relative paths start from.
        rows: Rows to use instead of those of the file.

    Raises:
        ConfigError: The world replays dialogues and no dataset is configured.
        DataError: A row cannot be used as a task.
    """
    tasks = section.tasks
    if tasks.count is not None:
        return [Task(f"task-{number}", {"number": number}) for number in range(tasks.count)], str(tasks.count)
    source = tasks.source if tasks.source is not None else config.data.test
    if rows is None and source is None:
        message = "replay needs dialogues; write tasks: {source: FILE}, or data.test"
        raise ConfigError([Problem("simulation.tasks", message)])
    if rows is None:
        with errors_at("simulation.tasks.source" if tasks.source is not None else "data.test"):
            rows = open_rows(source, folder=folder, name="tasks", max_row_bytes=config.data.max_row_bytes)
    replays = isinstance(section.world, ReplayWorldConfig)
    if not replays and not any(isinstance(agent, GoldAgentConfig) for agent in other_agents(section).values()):
        return list(tasks_of(rows, lambda row: row)), rows.fingerprint
    dialogue = config.dialogue_input
    assert dialogue is not None, "the schema asks for one"
    options, outputs = config.data.dialogue, build_turn_outputs(config)
    writer = build_turn_writer(config)

    def read(row: Mapping[str, Any]) -> Mapping[str, Any]:
        values = read_with_outputs(
            row,
            column=dialogue.source_column,
            format_name=options.format,
            ignored=options.ignore_keys,
            columns=options.columns,
            outputs=outputs,
            supervised=replays,
        )
        if values.get("verbatim"):
            raise FormatError("segments are not a dialogue of messages, which a simulation needs")
        if values.get("tools") or any(map(is_structured, values["messages"])):
            raise FormatError(
                "tools, tool calls and reasoning are not read in a simulation; write data.dialogue: {ignore_keys: "
                "[tools, tool_calls, reasoning_content]}"
            )
        if writer is not None:
            values["messages"] = writer.with_right_answers(values["messages"])
        return values if replays else {**row, **values}

    return list(tasks_of(rows, read)), rows.fingerprint


def tasks_of(rows: Rows, read: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Iterator[Task]:
    """Yield one task per row. Raises DataError if a row cannot be read or there are no rows."""
    if rows.bad:
        raise DataError(f"tasks: {rows.bad[0].key}: {rows.bad[0].reason}")
    index = 0
    for chunk in rows.iterate():
        for row in chunk:
            key = rows.key(index)
            try:
                yield Task(key, read(row))
            except FormatError as error:
                raise DataError(f"tasks: {key}: {error}") from error
            index += 1
    if not index:
        raise DataError("tasks: there are no rows")


def build_world(
    config: Config, section: Simulation, *, folder: Path, resources: ExitStack
) -> tuple[World, dict[str, str]]:
    """Build the world. Returns it with hashes of the user's programs in it.

    Args:
        config: Validated configuration.
        section: Its `simulation` section.
        folder: Folder of the configuration file.
        resources: Releases the resources of the world when it is closed.

    Raises:
        ConfigError: A program cannot be loaded or created.
    """
    parts: dict[str, str] = {}
    world: World
    if isinstance(section.world, ReplayWorldConfig):
        world = ReplayWorld(max_turns=section.max_turns)
    elif isinstance(section.world, EnvironmentWorldConfig):
        kind, code = load_environment(section.world, folder=folder)
        make = environments(kind, section, folder=folder, resources=resources)
        closer = BackgroundCloser()
        resources.callback(closer.end, section.limits.step_seconds)
        system = config.prompt.system if section.world.interface == "tools" else None
        world = EnvironmentWorld(make, max_turns=section.max_turns, closer=closer, system=system)
        parts["environment"] = source_digest(code)
    elif isinstance(section.world, CustomWorldConfig):
        world, parts["world"] = build_custom(section.world, section, folder=folder)
    else:
        world = build_conversation(section)
    if section.checker is None or section.checker.model is not None:
        return world, parts
    kind = CHECKERS.load(section.checker.type, key="simulation.checker.type", folder=folder)
    checker = factory(kind, section.checker.options, key="simulation.checker.options")()
    parts["checker"] = source_digest(kind)
    outputs = build_turn_outputs(config)
    return CheckedWorld(world, checker, rounds=section.checker.rounds, outputs=outputs), parts


def build_custom(world: CustomWorldConfig, section: Simulation, *, folder: Path) -> tuple[World, str]:
    """Build a custom world. Returns it with a hash of its source. Raises ConfigError if it cannot be loaded."""
    key = "simulation.world.target"
    kind = WORLDS.load(world.target, key=key, folder=folder)
    if not callable(getattr(kind, "run", None)):
        message = f"{kind.__name__} has no run(episode); write one that yields partita.simulation.RequestTurn()"
        raise ConfigError([Problem(key, message)])
    make = factory(kind, world.options, key="simulation.world.options")
    return CustomWorld(make(), (AGENT, *other_agents(section)), max_turns=section.max_turns), source_digest(kind)


def environments(
    kind: Callable[..., Any], section: Simulation, *, folder: Path, resources: ExitStack
) -> Callable[[], Environment]:
    """Return a function that creates environments, in this process or each in a separate one.

    Args:
        kind: Class of the environments, or a function that creates one.
        section: The `simulation` section; its world is an environment.
        folder: Folder of the configuration file.
        resources: Stops the fork server when it is closed.

    Raises:
        ConfigError: An environment cannot be created with the given options.
    """
    world = section.world
    assert isinstance(world, EnvironmentWorldConfig), "replay has none"
    key = "simulation.world.options"
    tools = tools_of(kind, interface=world.interface)
    if world.isolation == "thread":
        return factory(adapt(kind, interface=world.interface, tools=tools), world.options, key=key)
    server = resources.enter_context(
        EnvironmentServer(world, tools=tools, folder=folder, step_seconds=section.limits.step_seconds)
    )
    try:
        server.check()
    except (RemoteError, StepTimeoutError) as error:
        raise creation_error(kind, world.options, str(error), key=key) from error
    return server.make


def load_rollout_and_transcripts(
    section: Simulation, *, folder: Path
) -> tuple[type[Rollout], type[Transcripts], dict[str, str]]:
    """Load the rollout class and the transcripts class.

    Returns both, and the hash of a custom rollout class, which can change the dialogues.
    Raises ConfigError if one cannot be loaded.
    """
    rollout = ROLLOUTS.load_kind(section.rollout, Rollout, key="simulation.rollout", folder=folder)
    transcripts = TRANSCRIPTS.load_kind(section.transcripts, Transcripts, key="simulation.transcripts", folder=folder)
    return rollout, transcripts, {} if rollout is Rollout else {"rollout": source_digest(rollout)}


def new_episode(task: Task, repeat: int, section: Simulation, *, seed: int, shows_gold: bool) -> Episode:
    """Create the episode of a task.

    Args:
        task: The task.
        repeat: Index of the repeat, from 0.
        section: The `simulation` section.
        seed: Seed of the simulation; the seed of the episode is derived from it and the key, or that of the task if
            repeats share it.
        shows_gold: Whether the history holds the gold answers instead of the model's.
    """
    key = task.key if section.repeats == 1 else f"{task.key}#{repeat + 1}"
    own_seed = derived_seed(seed, task.key if section.repeats_share_seed else key)
    return Episode(key, task.key, task.values, own_seed, shows_gold=shows_gold)


def settings_of(config: Config, section: Simulation, *, seed: int) -> dict[str, Any]:
    """Return the settings that decide dialogues, by section, as JSON values."""
    sections = config.model_dump(mode="json", include={"prompt", "generation", "input_features", "output_features"})
    # These do not change the content of a dialogue.
    excluded: Any = {"limits": True, "history": True, "tasks": True, "world": {"isolation"}, "transcripts": True}
    settings = section.model_dump(mode="json", exclude=excluded)
    limit = config.preprocessing.global_max_sequence_length
    sections |= {"preprocessing": {"global_max_sequence_length": limit}} if limit is not None else {}
    sections |= {"simulation": settings | {"seed": seed}, "data.dialogue": config.data.dialogue.model_dump(mode="json")}
    read_back: dict[str, Any] = json.loads(json.dumps(sections))  # keys of options may be numbers in YAML
    return read_back
