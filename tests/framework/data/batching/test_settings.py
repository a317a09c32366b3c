"""Tests of the batch settings: their names in the fingerprint of a run."""

from typing import Any

from partita.data.batching.settings import BatchSettings
from partita_schema.sections.batching import BucketBatching, TokenBudgetBatching


def test_settings_are_named_like_the_configuration_keys() -> None:
    numbers: Any = {"batch_size": 4, "batches_per_step": 2, "seed": 5}

    assert BatchSettings(batching=BucketBatching(type="bucket", window=99), **numbers).fingerprint_inputs() == {
        "batching": "bucket",
        "batching.window": "99",
        "batching.noise": "0.0",
        "batching.longest_first": "False",
        "batching.length_spread": "None",
        "batching.drop_last": "False",
        "batch size": "4",
        "batches a step": "2",
        "seed": "5",
    }
    budget = BatchSettings(batching=TokenBudgetBatching(type="token_budget"), max_tokens=512, **numbers)
    assert budget.fingerprint_inputs()["batching.max_tokens"] == "512"
    assert "batch size" not in budget.fingerprint_inputs()
