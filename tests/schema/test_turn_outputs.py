"""Tests of reading the outputs of dialogue turns from the messages of several formats."""

import json
import pickle
from typing import Any

import pytest

from partita_schema.config import Config
from partita_schema.rows import check_rows, row_schema
from partita_schema.turn_outputs import build_turn_outputs

STATE = {"name": "state", "type": "json"}
ACTION = {"name": "action", "type": "category", "decoder": {"labels": ["ask", "tell"]}}
REPLY = {"name": "reply", "type": "text", "column": "content"}
ASKED = {"role": "user", "content": "hello"}
FULL = {"role": "assistant", "content": "where?", "state": {"a": 1}, "action": "ask"}


def config_of(*outputs: dict[str, Any], **dialogue: Any) -> Config:
    return Config.model_validate(
        {
            "base_model": "m",
            "input_features": [{"name": "messages", "type": "dialogue"}],
            "output_features": [*outputs],
            "data": {"dialogue": dialogue},
        }
    )


def loaded(row: dict[str, Any], *outputs: dict[str, Any], supervised: bool = True, **dialogue: Any) -> dict[str, Any]:
    """Return the values of a row; fails with its reasons."""
    checked = check_rows(row_schema(config_of(*outputs, **dialogue), supervised=supervised), [row])
    assert not checked.bad, checked.bad
    return checked.clean[0]


def reason_of(row: dict[str, Any], *outputs: dict[str, Any], supervised: bool = True, **dialogue: Any) -> str:
    [reason] = check_rows(row_schema(config_of(*outputs, **dialogue), supervised=supervised), [row]).bad[0]
    return reason


def test_outputs_are_keys_of_the_message_and_column_content_is_its_text() -> None:
    row = loaded({"messages": [ASKED, FULL]}, STATE, ACTION, REPLY)

    assert (row["state"], row["action"], row["reply"]) == ({"a": 1}, "ask", "where?")


def test_an_output_of_the_user_message_is_that_of_the_answer_after_it() -> None:
    said = [ASKED | {"state": {"a": 1}, "action": "tell"}, {"role": "assistant", "content": "ok", "action": "ask"}]
    row = loaded({"messages": said}, STATE, ACTION, REPLY)

    assert (row["state"], row["action"]) == ({"a": 1}, "ask")
    assert row["messages"]["messages"] == [ASKED]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "where?", "state": {"a": 1}}]},
        {"turns": [{"speaker": "user", "text": "hello", "state": {"a": 1}}, {"speaker": "system", "text": "where?"}]},
        {"episode": [{"text": "hello", "labels": ["where?"], "state": {"a": 1}}]},
        {"instruction": "hello", "output": "where?", "state": {"a": 1}},
        {"prompt": "hello", "completion": "where?", "state": {"a": 1}},
        {"prompt": "hello", "completion": [{"role": "assistant", "content": "where?", "state": '{"a": 1}'}]},
    ],
    ids=["sharegpt", "turns", "parlai", "alpaca", "prompt_completion", "messages of prompt_completion"],
)
def test_outputs_are_read_in_every_format(row: dict[str, Any]) -> None:
    values = loaded(row, STATE, REPLY)

    assert (values["state"], values["reply"]) == ({"a": 1}, "where?")


def test_an_answer_needs_no_text_if_no_output_reads_it() -> None:
    answer = {"role": "assistant", "state": {}, "action": "ask"}
    row = loaded({"messages": [ASKED, answer, ASKED, answer | {"content": None}]}, STATE, ACTION)

    assert row["state"] == {}
    assert [message.get("values") for message in row["messages"]["messages"]] == [
        None,
        {"state": {}, "action": "ask"},
        None,
    ]


def test_a_turn_without_an_output_is_refused_with_its_message() -> None:
    later = [ASKED, {"role": "assistant", "content": "done", "action": "tell"}]

    assert reason_of({"messages": [ASKED, FULL, *later]}, STATE, ACTION, REPLY) == (
        "column messages: message 4 has no state, and neither has the message before it; write it there, or weight: 0 "
        "to leave this turn out of the loss"
    )
    assert "message 2 has no content" in reason_of({"messages": [ASKED, FULL | {"content": ""}]}, STATE, ACTION, REPLY)


