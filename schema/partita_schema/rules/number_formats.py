"""Rules for number formats that are meant for answers: the fastest dtype, and int8."""

from collections.abc import Iterator

from partita_schema.base import Refusal
from partita_schema.sections.config_sections import ConfigSections
from partita_schema.sections.quantization import DynamicInt8Quantization


def untrainable_formats(config: ConfigSections) -> Iterator[Refusal]:
    """Yield a number format that is meant for answers, in a file that trains; the file of a finished run may have one.

    A finished run is not trained again, and its saved weights have full precision.
    """
    if not config.trains:
        return
    if config.model_parameters.dtype == "fastest":
        advice = "and add it to predict with the run: --set model_parameters.dtype=fastest"
        yield (
            "model_parameters.dtype",
            f"fastest is for answers alone; write auto, or with an adapter bfloat16, {advice}",
        )
    if isinstance(config.quantization, DynamicInt8Quantization):
        reason = f"{config.quantization.type} is for answers alone, and its weights cannot be trained"
        advice = "remove quantization, and add it to predict with the run: --set quantization.type={}"
        yield "quantization.type", f"{reason}; {advice.format(config.quantization.type)}"


def int8_conflicts(config: ConfigSections) -> Iterator[Refusal]:
    """Yield keys that conflict with int8 layers."""
    if not isinstance(config.quantization, DynamicInt8Quantization):
        return
    if config.model_parameters.dtype not in ("auto", "float32"):
        reason = "layers with int8 weights take and return float32"
        yield "model_parameters.dtype", f"{reason}; write auto, or remove quantization"
    if config.head_output is not None:
        yield "quantization.type", "int8 layers are for models that write text, not for a head; remove quantization"
