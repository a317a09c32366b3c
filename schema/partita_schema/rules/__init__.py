"""Rules between sections. A rule is a function from the sections to the keys that violate it."""

from collections.abc import Callable, Iterator

from partita_schema.base import Refusal
from partita_schema.rules.adapters import inits_on_other_weights, refused_by_virtual_tokens
from partita_schema.rules.comparable_trials import incomparable_trials
from partita_schema.rules.constraints import refused_by_constraints
from partita_schema.rules.data import impossible_folds, streaming_conflicts, two_splits
from partita_schema.rules.encoder_decoders import refused_by_new_encoder_decoder
from partita_schema.rules.endpoint import refused_by_endpoint
from partita_schema.rules.features import (
    duplicate_names,
    features_next_to_a_dialogue,
    outputs_with_names_in_use,
    prompts_of_dialogues,
    simulation_without_dialogue,
)
from partita_schema.rules.heads import refused_by_heads
from partita_schema.rules.hogwild import refused_by_hogwild
from partita_schema.rules.language_modelling import chunk_conflicts, language_modelling_conflicts
from partita_schema.rules.new_models import refused_by_new_models
from partita_schema.rules.number_formats import int8_conflicts, untrainable_formats
from partita_schema.rules.preference import refused_by_preferences, unfit_transcripts
from partita_schema.rules.prompt import constant_prompts, leaked_answers, unusable_examples
from partita_schema.rules.sharding import refused_by_sharding
from partita_schema.rules.sweep import impossible_sweep, unmeasured_sweep
from partita_schema.rules.training import (
    half_precision,
    impossible_self_training,
    meaningless_base,
    packed_attention,
    trained_quantization,
    two_batch_sizes,
    uncalled_callbacks,
    ungenerated_metric,
    unknown_metric,
    untrained_adapter,
)
from partita_schema.rules.turn_outputs import refused_turn_outputs
from partita_schema.sections.config_sections import ConfigSections

RULES: tuple[Callable[[ConfigSections], Iterator[Refusal]], ...] = (
    duplicate_names,
    outputs_with_names_in_use,
    language_modelling_conflicts,
    chunk_conflicts,
    leaked_answers,
    constant_prompts,
    unusable_examples,
    features_next_to_a_dialogue,
    refused_turn_outputs,
    prompts_of_dialogues,
    trained_quantization,
    refused_by_endpoint,
    untrained_adapter,
    refused_by_sharding,
    refused_by_hogwild,
    refused_by_heads,
    refused_by_preferences,
    unfit_transcripts,
    refused_by_new_encoder_decoder,
    refused_by_new_models,
    refused_by_virtual_tokens,
    inits_on_other_weights,
    simulation_without_dialogue,
    impossible_self_training,
    refused_by_constraints,
    two_splits,
    impossible_folds,
    int8_conflicts,
    meaningless_base,
    streaming_conflicts,
    two_batch_sizes,
    uncalled_callbacks,
    ungenerated_metric,
    unknown_metric,
    packed_attention,
    half_precision,
    unmeasured_sweep,
    impossible_sweep,
    incomparable_trials,
)
"""All rules, in the order in which they are checked. The first violation is reported; `problems` finds the others."""

TRAINING_RULES: tuple[Callable[[ConfigSections], Iterator[Refusal]], ...] = (untrainable_formats,)
"""Rules that the file of a finished run, which is not trained again, need not follow."""
