"""Rules for dialogues whose turns are answered with several outputs."""

from collections.abc import Iterator

from partita_schema.base import Refusal, is_set
from partita_schema.dialogues.messages import READ_KEYS
from partita_schema.sections.backend import EndpointBackendConfig, RayBackendConfig
from partita_schema.sections.config_sections import ConfigSections

KEYS = ("answers", "questions", "include_outputs")
"""Options of `data.dialogue` for several outputs."""


def refused_turn_outputs(config: ConfigSections) -> Iterator[Refusal]:
    """Yield what conflicts with the outputs of a dialogue turn."""
    if config.dialogue_input is None or config.head_output is not None:
        return  # a head reads no dialogue
    yield from refused_reply(config)
    if len(config.output_features) == 1:
        for key in KEYS:
            if is_set(config.data.dialogue, key):
                yield f"data.dialogue.{key}", f"{key} has no effect on a single output; remove it"
        if not config.has_turn_outputs:
            return
    yield from refused_columns(config)
    yield from refused_names(config)
    if config.answers_in_sequence and isinstance(config.run_backend, EndpointBackendConfig | RayBackendConfig):
        yield (
            "data.dialogue.answers",
            f"backend: {{type: {config.backend.type}}} sends one request per turn; write answers: together",
        )


def refused_reply(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a reply of a simulation that is no output, or the only one."""
    names = [output.name for output in config.output_features]
    if config.simulation is None or config.simulation.reply is None:
        return
    if len(names) == 1:
        yield "simulation.reply", "reply has no effect on a single output; remove it"
    elif config.simulation.reply not in names:
        yield "simulation.reply", f"no output is named {config.simulation.reply!r}; write one of {', '.join(names)}"


def refused_columns(config: ConfigSections) -> Iterator[Refusal]:
    """Yield outputs that would be read from a message key with another meaning."""
    for index, output in enumerate(config.output_features):
        if output.source_column in READ_KEYS:
            key = "column" if output.column is not None else "name"
            reason = f"the message key {output.source_column} has another meaning"
            instead = f"write column: KEY, the key of a message that holds {output.name}, or column: content for a text"
            yield f"output_features.{index}.{key}", f"{reason}; {instead}"


def refused_names(config: ConfigSections) -> Iterator[Refusal]:
    """Yield options that name an output which they have no effect on."""
    names, dialogue = [output.name for output in config.output_features], config.data.dialogue
    if dialogue.questions and dialogue.answers == "together":
        yield (
            "data.dialogue.questions",
            "one JSON object answers all outputs, without questions between them; write answers: in_sequence",
        )
    for name in dialogue.questions:
        if name not in names[1:]:
            reason = "the first output answers the dialogue itself" if name in names else f"no output is named {name!r}"
            yield f"data.dialogue.questions.{name}", f"{reason}; write one of {', '.join(names[1:])}"
    if dialogue.include_outputs is not None:
        unknown = next((name for name in dialogue.include_outputs if name not in names), None)
        if unknown is not None:
            yield "data.dialogue.include_outputs", f"no output is named {unknown!r}; write some of {', '.join(names)}"
        if not dialogue.include_outputs:
            yield "data.dialogue.include_outputs", "it names no output; write include_labels: false to show no answers"
