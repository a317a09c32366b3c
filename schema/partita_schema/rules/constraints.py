"""Rules for configurations with constrained or scored answers."""

from collections.abc import Iterator

from partita_schema.base import Refusal, is_set
from partita_schema.sections.backend import EndpointBackendConfig
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.outputs import OutputFeature
from partita_schema.sections.outputs.grammar import grammar_mistake

READ_ANSWERS = (
    ("decoder", "match"),
    ("decoder", "fallback_label"),
    ("preprocessing", "fallback_label"),
    ("preprocessing", "max_sequence_length"),
)
"""Options of an output that read a generated answer; they have no effect on a label that is chosen."""
NOT_IN_SLOTS = ("num_beams", "guidance_scale", "slots")
"""Generation options that do not work with continuous batching."""
NOT_GENERATING = ("logprobs",)
"""Generation options that have an effect even if nothing is generated."""


def refused_by_constraints(config: ConfigSections) -> Iterator[Refusal]:
    """Yield every key that conflicts with `constrain: true` or `scoring: true`."""
    constrained = [index for index, output in enumerate(config.output_features) if output.constrain]
    if constrained:
        yield from refused_by_constrain(config, f"output_features.{constrained[0]}.decoder")
    for index, output in enumerate(config.output_features):
        if output.scoring:
            yield from refused_by_scoring(config, output, f"output_features.{index}")


def refused_by_constrain(config: ConfigSections, at: str) -> Iterator[Refusal]:
    """Yield keys that conflict with constrained answers. `at` is the decoder of the first constrained output."""
    if isinstance(config.backend, EndpointBackendConfig):
        reason = "a server constrains its answers itself"
        yield f"{at}.constrain", f"{reason}; remove it, and write response_format or the like in backend.extra_body"
    for index, output in enumerate(config.output_features):
        if output.constrain is False and not config.answers_in_sequence:
            reason = "several outputs are one JSON object, which is constrained as a whole"
            at_output = f"output_features.{index}.decoder.constrain"
            yield at_output, f"{reason}; write constrain: true for each {output.type} output, or for none"
    for key in NOT_IN_SLOTS:
        if config.generation.asks_for(key):
            yield f"generation.{key}", f"constrained answers are impossible with {key}; remove it, or constrain"
    if config.generation.stop:
        yield "generation.stop", "a stop text would cut the JSON of constrained answers; remove it"
    for index, output in enumerate(config.output_features):
        mistake = grammar_mistake(output)
        if mistake is not None:
            yield (
                f"output_features.{index}.decoder.constrain",
                f"answers cannot be held to this json_schema ({mistake}); fix json_schema, or remove constrain",
            )


def refused_by_scoring(config: ConfigSections, output: OutputFeature, at: str) -> Iterator[Refusal]:
    """Yield keys that conflict with scored labels. `at` is the path of their output."""
    if isinstance(config.backend, EndpointBackendConfig):
        yield f"{at}.decoder.scoring", "servers do not return the probability of a given text; remove it"
    if len(config.output_features) > 1 and not config.answers_in_sequence:
        instead = "write data.dialogue: {answers: in_sequence}" if config.dialogue_input else "the other outputs"
        yield f"{at}.decoder.scoring", f"only the label of a single output is scored; remove it, or {instead}"
    if config.data.formatter is not None:
        yield "data.formatter", "a custom formatter writes answers that scoring does not know; remove it, or scoring"
    for part, key in READ_ANSWERS:
        if is_set(getattr(output, part), key):
            yield (
                f"{at}.{part}.{key}",
                f"{key} reads generated answers, and scoring generates none; remove one of the two",
            )
    if not all(other.scoring for other in config.output_features):
        for key in NOT_IN_SLOTS:
            if config.generation.asks_for(key):
                yield f"generation.{key}", f"labels cannot be scored with {key}; remove it, or scoring"
        return
    for key in type(config.generation).model_fields:
        if key not in NOT_GENERATING and config.generation.asks_for(key):
            yield f"generation.{key}", f"scoring generates nothing, so {key} has no effect; remove one of the two"
