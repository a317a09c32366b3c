"""Building blocks of grammars in the format of llguidance.

The only white space in JSON is an optional space after commas and colons. With free white space, an uncertain model
could write line breaks forever, and training targets contain none.
"""

import json
from collections.abc import Mapping
from typing import Any

SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""The white space rule, as llguidance options."""


def json_rule(rule: str, schema: Mapping[str, Any]) -> str:
    """Return the rule of a JSON value that satisfies a JSON Schema."""
    return f"{rule}: %json {json.dumps({**schema, 'x-guidance': SPACING}, ensure_ascii=False)}"


def quoted(text: str) -> str:
    """Return a text as a string of JSON or of a grammar, which have the same syntax."""
    return json.dumps(text, ensure_ascii=False)