def test_a_value_that_does_not_fit_its_output_is_refused_with_its_message() -> None:
    assert reason_of({"messages": [ASKED, FULL | {"action": "sing"}]}, STATE, ACTION, REPLY) == (
        "column messages: message 2: action: 'sing' is none of the labels ask, tell"
    )
    assert reason_of({"messages": [ASKED, FULL | {"state": "{"}]}, STATE, REPLY, ignore_keys=["action"]).startswith(
        "column messages: message 2: state: '{' is not JSON"
    )


def test_a_missing_output_is_filled_if_the_file_says_so() -> None:
    filled = ACTION | {"preprocessing": {"missing_value_strategy": "fill_with_const", "fill_value": "tell"}}
    row = loaded({"messages": [ASKED, {"role": "assistant", "content": "ok", "state": {}}]}, STATE, filled, REPLY)

    assert row["action"] == "tell"


def test_a_text_that_no_output_reads_is_refused_unless_it_is_ignored() -> None:
    row = {"messages": [ASKED, FULL]}

    assert reason_of(row, STATE, ACTION) == (
        "column messages: message 2 has a text, which no output reads; write column: content at an output to learn it, "
        "or data.dialogue: {ignore_keys: [content]} to leave it out of all rows"
    )
    assert loaded(row, STATE, ACTION, ignore_keys=["content"])["action"] == "ask"


def test_a_greeting_needs_no_outputs_and_a_turn_of_weight_0_only_those_that_are_shown() -> None:
    greeting = {"role": "assistant", "content": "welcome"}
    short = {"role": "assistant", "content": "where?", "weight": 0, "action": "ask"}
    said = {"messages": [greeting, ASKED, short, ASKED, FULL]}

    row = loaded(said, STATE, ACTION, REPLY, include_outputs=["action"])

    assert row["messages"]["messages"][0] == {"role": "assistant", "content": "welcome", "train": False}
    assert row["messages"]["messages"][2]["values"] == {"action": "ask"}
    assert "message 3 has no state" in reason_of(said, STATE, ACTION, REPLY)


def test_in_prediction_earlier_answers_need_only_the_outputs_that_are_shown() -> None:
    said = {"messages": [ASKED, {"role": "assistant", "content": "where?"}, ASKED]}

    row = loaded(said, STATE, ACTION, REPLY, supervised=False, include_outputs=["reply"])

    assert row["messages"]["messages"][1]["values"] == {"reply": "where?"}
    assert "message 2 has no state" in reason_of(said, STATE, ACTION, REPLY, supervised=False)


def test_several_right_texts_are_several_right_answers() -> None:
    said = {"messages": [ASKED, FULL | {"labels": ["where?", "which one?"]}]}

    labels = loaded(said, STATE, ACTION, REPLY)["messages"]["labels"]

    assert [label["reply"] for label in labels] == ["where?", "which one?"]
    assert all(label["state"] == {"a": 1} for label in labels)


def test_a_right_answer_of_a_simulation_is_read_by_output() -> None:
    row = {"messages": [ASKED], "labels": ['{"state": {"a": 1}, "action": "ask"}'], "train_all": False}

    assert loaded(row, STATE, ACTION)["state"] == {"a": 1}
    for label, reason in (
        ("ask", "the right answer: the answer is not a JSON object with state, action"),
        ('{"state": {}}', "the right answer: the answer has no action"),
        ('{"state": {}, "action": "sing"}', "the right answer: action: 'sing' is none of the labels ask, tell"),
    ):
        assert reason_of(row | {"labels": [label]}, STATE, ACTION) == f"column messages: {reason}"


def test_a_transcript_line_is_a_row_of_messages() -> None:
    said = {"role": "assistant", "content": "x", "agent": "agent", "values": "{}", "tokens": [1]}
    answers = [said | {"generated": json.dumps({"state": state, "action": "ask"})} for state in ("{}", {"a": 1})]
    messages = [ASKED, answers[0], ASKED, answers[1]]

    row = loaded({"messages": messages}, STATE, ACTION)
    assert row["messages"]["messages"][1]["values"] == {"state": {}, "action": "ask"}
    assert row["state"] == {"a": 1}

    prompt = loaded({"messages": [*messages[:2], ASKED]}, STATE, ACTION, supervised=False)
    assert prompt["messages"]["messages"][1]["generated"] == answers[0]["generated"]


def test_the_outputs_of_a_turn_can_be_pickled_after_use() -> None:
    outputs = build_turn_outputs(config_of(STATE, ACTION))
    assert outputs is not None
    assert outputs.readers

    assert pickle.loads(pickle.dumps(outputs)) == outputs
