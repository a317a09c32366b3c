"""Tests of a chat's messages: what fits into the context, and the file that it is saved to."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from partita.serving.conversation import Conversation, Message
from partita_schema.errors import DataError, WriteError

from ...json_lines import read_json_lines, write_json_lines


def encode(messages: Sequence[Message]) -> list[int]:
    """Return one token for each word, and two for each message."""
    return [0 for message in messages for _ in ["<", *message["content"].split(), ">"]]


def chat(num_questions: int, *, system: str | None = None) -> Conversation:
    """Return a chat of questions of two words with answers of one word; the last question has none."""
    conversation = Conversation(system)
    for number in range(num_questions):
        conversation.add_question(f"question {number}")
        conversation.add_answer("answer", is_complete=True)
    conversation.remove_last("assistant")
    return conversation


def test_a_prompt_has_all_messages_that_fit() -> None:
    conversation = chat(3, system="be short")

    prompt = conversation.prompt(encode, context_tokens=30, max_new_tokens=4)

    assert prompt.left_out == 0
    assert len(prompt.input_ids) == 4 + 3 * 4 + 2 * 3
    assert prompt.max_new_tokens == 4


@pytest.mark.parametrize(("context", "left_out"), [(26, 0), (25, 2), (19, 2), (18, 4), (11, 4)])
def test_the_oldest_questions_are_left_out_with_their_answers(context: int, left_out: int) -> None:
    prompt = chat(3, system="be short").prompt(encode, context_tokens=context, max_new_tokens=4)

    assert prompt.left_out == left_out
    assert len(prompt.input_ids) == 22 - 7 * left_out // 2
    assert prompt.max_new_tokens == min(4, context - len(prompt.input_ids))


def test_half_of_the_context_is_for_the_prompt_if_answers_may_be_longer() -> None:
    prompt = chat(3).prompt(encode, context_tokens=24, max_new_tokens=1000)

    assert (prompt.left_out, len(prompt.input_ids), prompt.max_new_tokens) == (2, 11, 13)


def test_messages_that_were_left_out_stay_out_until_the_chat_is_new() -> None:
    conversation = chat(3)
    conversation.prompt(encode, context_tokens=15, max_new_tokens=4)
    assert conversation.prompt(encode, context_tokens=100, max_new_tokens=4).left_out == 2

    conversation.reset()
    conversation.add_question("question")

    assert conversation.prompt(encode, context_tokens=100, max_new_tokens=4).left_out == 0


def test_a_question_that_is_too_long_alone_is_an_error() -> None:
    conversation = chat(2, system="be short")

    with pytest.raises(DataError) as caught:
        conversation.prompt(encode, context_tokens=8, max_new_tokens=4)

    expected = "the message has 8 tokens with the system prompt and the chat template, and the context holds 8 tokens "
    assert str(caught.value) == expected + "with the answer; write a shorter message"
    assert conversation.left_out == 0
    assert conversation.prompt(encode, context_tokens=9, max_new_tokens=4).max_new_tokens == 1


def test_the_last_message_is_removed_only_if_it_has_the_role() -> None:
    conversation = chat(2)
    assert conversation.remove_last("assistant") is None
    assert conversation.remove_last("user") == {"role": "user", "content": "question 1"}
    assert conversation.remove_last("assistant") == {"role": "assistant", "content": "answer"}
    assert len(conversation.messages) == 1


def test_a_saved_chat_has_the_system_prompt_and_a_weight_for_incomplete_answers(tmp_path: Path) -> None:
    conversation = Conversation("be short")
    conversation.add_question("what is é?")
    conversation.add_answer("a let", is_complete=False)
    conversation.add_question("and b?")
    conversation.add_answer("a letter", is_complete=True)
    file = tmp_path / "chats.jsonl"

    message = conversation.save(file)

    assert message == f"saved 4 messages to {file}, which has 1 chat; 1 incomplete answer with weight 0"
    assert read_json_lines(file) == [
        {
            "messages": [
                {"role": "system", "content": "be short"},
                {"role": "user", "content": "what is é?"},
                {"role": "assistant", "content": "a let", "weight": 0},
                {"role": "user", "content": "and b?"},
                {"role": "assistant", "content": "a letter"},
            ]
        }
    ]


def test_saving_again_replaces_the_line_of_the_chat_and_keeps_all_others(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    other = {"messages": [{"role": "user", "content": "other"}]}
    file.write_text(json.dumps(other), encoding="utf8")  # without the end of the line
    conversation = chat(2)
    conversation.save(file)
    conversation.add_answer("new", is_complete=True)

    assert conversation.save(file) == f"saved 4 messages to {file}, which has 2 chats"
    assert read_json_lines(file) == [other, {"messages": conversation.messages}]

    write_json_lines(file, [*read_json_lines(file), other])  # another program appends a chat
    assert conversation.save(file).endswith("which has 4 chats")
    assert read_json_lines(file)[1:3] == [{"messages": conversation.messages}, other]


def test_the_next_chat_is_a_line_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    conversation = chat(2)
    conversation.save(file)
    conversation.reset()
    conversation.add_question("question 0")
    conversation.add_answer("answer", is_complete=True)

    conversation.save(file)

    assert [len(row["messages"]) for row in read_json_lines(file)] == [3, 2]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", '{"review": "good"}\n', "[1]\n", "\xff\n"])
def test_a_file_of_something_else_is_not_changed(text: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(text.encode("latin1"))

    with pytest.raises(DataError, match=r"its first line is .*; write the name of another file"):
        chat(2).save(file)

    assert file.read_bytes() == text.encode("latin1")


def test_what_cannot_be_saved_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no answer to save yet; write a message first"):
        chat(1).save(tmp_path / "chat.jsonl")
    with pytest.raises(DataError, match=r"run.yaml: a chat is saved as JSON lines; write a name that ends in .jsonl"):
        chat(2).save(tmp_path / "run.yaml")
    with pytest.raises(WriteError, match=r"chat.jsonl cannot be written: No such file or directory; "):
        chat(2).save(tmp_path / "none" / "chat.jsonl")
    assert list(tmp_path.iterdir()) == []
