"""The `simulation` section: multi-turn rollouts."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from partita_schema.base import (
    ConfigModel,
    Fraction,
    Name,
    NonNegativeInt,
    Number,
    Positive,
    PositiveInt,
    Refusal,
    StrictBool,
    check_target_or_name,
    is_set,
    rule_error,
)
from partita_schema.sections.agents import (
    AgentsConfig,
    AnyAgent,
    ContextPolicy,
    CustomWorldConfig,
    EnvironmentAgentConfig,
    GoldAgentConfig,
    ModelAgentConfig,
    SelfPlayWorldConfig,
    UserSimWorldConfig,
)
from partita_schema.sections.self_training import RoundTasks, SelfTrainingConfig

History = Literal["predicted", "gold"]
"""Which answers the model sees as its earlier turns: its own or the reference answers."""


def one_or_several(value: object) -> object:
    """Return a list; a single word becomes a list of one."""
    return [value] if isinstance(value, str) else value


class EnvironmentWorldConfig(ConfigModel):
    """A program that the model talks to and that returns a reward at the end."""

    type: Literal["environment"]
    """A program that answers the model."""
    environment: Name
    """`module:Class` with `reset(seed, task)`, `step(action)` and `close()`, or a name that an installed package
    registers (entry points `partita.environments`). With `interface: gymnasium` also an environment id."""
    interface: Literal["partita", "gymnasium", "tools"] = "partita"
    """Interface of the class: `partita`, as above; `gymnasium`, with text observations and text actions; `tools`, a
    class with `reset` whose other public methods are tools that the model calls with JSON."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""
    isolation: Literal["thread", "process"] = "thread"
    """`thread`: the environment runs in a thread of this process. `process`: each episode has a separate process, which
    is killed at the time limit; a crash fails only that episode."""

    @model_validator(mode="after")
    def environment_can_be_found(self) -> "EnvironmentWorldConfig":
        if self.interface != "gymnasium":
            check_target_or_name(self.environment, at="environment")
        return self


class ReplayWorldConfig(ConfigModel):
    """Dialogues of a dataset: the other speakers say what they said, and the model generates its own turns."""

    type: Literal["replay"]
    """Dialogues of a dataset, with the model's answers instead of the recorded ones."""


World = Annotated[
    EnvironmentWorldConfig | ReplayWorldConfig | UserSimWorldConfig | SelfPlayWorldConfig | CustomWorldConfig,
    Field(discriminator="type"),
]


class Tasks(ConfigModel):
    """The tasks of a simulation."""

    count: PositiveInt | None = None
    """Number of tasks; the environment creates each from its seed."""
    source: Name | None = None
    """Dataset whose rows are the tasks; for replay each row is a dialogue. Default for replay: data.test."""

    @model_validator(mode="after")
    def count_or_source(self) -> "Tasks":
        if self.count is not None and self.source is not None:
            raise rule_error("count and source cannot both be set; write one of them", at="count")
        return self


class CheckerConfig(ConfigModel):
    """A class that judges a finished episode and may ask for another answer."""

    type: Annotated[str, AfterValidator(check_target_or_name)]
    """`exact`, `contains`, `regex`, `json_equal` or `reward`; or `module:Class` with `check(episode)`, or a name that
    an installed package registers (entry points `partita.checkers`)."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""
    rounds: NonNegativeInt = 0
    """How many times the model may answer again after the checker's feedback."""
    model: Name | None = None
    """For reward: the reward model, as the directory of a run with trainer: {type: reward} or a model saved from
    one."""
    turns: Literal["last", "mean"] = "last"
    """For reward: which answers of the model are scored, each given the dialogue before it. last: the last one; mean:
    all, and the score of the episode is their mean."""
    threshold: Number = 0.0
    """For reward: score from which an episode has succeeded."""

    @model_validator(mode="after")
    def a_reward_model_judges_alone(self) -> "CheckerConfig":
        is_reward = self.type == "reward"
        if is_reward and self.model is None:
            raise rule_error(
                "reward needs a reward model; add model, the directory of a run with trainer: {type: reward}", at="type"
            )
        for key in ("options", "rounds") if is_reward else ("model", "turns", "threshold"):
            if is_set(self, key):
                why = "a reward model has none" if is_reward else f"{key} is for type: reward"
                raise rule_error(f"{why}; remove {key}", at=key)
        return self


