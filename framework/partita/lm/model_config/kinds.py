"""Kinds of models, as their config.json describes them."""

from typing import TYPE_CHECKING, Any, Literal

from partita_schema.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ModelKind = Literal["decoder", "encoder-decoder"]
"""decoder: a causal language model. encoder-decoder: its encoder reads prompts, and its decoder writes answers."""


def model_kind(described: "PretrainedConfig", *, source: str) -> ModelKind:
    """Return the kind of a model that writes text.

    Raises:
        ModelError: It writes no text, or reads more than text. transformers would load some of them as a decoder, with
            a warning.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as KNOWN

    name = described.model_type
    if getattr(described, "is_encoder_decoder", False):
        if name not in KNOWN or reads_more_than_text(described):
            raise ModelError(
                f"base_model: {source} is a {name} model, an encoder-decoder that does not only read text; choose one "
                "that does, such as T5 or BART, or a causal language model"
            )
        return "encoder-decoder"
    if describes_encoder(described):
        raise ModelError(
            f"base_model: {source} is a {name} model, an encoder that writes no text; "
            "choose a causal language model or an encoder-decoder"
        )
    return "decoder"


def describes_encoder(described: "PretrainedConfig") -> bool:
    """Return whether a transformers config is that of an encoder without a decoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if getattr(described, "is_encoder_decoder", False):
        return False
    return described.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(described, "is_decoder", False)


def reads_more_than_text(described: "PretrainedConfig") -> bool:
    """Return whether a model also reads sound or images."""
    parts = (described, getattr(described, "encoder", None))
    keys = ("audio_config", "speech_encoder_layers", "vision_config", "num_mel_bins")
    return any(getattr(part, key, None) is not None for part in parts for key in keys)


def class_of_kind(kind: ModelKind) -> Any:
    """Return the class of transformers that loads models of this kind."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return {"decoder": AutoModelForCausalLM, "encoder-decoder": AutoModelForSeq2SeqLM}[kind]
