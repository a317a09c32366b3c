"""Tests that the constraints of outputs reach the model, or the run reports why not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from partita.data.formatting.formatter import Formatter
from partita.data.formatting.row_tokenizer import RowTokenizer
from partita.generation.engine import choose_engine
from partita.lm.base import GenerationOptions, Label
from partita.lm.scripted import ScriptedModel
from partita.outputs.constraints import with_constraints
from partita.tokenizers.load import PAD, UNKNOWN, WORD, byte_tokenizer, piece_backend, wrap
from partita_schema.config import Config
from partita_schema.errors import ModelError

MakeConfig = Callable[..., Config]
PLAIN = GenerationOptions({"do_sample": False})
LABEL: dict[str, Any] = {"name": "label", "type": "category", "decoder": {"scoring": True}}
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def formed(config: Config, tokenizer: Any, labels: dict[str, tuple[str, ...]]) -> GenerationOptions:
    return with_constraints(
        PLAIN, config, labels=labels, row_tokenizer=RowTokenizer(Formatter(config, tokenizer=tokenizer))
    )


def test_outputs_without_constraints_leave_answers_free(make_config: MakeConfig) -> None:
    config = make_config({"name": "label", "type": "category"}, {"name": "value", "type": "json"})
    assert formed(config, byte_tokenizer(), {"label": ("a", "b")}) == PLAIN


def test_scored_labels_come_from_the_configuration_or_the_data(make_config: MakeConfig) -> None:
    tokenizer = byte_tokenizer()
    result = formed(make_config(LABEL), tokenizer, {"label": ("no", "yes")}).labels
    assert result == tuple(Label(text, tuple(tokenizer.encode(text))) for text in ("no", "yes"))
    named = {**LABEL, "decoder": {"scoring": True, "labels": ["No", "YES", "no"]}, "preprocessing": {"lowercase": True}}
    assert [label.text for label in formed(make_config(named), tokenizer, {}).labels] == ["no", "yes"]


def test_labels_end_with_the_end_of_the_chat_template(make_config: MakeConfig) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    result = formed(make_config(LABEL), tokenizer, {"label": ("no",)}).labels
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert result == (Label("no", (*tokenizer.encode("no"), end)),)


def test_labels_with_the_same_tokens_are_refused(make_config: MakeConfig) -> None:
    tokenizer = wrap(piece_backend(["yes"], pattern=WORD, vocab_size=9), max_length=None, unknown=UNKNOWN)
    assert tokenizer.convert_ids_to_tokens([0]) == [PAD]
    with pytest.raises(
        ModelError, match=r"decoder\.scoring: the labels 'left' and 'right' are the same tokens to this model; rename"
    ):
        formed(make_config(LABEL), tokenizer, {"label": ("yes", "left", "right")})


@pytest.mark.parametrize(
    ("output", "key"),
    [
        ({"name": "value", "type": "json", "decoder": {"constrain": True}}, "decoder.constrain"),
        (LABEL, "decoder.scoring"),
    ],
)
def test_constraints_with_a_model_without_slots_are_reported(
    make_config: MakeConfig, output: dict[str, Any], key: str
) -> None:
    lm = ScriptedModel({})
    options = formed(make_config(output), lm.tokenizer, {"label": ("a", "b")})
    with pytest.raises(ModelError) as caught:
        choose_engine(lm, np.array([3], dtype=np.int32), options=options, max_new_tokens=4)
    assert str(caught.value) == (
        f"{key} needs continuous batching, which is not available here: the answers are scripted; remove {key}"
    )
    assert choose_engine(lm, np.array([3], dtype=np.int32), options=options.unconstrained, max_new_tokens=4) == "static"
