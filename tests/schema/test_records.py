"""Records that the program writes: checked on the way in, and open to keys of newer versions."""

import pytest
from marshmallow import ValidationError

from partita_schema.records import ManifestRecord

MANIFEST = {
    "format_version": 1,
    "status": "running",
    "versions": {"torch": "2.13.0"},
    "seed": 42,
    "batch_sizes": {"training": {"rows": 8, "origin": "file", "of_a_newer_version": [1]}},
    "metrics": {"test": {"loss": 1.5}},
    "of_a_newer_version": {"a": 1},
}


def test_unknown_keys_survive_a_round_trip_at_every_level() -> None:
    schema = ManifestRecord()
    assert schema.dump(schema.load(MANIFEST)) == MANIFEST


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"status": "asleep"}, "status"),
        ({"format_version": 2}, "format_version"),
        ({"batch_sizes": {"a": {}}}, "batch_sizes"),
    ],
)
def test_a_wrong_manifest_is_refused_by_key(change: dict[str, object], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ManifestRecord().load({**MANIFEST, **change})
    assert list(caught.value.messages_dict) == [key]