class Limits(ConfigModel):
    """Time limits, and how many episodes may fail."""

    step_seconds: Positive = 30.0
    """Seconds that the environment, the world, the checker or a scripted agent may take for one turn."""
    dialogue_seconds: Positive = 600.0
    """Seconds that an episode may take from start to end."""
    fail_fraction: Fraction = 0.1
    """Share of failed episodes above which the simulation stops, checked once 20 episodes have ended."""


class Simulation(ConfigModel):
    """Multi-turn rollouts of the model, with metrics and transcripts."""

    world: World
    """What the model talks to, and whose turn it is."""
    tasks: Tasks = Tasks.model_construct()
    """Tasks of the episodes."""
    agents: AgentsConfig = AgentsConfig.model_construct()
    """The agents of the episodes."""
    repeats: PositiveInt = 1
    """Episodes for each task, with different seeds. Above 1, pass@k and pass^k are reported."""
    repeats_share_seed: StrictBool = False
    """Whether the environments of a task's repeats have the same seed, so that repeats differ only in the sampled
    answers of the models."""
    history: Annotated[tuple[History, ...], BeforeValidator(one_or_several), Field(min_length=1)] = ("predicted",)
    """Which answers the model sees as its earlier turns: `predicted`, its own; `gold`, the reference answers, where the
    world has them. A list of both reports each."""
    max_turns: PositiveInt = 20
    """Answers of the model per episode; a longer one is truncated."""
    max_dialogue_tokens: PositiveInt | None = None
    """Tokens of a prompt with its answer; an episode that needs more is truncated. Default: the model's context length,
    or 2048 for models without one."""
    context: ContextPolicy = ContextPolicy.model_construct()
    """What a model sees of an episode that exceeds its context."""
    reply: Name | None = None
    """Output that the environment and other agents receive, if a turn has several. Default: the whole answer, as a JSON
    object."""
    checker: CheckerConfig | None = None
    """Judges each finished episode."""
    limits: Limits = Limits.model_construct()
    """Time limits, and how many episodes may fail."""
    rollout: Annotated[str, AfterValidator(check_target_or_name)] = "slots"
    """What runs the episodes concurrently: `slots`; or `module:Class` of a subclass of `partita.simulation.Rollout`, or
    a name that an installed package registers (entry points `partita.rollouts`)."""
    transcripts: Annotated[str, AfterValidator(check_target_or_name)] = "jsonl"
    """What records finished episodes: `jsonl`; or `module:Class` of a subclass of `partita.simulation.Transcripts`, or
    a name that an installed package registers (entry points `partita.transcripts`)."""
    self_training: SelfTrainingConfig | None = None
    """Rounds of training on the model's own episodes after the training on data. Default: none."""

    @model_validator(mode="after")
    def histories_differ(self) -> "Simulation":
        if len(set(self.history)) < len(self.history):
            raise rule_error("write predicted and gold once each", at="history")
        return self

    @model_validator(mode="after")
    def tasks_fit_the_world(self) -> "Simulation":
        if isinstance(self.world, ReplayWorldConfig) and self.tasks.count is not None:
            raise rule_error("replay takes dialogues of a dataset; write source, or data.test", at="tasks.count")
        if not isinstance(self.world, ReplayWorldConfig) and self.tasks == Tasks():
            raise rule_error("write tasks: {count: 100}, or a source of tasks", at="tasks")
        return self

    @model_validator(mode="after")
    def tasks_of_rounds_fit_the_world(self) -> "Simulation":
        if self.self_training is None:
            return self
        tasks = self.self_training.tasks
        if isinstance(self.world, ReplayWorldConfig) and tasks.count is not None:
            raise rule_error(
                "replay takes dialogues of a dataset; write source, or nothing for those of data.source",
                at="self_training.tasks.count",
            )
        if not isinstance(self.world, ReplayWorldConfig) and tasks == RoundTasks():
            raise rule_error("write tasks: {count: 600}, or a source of tasks", at="self_training.tasks")
        return self

    @model_validator(mode="after")
    def agents_fit_the_world(self) -> "Simulation":
        for key, message in refused_agents(self):
            raise rule_error(message, at=key)
        return self


