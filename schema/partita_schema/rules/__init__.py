"""Rules between sections. A rule is a function from the sections to the keys that violate it."""

from collections.abc import Callable, Iterator

from partita_schema.base import Refusal
from partita_schema.rules.constraints import refused_by_constraints
from partita_schema.rules.data import streaming_conflicts, two_splits
from partita_schema.rules.endpoint import refused_by_endpoint
from partita_schema.rules.features import (
    duplicate_names,
    features_next_to_a_dialogue,
    prompts_of_dialogues,
    simulation_without_dialogue,
)
from partita_schema.rules.hogwild import refused_by_hogwild
from partita_schema.rules.language_modelling import chunk_conflicts, language_modelling_conflicts
from partita_schema.rules.prompt import leaked_answers, unusable_examples
from partita_schema.rules.sharding import refused_by_sharding
from partita_schema.rules.training import (
    fastest_dtype,
    impossible_self_training,
    trained_quantization,
    two_batch_sizes,
    unknown_metric,
    untrained_adapter,
)
from partita_schema.sections.config_sections import ConfigSections

RULES: tuple[Callable[[ConfigSections], Iterator[Refusal]], ...] = (
    duplicate_names,
    language_modelling_conflicts,
    chunk_conflicts,
    leaked_answers,
    unusable_examples,
    features_next_to_a_dialogue,
    prompts_of_dialogues,
    trained_quantization,
    refused_by_endpoint,
    untrained_adapter,
    refused_by_sharding,
    refused_by_hogwild,
    simulation_without_dialogue,
    impossible_self_training,
    refused_by_constraints,
    two_splits,
    fastest_dtype,
    streaming_conflicts,
    two_batch_sizes,
    unknown_metric,
)
"""All rules, in the order in which they are checked. The first violation is reported; `problems` finds the others."""
