"""Rules for the inputs and outputs together: their names, and what a dialogue excludes."""

from collections.abc import Iterator

from partita_schema.base import Refusal, is_set
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.prompt import SPECIAL_FIELDS

RESULT_COLUMNS = ("key", "status", "error", "finish_reason", "tokens", "logprob", "reward", "samples")
"""Columns of predictions that describe a row and its answer."""
METRICS_OF_MODEL = "model"
"""Name of the metrics of all outputs together, such as the loss."""
NAMES_IN_USE = (*RESULT_COLUMNS, METRICS_OF_MODEL)
"""Names that an output cannot have."""
VALUE_COLUMNS = ("_raw", "_probability", "_probabilities", "_spans", "_score", "_rejected_score")
"""Endings of further columns that an output may have in predictions."""
NO_DIALOGUE = "no input is a dialogue; add {name: messages, type: dialogue} to input_features, or remove it"


def duplicate_names(config: ConfigSections) -> Iterator[Refusal]:
    """Yield features with the name of another one, or with a name that means something in templates."""
    seen: set[str] = set()
    sections = (("input_features", config.input_features), ("output_features", config.output_features))
    for section, features in sections:
        for index, feature in enumerate(features):
            at = f"{section}.{index}.name"
            if feature.name in seen:
                yield at, f"another feature is named {feature.name!r}; write a different name"
            if feature.name in SPECIAL_FIELDS:
                yield at, f"the name {feature.name} has a meaning in templates; choose another"
            seen.add(feature.name)


def outputs_with_names_in_use(config: ConfigSections) -> Iterator[Refusal]:
    """Yield outputs whose name is that of another column of predictions, or of the metrics of the model."""
    names = {feature.name for feature in config.output_features}
    for index, feature in enumerate(config.output_features):
        at = f"output_features.{index}.name"
        advice = f"write another name, and column: {feature.source_column}"
        if feature.name in RESULT_COLUMNS:
            yield at, f"predictions have a column {feature.name} of their own; {advice}"
        if feature.name == METRICS_OF_MODEL:
            yield at, f"the loss and other metrics of the whole model are named {METRICS_OF_MODEL}; {advice}"
        owner = next((name for name in names for end in VALUE_COLUMNS if feature.name == name + end), None)
        if owner is not None:
            yield at, f"predictions of {owner} have a column {feature.name}; {advice}"


def features_next_to_a_dialogue(config: ConfigSections) -> Iterator[Refusal]:
    """Yield inputs and outputs that cannot be used with a dialogue, which is the whole prompt."""
    if config.dialogue_input is None:
        if is_set(config.data, "dialogue"):
            yield (
                "data.dialogue",
                NO_DIALOGUE,
            )
        return
    for index, feature in enumerate(config.input_features):
        if feature is not config.dialogue_input:
            what = "a second dialogue" if feature.type == "dialogue" else "another input"
            yield (
                f"input_features.{index}",
                (
                    f"{what} in addition to {config.dialogue_input.name!r}, which is the whole prompt; remove it, "
                    "or make it a message of the dialogue"
                ),
            )


def prompts_of_dialogues(config: ConfigSections) -> Iterator[Refusal]:
    """Yield keys that write a prompt; the messages of a dialogue are the prompt."""
    for key in ("template", "task", "examples", "retrieval") if config.dialogue_input else ():
        if is_set(config.prompt, key):
            instead = "write system" if key in ("template", "task") else "put the examples into the dialogues"
            yield (
                f"prompt.{key}",
                f"{key} has no place in a dialogue, whose messages are the prompt; remove it, or {instead}",
            )
    if config.dialogue_input and config.data.formatter is not None:
        yield "data.formatter", "a custom formatter takes rows of text; remove it, or write type: text"


def simulation_without_dialogue(config: ConfigSections) -> Iterator[Refusal]:
    """Yield `simulation` if no input is a dialogue."""
    if config.simulation is not None and config.dialogue_input is None:
        yield (
            "simulation",
            NO_DIALOGUE,
        )
