"""Tests of the rules for names of outputs and for what a prompt shows."""

from typing import Any

import pytest

from ..refusals import problems_of

TEXT = {"name": "message", "type": "text"}


def raw(*outputs: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {"base_model": "m", "input_features": [TEXT], "output_features": list(outputs), **sections}


@pytest.mark.parametrize("name", ["key", "status", "error", "finish_reason", "tokens", "logprob", "reward", "samples"])
def test_an_output_has_no_name_of_a_column_that_predictions_have(name: str) -> None:
    message = (
        f"output_features[0].name: predictions have a column {name} of their own; write another name, and column: "
    )
    assert problems_of(raw({"name": name, "type": "text"})) == [message + name]
    assert problems_of(raw({"name": name, "type": "text", "column": "other"})) == [message + "other"]
    assert problems_of(raw({"name": f"{name}_2", "type": "text", "column": name})) == []


def test_an_output_has_not_the_name_of_the_metrics_of_the_model() -> None:
    message = "the loss and other metrics of the whole model are named model; write another name, and column: model"
    assert problems_of(raw({"name": "model", "type": "text"})) == [f"output_features[0].name: {message}"]


@pytest.mark.parametrize("ending", ["raw", "probability", "probabilities", "spans", "score", "rejected_score"])
def test_an_output_has_no_name_of_a_column_of_another_output(ending: str) -> None:
    both = [{"name": "team", "type": "text"}, {"name": f"team_{ending}", "type": "text"}]
    name = f"team_{ending}"
    message = f"predictions of team have a column {name}; write another name, and column: {name}"
    assert problems_of(raw(*both)) == [f"output_features[1].name: {message}"]
    assert problems_of(raw(both[1])) == []


def test_a_template_shows_something_of_a_row() -> None:
    output = {"name": "team", "type": "text"}
    message = "prompt.template: the template shows no input, so all prompts would be equal; add {message}"
    assert problems_of(raw(output, prompt={"template": "hi"})) == [message]
    assert problems_of(raw(output, prompt={"template": "{__task__}", "task": "Answer."})) == [message]
    assert problems_of(raw(output, prompt={"template": "Message: {{message}}"})) == [
        f"{message}; {{{{message}}}} means literal braces"
    ]
    for template in ("{message}", "{__sample__}", "{another_column}", "{{message}}: {message}"):
        assert problems_of(raw(output, prompt={"template": template})) == [], template
