"""Who speaks in a dialogue of `simulation`, and the worlds in which agents talk to each other."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from partita_schema.base import NAME, ConfigModel, Name, check_target_or_name, is_set, rule_error
from partita_schema.sections.prompt import template_fields


def check_template(template: str) -> str:
    """Return the text if its braces hold column names; otherwise raise a rule error."""
    try:
        template_fields(template)
    except ValueError as error:
        raise rule_error(str(error)) from None
    return template


Template = Annotated[str, Field(min_length=1), AfterValidator(check_template)]
"""A text with {column} for values of the task."""


class ModelAgentConfig(ConfigModel):
    """A language model. Without `run`, `file` and `base_model` it is the model of this configuration."""

    type: Literal["model"]
    """A language model; the word `model` alone is short for it."""
    run: Name | None = None
    """Directory of a finished run or of a saved model."""
    file: Name | None = None
    """Another configuration file: its newest finished run, or its base model with `trainer: {type: none}`."""
    base_model: Name | None = None
    """A Hub id or a directory, loaded with the settings of this configuration but without its adapter."""
    prompt: Template | None = None
    """System message that only this agent sees, with {column} for values of the task."""

    @model_validator(mode="after")
    def at_most_one_model(self) -> "ModelAgentConfig":
        keys = [key for key in ("run", "file", "base_model") if is_set(self, key)]
        if len(keys) > 1:
            raise rule_error(f"{' and '.join(keys)} each name a model; write one of them", at=keys[1])
        return self

    @property
    def is_own(self) -> bool:
        """Whether this is the model of the configuration."""
        return self.run is None and self.file is None and self.base_model is None


class ScriptedAgentConfig(ConfigModel):
    """Fixed lines, or a Python class."""

    type: Literal["scripted"]
    """Fixed lines or a class."""
    lines: tuple[Template, ...] = ()
    """Lines in the order in which they are said, with {column} for values of the task. After the last one the episode
    ends, unless a custom world continues it."""
    program: Annotated[str, AfterValidator(check_target_or_name)] | None = None
    """`module:Class` with `act(contexts)`, which returns a reply for each, or with `reply(context)`; or a name that an
    installed package registers (entry points `partita.agents`)."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""

    @model_validator(mode="after")
    def lines_or_program(self) -> "ScriptedAgentConfig":
        if bool(self.lines) == (self.program is not None):
            problem = "has neither lines nor a program" if not self.lines else "has both lines and a program"
            raise rule_error(f"the agent {problem}; write either lines: [...] or program: module:Class", at="lines")
        if self.options and self.program is None:
            raise rule_error("options are for a program; remove them", at="options")
        return self


class GoldAgentConfig(ConfigModel):
    """This agent's turns in a dialogue of the dataset."""

    type: Literal["gold"]
    """The turns of the task's dialogue; after the last one the episode ends. The main agent sees its system message."""


class EnvironmentAgentConfig(ConfigModel):
    """The environment of the world."""

    type: Literal["environment"]
    """The environment of the world, which is also the default."""


def type_of_a_word(value: object) -> object:
    """Return a mapping with `type` for a single word."""
    if isinstance(value, str) and value not in WORDS:
        raise rule_error(f"got {value!r}; write {', '.join(WORDS)}, or a mapping with type: model or scripted")
    return {"type": value} if isinstance(value, str) else value


WORDS = ("model", "gold", "environment")
AnyAgent: TypeAlias = ModelAgentConfig | ScriptedAgentConfig | GoldAgentConfig | EnvironmentAgentConfig
Agent = Annotated[
    AnyAgent,
    Field(discriminator="type"),
    BeforeValidator(type_of_a_word, json_schema_input_type=Literal["model", "gold", "environment"] | AnyAgent),
]
MainAgent = Annotated[
    ModelAgentConfig, BeforeValidator(type_of_a_word, json_schema_input_type=Literal["model"] | ModelAgentConfig)
]


def check_names(agents: dict[str, AnyAgent]) -> dict[str, AnyAgent]:
    """Return the agents if their names are free and can be used in a transcript."""
    for name in agents:
        if name in TAKEN:
            raise rule_error(f"the name {name} is taken; write another one", at=name)
        if not NAME.fullmatch(name):
            raise rule_error(f"got the name {name!r}; write letters, digits, _ and -, a letter first", at=name)
    return agents


TAKEN = ("agent", "user", "partner", "system", "checker")
"""Names that transcripts use for other speakers."""


class AgentsConfig(ConfigModel):
    """The agents of a simulation."""

    agent: MainAgent = ModelAgentConfig.model_construct(type="model")
    """The model of this configuration, which is evaluated."""
    user: Agent | None = None
    """The agent that talks to the model. Default: the environment, or for replay the dataset."""
    partner: Agent | None = None
    """The other agent of self_play. Default: the same model."""
    others: Annotated[dict[str, Agent], AfterValidator(check_names)] = {}
    """Further agents of a custom world, by name."""


class UserSimWorldConfig(ConfigModel):
    """A second agent plays the user: it begins, sees its own turns as the assistant's, and ends the episode."""

    type: Literal["user_sim"]
    """The agent `user` talks to the model."""
    first: Template | None = None
    """First message of the model, before the user begins, such as a greeting."""
    done: Name = "###"
    """The episode ends when a message of the user contains this text."""


class SelfPlayWorldConfig(ConfigModel):
    """Two agents talk to each other: the model and a partner, which may be the same model."""

    type: Literal["self_play"]
    """The agents `agent` and `partner` talk to each other."""
    first: Template | None = None
    """First message of the partner. Default: the partner generates it."""
    done: Name = "###"
    """The episode ends when a message contains this text."""


class CustomWorldConfig(ConfigModel):
    """A custom class that decides whose turn it is."""

    type: Literal["custom"]
    """A custom class that decides whose turn it is."""
    target: Annotated[str, AfterValidator(check_target_or_name)]
    """`module:Class` with `run(episode)`, or a name that an installed package registers (entry points
    `partita.worlds`)."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""


class ContextPolicy(ConfigModel):
    """What a model sees of an episode that exceeds its context."""

    policy: Literal["truncate", "drop_oldest_turns"] = "truncate"
    """truncate: the episode ends with status truncated. drop_oldest_turns: the oldest turns are left out of the prompt,
    only as many as a full answer needs."""
    keep: tuple[Literal["system", "first_user"], ...] = ("system", "first_user")
    """What is never left out: the system messages at the start, and the user's first message."""

    @model_validator(mode="after")
    def nothing_is_kept_of_what_is_not_dropped(self) -> "ContextPolicy":
        if self.policy == "truncate" and is_set(self, "keep"):
            raise rule_error("keep has no effect on policy: truncate; write policy: drop_oldest_turns", at="keep")
        return self
