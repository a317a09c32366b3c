"""Tests of written records: validated when they are read, with keys of newer versions preserved."""

import json

import pytest
from marshmallow import ValidationError

from partita_schema.records import BatchSizeRecord, ManifestRecord
from partita_trainers.batch_size.probe import BatchSize, ProbeResult

TUNED = {
    "rows": 24,
    "origin": "tuned",
    "device": "cpu",
    "max_fitting": 148,
    "best": 24,
    "probes": [{"rows": 1, "verdict": "fits", "used_bytes": 7_680_000, "decode_seconds": None}],
    "throughputs": [[1, 3.5], [24, 31.0]],
    "out_of_memory": False,
    "prompt_tokens": 461,
    "new_tokens": 32,
    "budget_bytes": 3_100_000_000,
    "seconds": 1.25,
}

MANIFEST = {
    "format_version": 1,
    "status": "running",
    "versions": {"torch": "2.13.0"},
    "seed": 42,
    "batch_sizes": {"training": {"rows": 8, "origin": "file", "of_a_newer_version": [1]}, "generation": TUNED},
    "metrics": {"test": {"loss": 1.5}},
    "of_a_newer_version": {"a": 1},
}


def test_unknown_keys_survive_a_round_trip_at_every_level() -> None:
    schema = ManifestRecord()
    # Compared as JSON, because pairs are tuples in Python.
    assert json.loads(json.dumps(schema.dump(schema.load(MANIFEST)))) == MANIFEST


def test_a_batch_size_in_a_manifest_is_written_unchanged() -> None:
    probes = (
        ProbeResult(1, "fits", 7_680_000, 8_000_000, 0.25, 0.0125, 3.5, 0.5),
        ProbeResult(512, "out of memory", None, None),
    )
    result = BatchSize(
        24,
        "tuned",
        "cpu",
        max_fitting=148,
        best=24,
        probes=probes,
        throughputs=((1, 3.5), (24, 31.0)),
        out_of_memory=True,
    )
    record = json.loads(json.dumps(result.record()))
    assert json.loads(json.dumps(BatchSizeRecord().dump(BatchSizeRecord().load(record)))) == record


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"status": "asleep"}, "status"),
        ({"format_version": 2}, "format_version"),
        ({"batch_sizes": {"a": {}}}, "batch_sizes"),
        ({"batch_sizes": {"a": {**TUNED, "origin": "guessed"}}}, "batch_sizes"),
        ({"batch_sizes": {"a": {**TUNED, "rows": 0}}}, "batch_sizes"),
        ({"batch_sizes": {"a": {**TUNED, "throughputs": [[1]]}}}, "batch_sizes"),
    ],
)
def test_an_invalid_manifest_is_refused_with_the_key(change: dict[str, object], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ManifestRecord().load({**MANIFEST, **change})
    assert list(caught.value.messages_dict) == [key]
