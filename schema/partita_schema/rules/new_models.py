"""Rules for new models: the file shows their architecture and their context."""

from collections.abc import Iterator

from partita_schema.base import Refusal
from partita_schema.sections.batching import ChunkBatching
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.model import ENCODER_DECODERS, UNROTATED, ScratchModel

NO_ROTARY_POSITIONS = "a {} model has no rotary positions; remove it"
NO_ROOM = "{:,} virtual tokens leave no room for a row in the model's context of {:,} tokens; write fewer"
ABOVE_THE_CONTEXT = "{:,} is above the model's context of {:,} tokens; write at most {}"


def refused_by_new_models(config: ConfigSections) -> Iterator[Refusal]:
    """Yield every key that conflicts with the architecture or the context of a new model."""
    base = config.base_model
    if not isinstance(base, ScratchModel):
        return
    scaling = config.model_parameters.rope_scaling
    if scaling is not None and base.architecture in UNROTATED:
        yield "model_parameters.rope_scaling", NO_ROTARY_POSITIONS.format(base.architecture)
    if base.architecture in ENCODER_DECODERS or scaling is not None:
        return
    virtual_tokens = getattr(config.adapter, "num_virtual_tokens", 0)
    context = base.context_length - virtual_tokens
    if context < 1:
        yield "adapter.num_virtual_tokens", NO_ROOM.format(virtual_tokens, base.context_length)
        return
    limit = config.preprocessing.global_max_sequence_length
    if limit is not None and limit > context:
        yield "preprocessing.global_max_sequence_length", ABOVE_THE_CONTEXT.format(limit, context, context)
    batching = config.data.batching
    if isinstance(batching, ChunkBatching) and batching.context_length and batching.context_length > context:
        length = batching.context_length
        yield "data.batching.context_length", ABOVE_THE_CONTEXT.format(length, context, context)
