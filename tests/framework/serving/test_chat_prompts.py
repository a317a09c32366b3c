"""Tests of prompts of chats: they are those of the rows of the file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partita import Model
from partita.serving.chat_prompts import ChatPrompts
from partita.tokenizers.load import read_tokenizer
from partita_schema.errors import RowError
from partita_schema.rows import row_schema
from partita_trainers.checkpoints.file_sums import FILE as SUMS

from ...json_lines import write_json_lines
from .chat_model import TEMPLATE, chat_config

GREETING = {"role": "assistant", "content": "hello"}
ASKED = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}, {"role": "user", "content": "x"}]


@pytest.fixture(params=[None, TEMPLATE], ids=["speakers", "template"])
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    rows = tmp_path / "rows.jsonl"
    write_json_lines(rows, [{"messages": ASKED[:2]}])
    data = {"source": str(rows), "dialogue": {"mode": "packed_dialogue"}}
    base = Model(chat_config(data=data), quiet=True).save(tmp_path / "model")
    tokenizer = read_tokenizer(str(base))
    tokenizer.chat_template = request.param
    tokenizer.save_pretrained(base)
    (base / SUMS).unlink()
    return Model(chat_config(base_model=str(base), data=data), quiet=True)._backend.pipeline()


@pytest.mark.parametrize(
    "messages", [ASKED, [GREETING, *ASKED], [{"role": "system", "content": "s"}, GREETING, *ASKED]]
)
def test_a_chat_has_the_prompt_of_a_row_with_its_messages(messages: list[dict[str, Any]], pipeline: Any) -> None:
    row = row_schema(pipeline.config, supervised=False).load({"messages": messages})
    [prompt] = pipeline.row_tokenizer.encode_prompts([row], [""])
    assert prompt.error is None
    assert ChatPrompts(pipeline).encode(messages) == list(prompt.input_ids)


def test_keys_that_the_file_ignores_are_ignored_in_a_chat(pipeline: Any) -> None:
    asked = [*ASKED[:2], {"role": "user", "content": "x", "mood": "good"}]
    with pytest.raises(RowError, match="message 3 has mood, which is not read"):
        ChatPrompts(pipeline).encode(asked)
    config = pipeline.config
    dialogue = config.data.dialogue.model_copy(update={"ignore_keys": ("mood",)})
    data = config.data.model_copy(update={"dialogue": dialogue})
    ignoring = replace(pipeline, config=config.model_copy(update={"data": data}))
    assert ChatPrompts(ignoring).encode(asked) == ChatPrompts(pipeline).encode(ASKED)


def test_a_chat_without_a_question_is_refused(pipeline: Any) -> None:
    with pytest.raises(RowError, match="there is no question: no message has the role user"):
        ChatPrompts(pipeline).encode([GREETING])


def test_blank_messages_of_a_running_chat_are_prompts(pipeline: Any) -> None:
    prompts = ChatPrompts(pipeline)
    blank = [{"role": "system", "content": " "}, *ASKED]
    assert prompts.encode(blank) == prompts.encode(ASKED), "as of a client whose user has written no system prompt"
    decode = pipeline.lm.tokenizer.decode
    for content in ("", "\n", None, [], [{"type": "text", "text": ""}, {"type": "text", "text": " "}]):
        silent = [ASKED[0], {"role": "assistant", "content": content}, ASKED[2]]
        assert decode(prompts.encode(silent)) == decode(prompts.encode(ASKED)).replace("blue", "")
    asked = decode(prompts.encode([*ASKED[:2], {"role": "user", "content": "  "}]))
    assert asked == decode(prompts.encode(ASKED)).replace("x", "")
    parts = [{"type": "text", "text": "  "}]
    assert decode(prompts.encode([*ASKED[:2], {"role": "user", "content": parts}])) == asked
    with pytest.raises(RowError, match="message 1: content is missing"):
        prompts.encode([{"role": "user", "content": None}])
