"""Tests of the rules for dialogues whose turns have several outputs."""

from typing import Any

import pytest

from partita_schema.load import load_config

from ..refusals import problems_of

STATE = {"name": "state", "type": "json"}
ACTION = {"name": "action", "type": "category", "decoder": {"labels": ["ask", "tell"]}}
REPLY = {"name": "reply", "type": "text", "column": "content"}


def file_of(*outputs: dict[str, Any], dialogue: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    features = [{"name": "messages", "type": "dialogue"}]
    data = {"data": {"dialogue": dialogue}} if dialogue else {}
    return {"base_model": "m", "input_features": features, "output_features": [*outputs], **data, **sections}


@pytest.mark.parametrize("answers", ["together", "in_sequence"])
def test_a_dialogue_may_have_outputs_of_every_type(answers: str) -> None:
    others = [{"name": "n", "type": "number"}, {"name": "s", "type": "set", "decoder": {"labels": ["a", "b"]}}]
    config = load_config(file_of(STATE, ACTION, REPLY, *others, dialogue={"answers": answers})).config

    assert config.has_turn_outputs
    assert config.answers_in_sequence == (answers == "in_sequence")


def test_a_single_output_of_another_type_than_text_is_a_value_of_the_turn() -> None:
    assert load_config(file_of(STATE)).config.has_turn_outputs
    assert load_config(file_of({"name": "act", "type": "text", "column": "act"})).config.has_turn_outputs
    assert not load_config(file_of(REPLY)).config.has_turn_outputs


def test_a_category_can_be_scored_next_to_others_only_in_sequence() -> None:
    scored = ACTION | {"decoder": {"labels": ["ask", "tell"], "scoring": True}}

    [problem] = problems_of(file_of(STATE, scored))
    assert problem == (
        "output_features[1].decoder.scoring: only the label of a single output is scored; remove it, or write "
        "data.dialogue: {answers: in_sequence}"
    )
    in_sequence = {"answers": "in_sequence"}
    assert not problems_of(file_of(STATE, scored, dialogue=in_sequence, generation={"do_sample": True}))
    assert problems_of(file_of(STATE, scored, dialogue=in_sequence, generation={"num_beams": 2})) == [
        "generation.num_beams: labels cannot be scored with num_beams; remove it, or scoring"
    ]


def test_in_sequence_one_output_can_be_constrained_and_another_one_free() -> None:
    held, free = STATE | {"decoder": {"constrain": True}}, {"name": "more", "type": "json"}

    assert not problems_of(file_of(held, free, dialogue={"answers": "in_sequence"}))
    assert problems_of(file_of(held, free))[0].startswith("output_features[1].decoder.constrain: several outputs are")


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (
            file_of(REPLY, dialogue={"answers": "in_sequence"}),
            "data.dialogue.answers: answers has no effect on a single output; remove it",
        ),
        (
            file_of(STATE, dialogue={"questions": {"state": "?"}}),
            "data.dialogue.questions: questions has no effect on a single output; remove it",
        ),
        (
            file_of(STATE, ACTION, dialogue={"questions": {"action": "?"}}),
            (
                "data.dialogue.questions: one JSON object answers all outputs, without questions between them; write "
                "answers: in_sequence"
            ),
        ),
        (
            file_of(STATE, ACTION, REPLY, dialogue={"answers": "in_sequence", "questions": {"act": "?"}}),
            "data.dialogue.questions.act: no output is named 'act'; write one of action, reply",
        ),
        (
            file_of(STATE, ACTION, dialogue={"answers": "in_sequence", "questions": {"state": "?"}}),
            "data.dialogue.questions.state: the first output answers the dialogue itself; write one of action",
        ),
        (
            file_of(STATE, ACTION, dialogue={"include_outputs": ["act"]}),
            "data.dialogue.include_outputs: no output is named 'act'; write some of state, action",
        ),
        (
            file_of(STATE, ACTION, dialogue={"include_outputs": []}),
            "data.dialogue.include_outputs: it names no output; write include_labels: false to show no answers",
        ),
        (
            file_of(STATE, ACTION, dialogue={"include_outputs": ["action"], "mode": "packed_dialogue"}),
            "data.dialogue.include_outputs: include_outputs has no effect on mode: packed_dialogue; write mode: squash",
        ),
        (
            file_of(STATE, {"name": "role", "type": "text"}),
            (
                "output_features[1].name: the message key role has another meaning; write column: KEY, the key of a "
                "message that holds role, or column: content for a text"
            ),
        ),
        (
            file_of(STATE, {"name": "act", "type": "text", "column": "weight"}),
            (
                "output_features[1].column: the message key weight has another meaning; write column: KEY, the key of "
                "a message that holds act, or column: content for a text"
            ),
        ),
        (
            file_of(STATE, ACTION, dialogue={"answers": "in_sequence"}, backend={"type": "ray", "workers": 1}),
            "data.dialogue.answers: backend: {type: ray} sends one request per turn; write answers: together",
        ),
        (
            file_of(STATE, ACTION, simulation={"world": {"type": "replay"}, "reply": "act"}),
            "simulation.reply: no output is named 'act'; write one of state, action",
        ),
        (
            file_of(REPLY, simulation={"world": {"type": "replay"}, "reply": "reply"}),
            "simulation.reply: reply has no effect on a single output; remove it",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_without_a_use_is_refused(file: dict[str, Any], problem: str) -> None:
    assert problems_of(file) == [problem]
