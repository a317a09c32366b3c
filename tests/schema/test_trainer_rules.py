"""Values of the trainer section that would have no effect, or no meaning, together."""

from typing import Any

import pytest

from partita_schema.errors import ConfigError
from partita_schema.load import load_config


def problems(**trainer: Any) -> list[str]:
    raw = {
        "base_model": "m",
        "input_features": [{"name": "a", "type": "text"}],
        "output_features": [{"name": "b", "type": "text"}],
        "trainer": {"type": "finetune", **trainer},
    }
    try:
        load_config(raw)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_nesterov_needs_momentum() -> None:
    found = problems(optimizer={"type": "sgd", "nesterov": True})
    assert len(found) == 1
    assert "trainer.optimizer.nesterov: nesterov needs momentum; write momentum: 0.9 beside it" in found[0]
    assert problems(optimizer={"type": "sgd", "nesterov": True, "momentum": 0.9}) == []
    assert problems(optimizer={"type": "muon", "nesterov": True}) == []


@pytest.mark.parametrize("decay", ["none", "constant"])
def test_a_rate_that_never_falls_has_no_least_value(decay: str) -> None:
    found = problems(learning_rate_scheduler={"decay": decay, "min_ratio": 0.1})
    assert len(found) == 1
    assert (
        f"trainer.learning_rate_scheduler.min_ratio: min_ratio has no effect with decay: {decay}; remove it" in found[0]
    )
    assert problems(learning_rate_scheduler={"decay": "cosine", "min_ratio": 0.1}) == []


def test_quantized_weights_are_not_trained_by_anybody() -> None:
    custom = {"type": "custom", "target": "m:C"}
    raw = {
        "base_model": "m",
        "quantization": {"bits": 4},
        "input_features": [{"name": "a", "type": "text"}],
        "output_features": [{"name": "b", "type": "text"}],
    }
    with pytest.raises(ConfigError, match="quantization"):
        load_config({**raw, "trainer": custom})
    assert load_config({**raw, "trainer": {"type": "none"}}).config.trainer.type == "none"