def refused_agents(section: Simulation) -> Iterator[Refusal]:
    """Yield keys of `simulation` whose agents do not fit the world."""
    world, agents = section.world, section.agents
    if not agents.agent.is_own:
        yield (
            "agents.agent",
            "the agent is the model of the file; name the other model in a different agent, or as base_model",
        )
    if not isinstance(world, CustomWorldConfig) and agents.others:
        yield "agents.others", "are agents of a custom world; write world: {type: custom, target: module:Class}"
    if isinstance(world, UserSimWorldConfig | SelfPlayWorldConfig):
        yield from refused_talks(section, world)
        return
    if agents.agent.prompt is not None:
        yield "agents.agent.prompt", "is for user_sim and self_play; write prompt.system, outside of simulation"
    if isinstance(world, CustomWorldConfig):
        for key, agent in other_agent_sections(agents).items():
            yield from refused_agent(section, agent, key=f"agents.{key}")
        return
    wanted = "gold" if world.type == "replay" else "environment"
    if agents.user is not None and agents.user.type != wanted:
        yield "agents.user", f"in world {world.type} it is {wanted}; write world: {{type: user_sim}} for another"
    if agents.partner is not None:
        yield "agents.partner", "is an agent of self_play; write user, or world: {type: self_play}"


def other_agent_sections(agents: AgentsConfig) -> dict[str, AnyAgent]:
    """Return the configured agents except the main one, by their key in `agents`."""
    named = {"user": agents.user, "partner": agents.partner}
    written: dict[str, AnyAgent] = {name: agent for name, agent in named.items() if agent is not None}
    return written | {f"others.{name}": agent for name, agent in agents.others.items()}


def refused_agent(section: Simulation, agent: AnyAgent, *, key: str) -> Iterator[Refusal]:
    """Yield why an agent does not fit a world without an environment. `key` is the path of the agent."""
    if isinstance(agent, EnvironmentAgentConfig):
        yield key, f"{section.world.type} has no environment; write model, scripted or gold"
    if isinstance(agent, GoldAgentConfig):
        sources = {"tasks": section.tasks.source}
        if section.self_training is not None:
            sources["self_training.tasks"] = section.self_training.tasks.source
        for where, source in sources.items():
            if source is None:
                yield where, f"{key}: gold needs dialogues; write tasks: {{source: FILE}}"


def refused_talks(section: Simulation, world: UserSimWorldConfig | SelfPlayWorldConfig) -> Iterator[Refusal]:
    """Yield keys that do not fit a world in which two agents talk to each other."""
    agents = section.agents
    name, other = ("user", "partner") if world.type == "user_sim" else ("partner", "user")
    agent = getattr(agents, name)
    if getattr(agents, other) is not None:
        yield f"agents.{other}", f"is not an agent of {world.type}; write {name}"
    if agent is None and name == "user":
        yield "agents", "no agent plays the user; write agents: {user: {type: model, prompt: ...}}, or scripted lines"
    if agent is not None:
        yield from refused_agent(section, agent, key=f"agents.{name}")
    if (
        (agent is None or isinstance(agent, ModelAgentConfig))
        and world.first is None
        and (agent is None or agent.prompt is None)
    ):
        yield (
            f"agents.{name}" if agent is not None else "agents",
            f"the model of {name} has no text to start from; write prompt in agents.{name}, or first in world",
        )
    if "gold" in section.history:
        yield "history", f"there are no reference answers in {world.type}; write predicted"
