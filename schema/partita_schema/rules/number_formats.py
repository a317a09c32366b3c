"""Rules for number formats that are meant for answers: the fastest dtype, and int8."""

from collections.abc import Iterator

from partita_schema.base import Refusal
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.quantization import DynamicInt8Quantization

PREDICT = "To predict with the trained model, add --set"


def untrainable_formats(config: ConfigSections) -> Iterator[Refusal]:
    """Yield number formats that are not supported in training.

    The file of a finished run may have them: it is not trained again, and its saved weights have full precision.
    """
    if not config.trains:
        return
    if config.model_parameters.dtype == "fastest":
        reason = "fastest is not supported in training; write auto, or with an adapter bfloat16"
        yield "model_parameters.dtype", f"{reason}. {PREDICT} model_parameters.dtype=fastest"
    if isinstance(config.quantization, DynamicInt8Quantization):
        name = config.quantization.type
        reason = f"{name} is not supported in training; remove quantization"
        yield "quantization.type", f"{reason}. {PREDICT} quantization.type={name}"


def int8_conflicts(config: ConfigSections) -> Iterator[Refusal]:
    """Yield keys that conflict with int8 layers."""
    if not isinstance(config.quantization, DynamicInt8Quantization):
        return
    if config.model_parameters.dtype == "float16":
        reason = "int8 layers are supported in models in float32 and bfloat16"
        yield "model_parameters.dtype", f"{reason}; write auto, bfloat16 or fastest, or remove quantization"
    if config.head_output is not None:
        yield "quantization.type", "int8 layers are not supported with a head; remove quantization"
