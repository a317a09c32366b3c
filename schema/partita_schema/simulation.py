"""Dialogues that the model has: `simulation`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from partita_schema.agents import (
    AgentsConfig,
    ContextPolicy,
    CustomWorldConfig,
    SelfPlayWorldConfig,
    UserSimWorldConfig,
    refused_agents,
)
from partita_schema.base import Base, Count, Name, NonNegativeCount, Positive, Share, broken
from partita_schema.self_training import RoundTasks, SelfTrainingConfig
from partita_schema.target import check_part

History = Literal["predicted", "gold"]
"""Whose answers the model sees when it looks back: its own, or the right ones."""


def one_or_several(value: object) -> object:
    """A single word is a list of one."""
    return [value] if isinstance(value, str) else value


class EnvironmentWorldConfig(Base):
    """A program that the model talks to: it says something, is answered, and in the end gives a reward."""

    type: Literal["environment"]
    """A program that answers the model."""
    environment: Name
    """`module:Class` with `reset(seed, task)`, `step(action)` and `close()`, or its name where a package gives it one
    (entry points `partita.environments`). For `interface: gymnasium` an id of Gymnasium's as well."""
    interface: Literal["partita", "gymnasium", "tools"] = "partita"
    """What the class is like: `partita`, as above; `gymnasium`, an environment of Gymnasium with text as observations
    and actions; `tools`, a class with `reset` whose other public methods are tools, which the model calls by JSON."""
    options: dict[str, Any] = {}
    """What the class is made with, by name."""
    isolation: Literal["thread", "process"] = "thread"
    """Where it runs: `thread`, in this process; `process`, for each dialogue in a process of its own, which is killed
    where it takes too long, and which nothing but its own dialogue ends with."""

    @model_validator(mode="after")
    def environment_can_be_found(self) -> "EnvironmentWorldConfig":
        if self.interface != "gymnasium":
            check_part(self.environment, at="environment")
        return self


class ReplayWorldConfig(Base):
    """Dialogues of a data set: what others said is said again, and the model answers in its own words."""

    type: Literal["replay"]
    """Dialogues of a data set, with the model's answers in place of those that it holds."""


World = Annotated[
    EnvironmentWorldConfig | ReplayWorldConfig | UserSimWorldConfig | SelfPlayWorldConfig | CustomWorldConfig,
    Field(discriminator="type"),
]


class Tasks(Base):
    """What the dialogues are about."""

    count: Count | None = None
    """So many tasks, numbered from 0: the environment makes of each what its seed says."""
    source: Name | None = None
    """Rows of a data set, each a task; for replay each a dialogue. Default for replay: data.test."""

    @model_validator(mode="after")
    def tasks_are_said_once(self) -> "Tasks":
        if self.count is not None and self.source is not None:
            raise broken("count and source say the same; keep one", at="count")
        return self


class CheckerConfig(Base):
    """A program that looks at a dialogue at its end, and may send it back."""

    type: Annotated[str, AfterValidator(check_part)]
    """`exact`, `contains`, `regex` or `json_equal`; or `module:Class` with `check(dialogue)`, or its name where a
    package gives it one (entry points `partita.checkers`)."""
    options: dict[str, Any] = {}
    """What the class is made with, by name."""
    rounds: NonNegativeCount = 0
    """How often a dialogue is sent back, with what the checker says, for another answer."""


class Limits(Base):
    """What a dialogue may take."""

    step_seconds: Positive = 30.0
    """Time of the environment, the world, the checker or the program of an agent for one answer."""
    dialogue_seconds: Positive = 600.0
    """Time from the first word to the last."""
    fail_fraction: Share = 0.1
    """Share of failed dialogues above which the simulation ends, once 20 have ended."""


class Simulation(Base):
    """Dialogues that the model has, several turns long, with metrics and transcripts of them."""

    world: World
    """How a dialogue goes."""
    tasks: Tasks = Tasks.model_construct()
    """What about."""
    agents: AgentsConfig = AgentsConfig.model_construct()
    """Who speaks."""
    repeats: Count = 1
    """Dialogues about each task, with other seeds. Above 1, pass@k and pass^k are told."""
    history: Annotated[tuple[History, ...], BeforeValidator(one_or_several), Field(min_length=1)] = ("predicted",)
    """Which answers the model sees when it looks back: `predicted`, its own; `gold`, the right ones, where the world
    knows them. A list of both gives a report for each."""
    max_turns: Count = 20
    """Answers of the model in a dialogue; one that is longer is truncated."""
    max_dialogue_tokens: Count | None = None
    """Tokens of a prompt and its answer; a dialogue that needs more is truncated. Default: the model's context, or
    2048 where it has none."""
    context: ContextPolicy = ContextPolicy.model_construct()
    """What a model sees of a dialogue that needs more."""
    checker: CheckerConfig | None = None
    """Looks at each dialogue at its end."""
    limits: Limits = Limits.model_construct()
    """What a dialogue may take."""
    rollout: Annotated[str, AfterValidator(check_part)] = "slots"
    """What has the dialogues, many at a time: `slots`; or `module:Class` of a subclass of `partita.simulation.Rollout`,
    or its name where a package gives it one (entry points `partita.rollouts`)."""
    transcripts: Annotated[str, AfterValidator(check_part)] = "jsonl"
    """What keeps them as they end: `jsonl`; or `module:Class` of a subclass of `partita.simulation.Transcripts`, or its
    name where a package gives it one (entry points `partita.transcripts`)."""
    self_training: SelfTrainingConfig | None = None
    """Rounds of dialogues and of training on them, behind the training on data. Default: none."""

    @model_validator(mode="after")
    def histories_are_said_once(self) -> "Simulation":
        if len(set(self.history)) < len(self.history):
            raise broken("write predicted and gold once each", at="history")
        return self

    @model_validator(mode="after")
    def tasks_fit_the_world(self) -> "Simulation":
        if isinstance(self.world, ReplayWorldConfig) and self.tasks.count is not None:
            raise broken("replay takes dialogues of a data set; write source, or data.test", at="tasks.count")
        if not isinstance(self.world, ReplayWorldConfig) and self.tasks == Tasks():
            raise broken("write tasks: {count: 100}, or a source of tasks", at="tasks")
        return self

    @model_validator(mode="after")
    def tasks_of_rounds_fit_the_world(self) -> "Simulation":
        if self.self_training is None:
            return self
        tasks = self.self_training.tasks
        if isinstance(self.world, ReplayWorldConfig) and tasks.count is not None:
            raise broken(
                "replay takes dialogues of a data set; write source, or nothing for those of data.source",
                at="self_training.tasks.count",
            )
        if not isinstance(self.world, ReplayWorldConfig) and tasks == RoundTasks():
            raise broken("write tasks: {count: 600}, or a source of tasks", at="self_training.tasks")
        return self

    @model_validator(mode="after")
    def agents_fit_the_world(self) -> "Simulation":
        for key, message in refused_agents(self):
            raise broken(message, at=key)
        return self
