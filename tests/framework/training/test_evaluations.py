"""Tests of the function that evaluates a split during training."""

import re

import pytest

from partita.training.evaluations import Evaluations
from partita_schema.errors import TrainingError


@pytest.mark.parametrize(
    ("split", "hint"),
    [("valdation", "did you mean validation?"), ("dev", "the splits are validation, test")],
)
def test_only_known_splits_are_evaluated(split: str, hint: str) -> None:
    evaluate = Evaluations(None, {}, None)  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=f"^there is no split {split} to evaluate; {re.escape(hint)}$"):
        evaluate(split)
    assert evaluate("validation") == {}


def test_the_training_split_is_refused_and_not_empty() -> None:
    evaluate = Evaluations(None, {}, None)  # type: ignore[arg-type]
    with pytest.raises(TrainingError) as error:
        evaluate("training", generated=False)
    assert str(error.value) == (
        "the training split is not evaluated; evaluate validation or test, or write the file of the training rows to "
        "data.test too"
    )
