"""Tests of labels in the file that no row and no answer would have."""

from typing import Any

import pytest

from ..refusals import problems_of

PADDED = "the label 'b ' begins or ends with a space, which is removed in rows and answers; write 'b'"
BLANK = "a label is blank; remove it"


def problems_of_output(kind: str, **sections: Any) -> list[str]:
    """Return the problems of an output without the place of the output."""
    output = {"name": "label", "type": kind, **sections}
    problems = problems_of({"base_model": "m", "input_features": [{"name": "q"}], "output_features": [output]})
    return [problem.removeprefix("output_features[0].") for problem in problems]


@pytest.mark.parametrize("kind", ["category", "tags"])
@pytest.mark.parametrize(("label", "problem"), [("b ", PADDED), (" ", BLANK)])
def test_labels_with_spaces_around_are_refused(kind: str, label: str, problem: str) -> None:
    assert problems_of_output(kind, decoder={"labels": ["a", label]}) == [f"decoder.labels: {problem}"]
    assert problems_of_output(kind, decoder={"labels": ["a", "b c"]}) == []


@pytest.mark.parametrize(
    ("section", "keys", "at"),
    [
        ("decoder", {"match": {"a": {"value": "x"}, "b ": {"value": " y "}}}, "decoder.match"),
        ("decoder", {"fallback_label": "b "}, "decoder.fallback_label"),
        ("preprocessing", {"vocab": ["a", "b "]}, "preprocessing.vocab"),
        ("preprocessing", {"fallback_label": "b "}, "preprocessing.fallback_label"),
    ],
)
def test_labels_of_a_category_with_spaces_around_are_refused(section: str, keys: dict[str, Any], at: str) -> None:
    assert problems_of_output("category", **{section: keys}) == [f"{at}: {PADDED}"]
