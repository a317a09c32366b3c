"""The model of the whole file: its sections, and the rules between them."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationInfo, model_validator

from partita_schema.base import Refusal, rule_error
from partita_schema.common.text import counted
from partita_schema.rules import RULES, TRAINING_RULES
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.model import EmbeddingBagModel, ScratchModel

FINISHED: Mapping[str, Any] = {"finished": True}
"""Context of a validation: the file is that of a finished run."""


class Config(ConfigSections):
    """The configuration of one run: the content of one YAML file."""

    @model_validator(mode="before")
    @classmethod
    def reward_models_have_a_head(cls, sections: Any) -> Any:
        """Write `head: linear` into pairs of `trainer: {type: reward}`."""
        if not isinstance(sections, Mapping):
            return sections
        trainer, outputs = sections.get("trainer"), sections.get("output_features")
        if not isinstance(trainer, Mapping) or trainer.get("type") != "reward" or not isinstance(outputs, list | tuple):
            return sections
        return {**sections, "output_features": [with_head_of_pairs(output) for output in outputs]}

    @model_validator(mode="after")
    def rules_between_sections_hold(self, info: ValidationInfo) -> "Config":
        for key, message in refusals(self, finished=is_finished(info)):
            raise rule_error(message, at=key)
        return self


def is_finished(info: ValidationInfo) -> bool:
    """Return whether the sections are those of a finished run: the context is FINISHED."""
    return info.context is FINISHED


def refusals(config: ConfigSections, *, finished: bool = False) -> Iterator[Refusal]:
    """Yield every key that violates a rule between sections. Outputs of a new encoder have a head in all rules.

    Args:
        config: The sections.
        finished: Whether they are those of a finished run.
    """
    checked = with_heads(config) if config.is_new_encoder else config
    for rule in RULES if finished else (*RULES, *TRAINING_RULES):
        yield from rule(checked)


def with_head_of_pairs(output: Any) -> Any:
    """Return the mapping of an output, with a head if it is a pair of answers that names none."""
    is_pair = isinstance(output, Mapping) and output.get("type") == "preference"
    return {**output, "head": "linear"} if is_pair and output.get("head") is None else output


def with_heads(config: ConfigSections) -> ConfigSections:
    """Return a copy with `head: linear` in each output that a head can predict."""
    outputs = tuple(
        output.model_copy(update={"head": "linear"}) if output.can_have_head and not output.has_head else output
        for output in config.output_features
    )
    return config.model_copy(update={"output_features": outputs})


def summary(config: Config) -> str:
    """Return a summary such as `finetune of scratch llama with lora in 4 bits; 1 input, 2 outputs`."""
    verb = config.trainer.type if config.trains else "zero-shot"
    adapter = f" with {config.adapter.type}" if config.adapter is not None else ""
    quantization = config.quantization
    bits = "" if quantization is None else f" in {getattr(quantization, 'bits', 8)} bits"
    inputs, outputs = len(config.input_features), len(config.output_features)
    return f"{verb} of {model_name(config)}{adapter}{bits}; {counted(inputs, 'input')}, {counted(outputs, 'output')}"


def model_name(config: Config) -> str:
    """Return the name of the base model for a summary."""
    model = config.base_model
    if isinstance(model, ScratchModel):
        return f"scratch {model.architecture}"
    return "an embedding bag" if isinstance(model, EmbeddingBagModel) else model
