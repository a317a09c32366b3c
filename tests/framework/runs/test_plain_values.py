"""Tests of the values that users record in a run."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from partita.runs.plain_values import plain_values
from partita_schema.errors import ConfigError


def test_numbers_of_numpy_and_torch_become_python_numbers_at_any_depth() -> None:
    values = {
        "loss": np.float32(0.5),
        "rows": np.int64(3),
        "best": np.bool_(True),
        "norm": torch.tensor(1.5),
        "zero": np.array(2.0),
        "by label": {"yes": torch.tensor(1), "all": [np.float64(0.25), None, "text", False]},
    }
    plain = plain_values(values, method="run.note")
    assert json.loads(json.dumps(plain)) == {
        "loss": 0.5,
        "rows": 3,
        "best": True,
        "norm": 1.5,
        "zero": 2.0,
        "by label": {"yes": 1, "all": [0.25, None, "text", False]},
    }


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"loss": {1}}, "{1} as loss"),
        ({"loss": np.array([1.0, 2.0])}, "array([1., 2.]) as loss"),
        ({"by label": {"yes": [0, 1j]}}, "1j as by label.yes[1]"),
    ],
)
def test_other_values_are_named_with_their_place(values: dict[str, Any], where: str) -> None:
    message = (
        f"trainer.target: run.report got {where}, which cannot be written as JSON; write a number, a text, a list or a "
        "dictionary"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        plain_values(values, method="run.report")
