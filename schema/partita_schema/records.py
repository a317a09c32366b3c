"""Records that the program writes and reads: the manifest of a run.

Plain dictionaries pass through marshmallow schemas when written and read. Unknown keys, written by a newer version, are
preserved. Loading raises marshmallow's ValidationError with reasons by key.
"""

from collections.abc import Mapping
from typing import Any

from marshmallow import INCLUDE, Schema, fields, post_dump, validate

FORMAT_VERSION = 1
"""Version of the manifest format. Raise it when older programs cannot read the new format."""


class Record(Schema):
    """A record that preserves unknown keys when loaded and dumped."""

    class Meta:
        unknown = INCLUDE

    @post_dump(pass_original=True)
    def keep_unknown(self, data: dict[str, Any], original: Mapping[str, Any], **_: Any) -> dict[str, Any]:
        """Copy unknown keys to the output, because marshmallow dumps declared keys only."""
        return {**data, **{key: value for key, value in original.items() if key not in self.fields}}


class BatchSizeRecord(Record):
    """A batch size that was used, and how it was chosen."""

    rows = fields.Integer(required=True, strict=True, validate=validate.Range(min=1))
    origin = fields.String(required=True, validate=validate.OneOf(("file", "max_tokens", "tuned", "cached", "default")))
    device = fields.String(allow_none=True)
    max_tokens = fields.Integer(allow_none=True)
    max_fitting = fields.Integer(allow_none=True, strict=True, validate=validate.Range(min=0))
    best = fields.Integer(allow_none=True, strict=True, validate=validate.Range(min=1))
    probes = fields.List(fields.Dict(keys=fields.String()))
    throughputs = fields.List(fields.Tuple((fields.Integer(strict=True), fields.Float())))
    out_of_memory = fields.Boolean(allow_none=True)
    prompt_tokens = fields.Integer(allow_none=True)
    new_tokens = fields.Integer(allow_none=True)
    budget_bytes = fields.Integer(allow_none=True)
    seconds = fields.Float(allow_none=True, validate=validate.Range(min=0))


class ManifestRecord(Record):
    """The `manifest.json` of a run."""

    format_version = fields.Integer(required=True, strict=True, validate=validate.Range(min=1, max=FORMAT_VERSION))
    status = fields.String(required=True, validate=validate.OneOf(("running", "done", "interrupted", "failed")))
    versions = fields.Dict(keys=fields.String(), values=fields.String(allow_none=True))
    device = fields.String(allow_none=True)
    seed = fields.Integer(validate=validate.Range(min=0))
    data = fields.Dict(keys=fields.String())
    batch_sizes = fields.Dict(keys=fields.String(), values=fields.Nested(BatchSizeRecord))
    batches = fields.Dict(keys=fields.String(), values=fields.Float())
    token_cache = fields.Dict(keys=fields.String(), values=fields.Dict(keys=fields.String()))
    metrics = fields.Dict(
        keys=fields.String(), values=fields.Dict(keys=fields.String(), values=fields.Raw(allow_none=True))
    )
    metrics_base = fields.Dict(
        keys=fields.String(), values=fields.Dict(keys=fields.String(), values=fields.Raw(allow_none=True))
    )
    lengths = fields.Dict(
        keys=fields.String(), values=fields.Dict(keys=fields.String(), values=fields.List(fields.Integer()))
    )
    cost = fields.Dict(keys=fields.String(), values=fields.Float())
    command = fields.String(allow_none=True)
    code = fields.Dict(keys=fields.String(), values=fields.String())
    resumed = fields.List(fields.Integer())
    steps = fields.Integer(validate=validate.Range(min=0))
    earlier_evaluations = fields.Integer(validate=validate.Range(min=0))
    stopped_early = fields.Boolean()
    config = fields.Dict(keys=fields.String())
    folder = fields.String()
    initial_config = fields.Dict(keys=fields.String())
    initial_weights = fields.Dict(keys=fields.String(), values=fields.String())
    labels = fields.Dict(keys=fields.String(), values=fields.List(fields.String()))
    number_format = fields.Dict(keys=fields.String())
    model = fields.String(allow_none=True)
    error = fields.String(allow_none=True)
    created = fields.String()
