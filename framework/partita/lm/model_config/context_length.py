"""The config.json of a model, and the context lengths that follow from it."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from partita.lm.base import AnswerContext
from partita.lm.model_config.architectures import unused_positions
from partita.tokenizers.hub import find_base, loading
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.rules.new_models import NO_ROOM, NO_ROTARY_POSITIONS
from partita_schema.sections.model import ENCODER_DECODERS, EmbeddingBagModel, RopeScaling, ScratchModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def read_config(config: Config, source: str) -> "PretrainedConfig":
    """Return the transformers config of a folder or Hub id. Raise ModelError."""
    with loading(source, part="config"):
        from transformers import AutoConfig

        revision = config.model_parameters.revision
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=config.trust_remote_code)


def scale_positions(described: "PretrainedConfig", scaling: RopeScaling) -> None:
    """Write the configured rope scaling into a model's config, and extend its maximum length."""
    own = getattr(described, "rope_parameters", None)
    if not own:
        raise ModelError(f"model_parameters.rope_scaling: {NO_ROTARY_POSITIONS.format(described.model_type)}")
    settings = scaling.model_dump(exclude_none=True, exclude={"type"})
    settings |= {key: list(value) for key, value in settings.items() if isinstance(value, tuple)}
    described.rope_parameters = {**own, **settings, "rope_type": scaling.type}
    check_factors(described, scaling)
    trained = scaling.original_max_position_embeddings or described.max_position_embeddings
    if scaling.factor is not None and scaling.type != "dynamic":
        described.rope_parameters.setdefault("original_max_position_embeddings", trained)
        described.max_position_embeddings = round(trained * scaling.factor)


def check_factors(described: "PretrainedConfig", scaling: RopeScaling) -> None:
    """Raise ModelError if short_factor or long_factor does not have one number for each rotary frequency of a head."""
    text = described.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    frequencies = int(size * (described.rope_parameters.get("partial_rotary_factor") or 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        factors = getattr(scaling, key)
        if factors is not None and len(factors) != frequencies:
            raise ModelError(
                f"model_parameters.rope_scaling.{key} has {counted(len(factors), 'number')}, and a head of the model "
                f"has {frequencies} frequencies; write one number for each"
            )


def context_length(model: "PreTrainedModel", *, virtual_tokens: int) -> int | None:
    """Return the maximum sequence length in tokens without virtual tokens; None without limit."""
    return described_length(model.config, virtual_tokens=virtual_tokens)


def described_length(described: "PretrainedConfig", *, virtual_tokens: int) -> int | None:
    """Return the context length of a model with this config.json, without virtual tokens; None without limit.

    Raises ModelError if virtual tokens fill the context.
    """
    if described.is_encoder_decoder:
        return side_length(described, "encoder")
    described = described.get_text_config()
    limit = getattr(described, "max_position_embeddings", None)
    if limit is None or limit < 0:  # XLNet's is -1
        return None
    scaling = getattr(described, "rope_parameters", None) or {}
    if scaling.get("rope_type") == "dynamic":
        limit = round(limit * scaling.get("factor", 1))
    unused = unused_positions(described.model_type, getattr(described, "pad_token_id", None))
    length = int(limit) - unused
    if virtual_tokens and virtual_tokens >= length:
        raise ModelError(f"adapter.num_virtual_tokens: {NO_ROOM.format(virtual_tokens, length)}")
    return length - virtual_tokens


def described_answer_context(described: "PretrainedConfig") -> AnswerContext | None:
    """Return the context of the decoder of a model with this config.json; None if it is a causal model."""
    return AnswerContext(side_length(described, "decoder")) if described.is_encoder_decoder else None


def side_length(described: "PretrainedConfig", side: Literal["encoder", "decoder"]) -> int | None:
    """Return the most tokens of a side of an encoder-decoder; None without limit, as in T5."""
    own = getattr(described, side, None)
    names = (f"max_{side}_position_embeddings", "max_position_embeddings")
    limits = [getattr(part, name, None) for part in (own, described) for name in names]
    return next((int(limit) for limit in limits if isinstance(limit, int)), None)


def configured_context(config: Config, *, folder: Path) -> tuple[int | None, AnswerContext | None]:
    """Return the context length and the answer context of the configured model, without loading its weights.

    Args:
        config: The configuration.
        folder: Base of relative paths in the configuration.

    Raises:
        ModelError: The model's config.json cannot be read.
    """
    base = config.base_model
    virtual_tokens = getattr(config.adapter, "num_virtual_tokens", 0)
    if isinstance(base, EmbeddingBagModel):
        return None, None
    if isinstance(base, ScratchModel):
        limit = None if base.architecture == "t5" else base.context_length - virtual_tokens
        return limit, AnswerContext(limit) if base.architecture in ENCODER_DECODERS else None
    source = find_base(base, folder=folder)
    described = read_config(config, source)
    if config.model_parameters.rope_scaling is not None:
        with loading(source, part="config"):
            scale_positions(described, config.model_parameters.rope_scaling)
    return described_length(described, virtual_tokens=virtual_tokens), described_answer_context(described)
