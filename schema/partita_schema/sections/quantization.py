"""Quantization: base weights in fewer bits, for less memory or faster answers."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from partita_schema.base import ConfigModel, Name, NonNegative, StrictBool, is_set, rule_error


class BitsandbytesQuantization(ConfigModel):
    """Weights quantized to 4 or 8 bits with bitsandbytes, on CPU and GPU."""

    type: Literal["bitsandbytes"] = "bitsandbytes"
    """4-bit or 8-bit weights; in training, only of the frozen base model of an adapter."""
    bits: Literal[4, 8] = 4
    """Bits per weight."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """4-bit data type: nf4 (normal float) or fp4."""
    bnb_4bit_use_double_quant: StrictBool = True
    """Also quantize the quantization constants; saves about 0.4 bits per weight."""
    bnb_4bit_compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type for the computation in 4-bit layers. auto: float32 on a CPU; elsewhere bfloat16 if supported, otherwise
    float16."""
    llm_int8_threshold: NonNegative = 6.0
    """Outlier threshold: activations above it are computed in 16 bits (LLM.int8, Dettmers et al. 2022, section 3.2)."""
    llm_int8_has_fp16_weight: StrictBool = False
    """Keep 16-bit weights in addition to the 8-bit ones."""
    skip_modules: tuple[Name, ...] | None = None
    """Names of modules that are not quantized. Default: the output layer (language model head)."""

    @model_validator(mode="after")
    def keys_fit_the_bits(self) -> "BitsandbytesQuantization":
        other = "bnb_4bit_" if self.bits == 8 else "llm_int8_"
        wrong = sorted(key for key in type(self).model_fields if key.startswith(other) and is_set(self, key))
        if wrong:
            raise rule_error(f"{wrong[0]} has no effect with bits: {self.bits}; remove it", at=wrong[0])
        return self


class DynamicInt8Quantization(ConfigModel):
    """Weights and inputs of linear layers in 8 bits, for answers of a decoder on a CPU."""

    type: Literal["int8_dynamic_activation_int8_weight"]
    """int8 weights, with a scale for each output; inputs are quantized to int8 when they are computed, with a scale for
    each token. Layers that are not faster in int8 on this machine keep the dtype of the model. Answers, scores and
    losses differ from those without quantization. With model_parameters.dtype: fastest, what is not in int8 is computed
    in bfloat16 where that is faster."""
    skip_modules: tuple[Name, ...] = ()
    """Names of modules that are not quantized, such as lm_head. Default: none."""


def default_to_bitsandbytes(value: object) -> object:
    return {**value, "type": "bitsandbytes"} if isinstance(value, dict) and "type" not in value else value


Quantization = Annotated[
    Annotated[BitsandbytesQuantization | DynamicInt8Quantization, Field(discriminator="type")],
    BeforeValidator(default_to_bitsandbytes),
]
"""A quantization, selected by its type; bitsandbytes by default."""
