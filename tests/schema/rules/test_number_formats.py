"""Tests of the rules for number formats that are meant for answers."""

from typing import Any

import pytest

from partita_schema.errors import ConfigError
from partita_schema.load import load_config

from ..refusals import problems_of

TYPE = "int8_dynamic_activation_int8_weight"
INT8 = {"quantization": {"type": TYPE}}
FASTEST = {"model_parameters": {"dtype": "fastest"}}
FILE: dict[str, Any] = {
    "base_model": "m",
    "input_features": [{"name": "a", "type": "text"}],
    "output_features": [{"name": "b", "type": "text"}],
}
TRAINED = FILE | {"trainer": {"type": "finetune"}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            INT8,
            (
                f"quantization.type: {TYPE} is not supported in training; remove quantization. To predict with the "
                f"trained model, add --set quantization.type={TYPE}"
            ),
        ),
        (
            FASTEST,
            (
                "model_parameters.dtype: fastest is not supported in training; write auto, or with an adapter "
                "bfloat16. To predict with the trained model, add --set model_parameters.dtype=fastest"
            ),
        ),
    ],
)
def test_formats_for_answers_are_refused_in_training_and_allowed_for_a_finished_run(
    sections: dict[str, Any], message: str
) -> None:
    assert problems_of(TRAINED | sections) == [message]
    assert problems_of(FILE | sections) == []
    assert load_config(TRAINED | sections, finished=True).config.trains
    with pytest.raises(ConfigError) as caught:  # other errors are found, and this is not one of them
        load_config(TRAINED | sections | {"seed": -1, "sed": 3}, finished=True)
    assert [problem.path for problem in caught.value.problems] == ["seed", "sed"]


def test_int8_goes_with_all_dtypes_but_float16_and_with_models_that_write_text() -> None:
    message = (
        "model_parameters.dtype: int8 layers are supported in models in float32 and bfloat16; write auto, bfloat16 or "
        "fastest, or remove quantization"
    )
    assert problems_of(FILE | INT8 | {"model_parameters": {"dtype": "float16"}}) == [message]
    for dtype in ("auto", "float32", "bfloat16", "fastest"):
        assert problems_of(FILE | INT8 | {"model_parameters": {"dtype": dtype}}) == []
    output = {"name": "b", "type": "category", "head": "linear"}
    message = "quantization.type: int8 layers are not supported with a head; remove quantization"
    assert problems_of(FILE | INT8 | {"output_features": [output]}) == [message]


def test_the_keys_of_one_type_are_refused_by_the_other_and_bitsandbytes_is_the_default() -> None:
    message = f"quantization.bits: bits has no effect with type: {TYPE}; remove it, it belongs to type: bitsandbytes"
    assert problems_of(FILE | {"quantization": {"type": TYPE, "bits": 8}}) == [message]
    message = f"quantization.type: write bitsandbytes or {TYPE}; got 'int8'"
    assert problems_of(FILE | {"quantization": {"type": "int8"}}) == [message]
    assert load_config(FILE | {"quantization": {"bits": 8}}).config.quantization.type == "bitsandbytes"
