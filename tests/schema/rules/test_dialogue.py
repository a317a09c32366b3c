"""Tests of the rules for configurations with a dialogue."""

import pytest

from partita_schema.dump import resolved_yaml
from partita_schema.errors import ConfigError
from partita_schema.load import load_config

HEAD = "base_model: m\n"
DIALOGUE = HEAD + "input_features: [{name: messages, type: dialogue}]\n"
REPLY = "output_features: [{name: reply, type: text}]\n"
GOOD = DIALOGUE + REPLY


def test_a_dialogue_and_a_reply_are_sufficient() -> None:
    config = load_config(GOOD).config

    assert config.dialogue_input is not None
    assert (config.dialogue_input.source_column, config.data.dialogue.mode) == ("messages", "auto")


def test_a_resolved_configuration_with_a_dialogue_loads_again() -> None:
    loaded = load_config(GOOD + "data: {dialogue: {mode: squash, speakers: {user: 'U: '}}}")

    assert load_config(resolved_yaml(loaded)).config == loaded.config


def test_an_input_without_a_type_is_a_text() -> None:
    config = load_config(HEAD + "input_features: [{name: a}]\n" + REPLY).config

    assert (config.input_features[0].type, config.dialogue_input) == ("text", None)


TEXT = HEAD + "input_features: [{name: a}]\n" + REPLY


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        (
            TEXT + "data: {dialogue: {mode: squash}}",
            "data.dialogue",
            "no input is a dialogue; add {name: messages, type: dialogue} to input_features, or remove it",
        ),
        (
            HEAD + "input_features: [{name: a}, {name: b, type: dialogue}]\n" + REPLY,
            "input_features[0]",
            (
                "another input in addition to 'b', which is the whole prompt; remove it, or make it a message of the "
                "dialogue"
            ),
        ),
        (
            HEAD + "input_features: [{name: a, type: dialogue}, {name: b, type: dialogue}]\n" + REPLY,
            "input_features[1]",
            (
                "a second dialogue in addition to 'a', which is the whole prompt; remove it, or make it a message of "
                "the dialogue"
            ),
        ),
        (
            GOOD + "prompt: {template: 'Q: {messages}'}",
            "prompt.template",
            "template has no place in a dialogue, whose messages are the prompt; remove it, or write system",
        ),
        (
            GOOD + "prompt: {task: Answer.}",
            "prompt.task",
            "task has no place in a dialogue, whose messages are the prompt; remove it, or write system",
        ),
        (
            GOOD + "prompt: {retrieval: {type: random}}",
            "prompt.retrieval",
            "retrieval has no place in a dialogue, whose messages are the prompt; remove it, or put the examples into",
        ),
        (
            GOOD + "data: {formatter: 'a:B'}",
            "data.formatter",
            "a custom formatter takes rows of text; remove it, or write type",
        ),
        (
            GOOD + "data: {dialogue: {mode: packed_dialogue, context_length: 3}}",
            "data.dialogue.context_length",
            "context_length has no effect on mode: packed_dialogue; write mode: squash",
        ),
        (
            GOOD + "data: {dialogue: {mode: packed_dialogue, labels: all}}",
            "data.dialogue.labels",
            "labels: all needs a row for each answer; write mode: squash",
        ),
        (
            GOOD + "data: {dialogue: {context_length: -1}}",
            "data.dialogue.context_length",
            "write an integer of at least 1",
        ),
        (GOOD + "data: {dialogue: {mode: squashed}}", "data.dialogue.mode", "squash"),
        (GOOD + "data: {dialogue: {speakers: {human: 'U: '}}}", "data.dialogue.speakers.human", "unknown key"),
        (
            HEAD + "input_features: [{name: a, type: dialog}]\n" + REPLY,
            "input_features[0].type",
            "did you mean dialogue?",
        ),
        (HEAD + "input_features: [{name: a, typ: dialogue}]\n" + REPLY, "input_features[0].typ", "did you mean type?"),
        (
            HEAD + "input_features: [{name: a, type: dialogue, preprocessing: {lowercase: true}}]\n" + REPLY,
            "input_features[0].preprocessing",
            "preprocessing has no effect with type: dialogue; remove it, it belongs to type: text",
        ),
    ],
)
def test_one_error_gives_one_problem(text: str, path: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text)

    [problem] = caught.value.problems
    assert problem.path == path
    assert says in problem.message


def test_an_error_in_an_input_without_a_type_does_not_hide_others() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(HEAD + "input_features: [{name: a, colum: b}, {name: c, column: 3}]\n" + REPLY + "seed: x\n")

    assert [problem.path for problem in caught.value.problems] == [
        "input_features[0].colum",
        "input_features[1].column",
        "seed",
    ]
