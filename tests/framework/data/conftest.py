"""Configurations and tokenizers shared by the tests of the data layer."""

from collections.abc import Callable
from typing import Any

import pytest

from partita.tokenizers.load import byte_tokenizer
from partita_schema.config import Config

QUESTION = {"name": "question", "type": "text"}
ANSWER = {"name": "answer", "type": "text"}
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Config]:
    """Return a configuration with one question and one answer; sections are merged into it."""

    def make(**sections: Any) -> Config:
        given: dict[str, Any] = {
            "base_model": "unused",
            "input_features": [QUESTION],
            "output_features": [ANSWER],
            "trainer": {"type": "finetune"},
        }
        return Config.model_validate(given | sections)

    return make


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Return a tokenizer with one token per byte, an end token and no beginning-of-sequence token."""
    return byte_tokenizer()


@pytest.fixture
def chat_tokenizer() -> Any:
    """Return the same tokenizer with ChatML, whose marks are tokens; its template may be changed."""
    made = byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = CHATML
    return made
