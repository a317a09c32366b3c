"""Models: how they are loaded and run."""

from typing import Any

from .bases import ANSWER, PROBE, SEEN
from .effects import Flip, Group
from .hub import asking_hub
from .observers import Config, answers, training


def scaled(type: str, **keys: Any) -> Config:
    """Return a section with rescaled positions."""
    return {"model_parameters": {"rope_scaling": {"type": type, **keys}}}


YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=2048)
LONG = scaled(
    "longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=32, factor=2.0
)
LLAMA = scaled("llama3", factor=8.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0)
LINEAR = scaled("linear", factor=2.0)
INT8 = {"type": "int8_dynamic_activation_int8_weight"}
HUB = {"type": "hub", "name": "own/rows"}
ROPE = "model_parameters.rope_scaling."

MODELS = [
    Group(
        "positions",
        training,
        PROBE,
        "losses",
        {
            f"{ROPE}type": Flip("dynamic", given=LINEAR),
            f"{ROPE}factor": Flip(4.0, given=LINEAR),
            f"{ROPE}original_max_position_embeddings": Flip(64, given=YARN),
            f"{ROPE}attention_factor": Flip(3.0, given=YARN),
            f"{ROPE}beta_fast": Flip(2.0, given=YARN),
            f"{ROPE}beta_slow": Flip(0.1, given=YARN),
            f"{ROPE}short_factor": Flip([2.0] * 4, given=LONG),
            f"{ROPE}long_factor": Flip(
                [9.0] * 4,
                given={
                    "model_parameters": {
                        "rope_scaling": LONG["model_parameters"]["rope_scaling"]
                        | {"original_max_position_embeddings": 4}
                    }
                },
            ),
            f"{ROPE}low_freq_factor": Flip(3.0, given=LLAMA),
            f"{ROPE}high_freq_factor": Flip(9.0, given=LLAMA),
            f"{ROPE}rope_theta": Flip(50.0, given=LINEAR),
            f"{ROPE}partial_rotary_factor": Flip(0.5, given=scaled("proportional", partial_rotary_factor=1.0)),
            "model_parameters.neftune_noise_alpha": 5.0,
        },
    ),
    Group(
        "files",
        answers,
        ANSWER,
        "refusal",
        {
            "model_parameters.pickled_weights": Flip(
                False, given={"base_model": "pickled", "model_parameters": {"pickled_weights": True}}
            ),
            "trust_remote_code": Flip(False, given={"base_model": "coded", "trust_remote_code": True}),
        },
    ),
    Group(
        "quantization",
        training,
        PROBE | {"adapter": {"type": "lora", "r": 4}, "quantization": {"bits": 4}},
        "losses",
        {
            "quantization[bitsandbytes].bits": 8,
            "quantization[bitsandbytes].bnb_4bit_quant_type": "fp4",
            "quantization[bitsandbytes].bnb_4bit_use_double_quant": False,
            "quantization[bitsandbytes].bnb_4bit_compute_dtype": "bfloat16",
            "quantization[bitsandbytes].llm_int8_has_fp16_weight": Flip(
                True, given={"quantization": {"bits": 8}}, part="types"
            ),
            "quantization[bitsandbytes].skip_modules": ["q_proj", "lm_head"],
        },
        long=True,
    ),
    Group(
        "quantized answers",
        answers,
        ANSWER | {"quantization": {"bits": 8}},
        "answers",
        {"quantization[bitsandbytes].llm_int8_threshold": 0.5},  # bitsandbytes ignores it in training on a CPU
        long=True,
    ),
    Group(
        "int8 answers",
        answers,
        ANSWER,
        "log",
        {
            "quantization[bitsandbytes].type": Flip(INT8, given={"quantization": {"type": "bitsandbytes", "bits": 4}}),
            "quantization[int8_dynamic_activation_int8_weight].type": Flip(
                {"type": "bitsandbytes", "bits": 4}, given={"quantization": INT8}
            ),
            "quantization[int8_dynamic_activation_int8_weight].skip_modules": Flip(
                ["lm_head"], given={"quantization": INT8}
            ),
        },
        long=True,
    ),
    Group(
        "revisions",
        asking_hub,
        SEEN,
        "asked",
        {
            "model_parameters.revision": Flip("second", given={"base_model": "own/model"}),
            **{
                f"data.{place}[hub].revision": Flip("second", given={"data": {place: HUB}})
                for place in ("source", "validation", "test")
            },
            "data.mix.source[hub].revision": Flip(
                "second", given={"data": {"source": None, "mix": [{"source": HUB}, {"source": "more.jsonl"}]}}
            ),
        },
    ),
]
