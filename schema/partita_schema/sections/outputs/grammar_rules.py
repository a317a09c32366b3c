"""Building blocks of grammars in the format of llguidance.

The only white space in JSON is an optional space after commas and colons. With free white space, an uncertain model
could write line breaks forever, and training targets contain none.
"""

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""The white space rule, as llguidance options."""

NO_FORCING = '%llguidance {"no_forcing": true}'
"""Make the model choose forced text token by token too, because tokenizers differ in how they split it."""
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
JSON = "%json "
"""What stands before a JSON Schema in a rule."""
START = "start:"
"""Beginning of the first rule of a grammar."""
LEAD = r"[ \n]{1,2}"
"""Optional white space before an answer, because some tokenizers start every text with a space."""


def whole_grammar(start: str, rules: Iterable[str], *, lead: bool = True) -> str:
    """Return the grammar of an answer.

    Args:
        start: What an answer is, in terms of the rules.
        rules: The rules, each with its name.
        lead: Whether white space may precede the answer.
    """
    first = [f"{START} LEAD? {start}", f"LEAD: /{LEAD}/"] if lead else [f"{START} {start}"]
    return "\n".join((NO_FORCING, *first, *rules))


@lru_cache(maxsize=64)
def mistake_in(grammar: str) -> str | None:
    """Return why answers cannot follow a grammar, or None if they can."""
    from llguidance import LLMatcher, LLTokenizer

    for line in grammar.splitlines():
        _, is_schema, text = line.partition(JSON)
        if is_schema and (limit := limit_outside(json.loads(text))):
            return limit
    compiled = LLMatcher.grammar_from_lark(grammar)
    wrong, messages = LLMatcher.validate_grammar_with_warnings(compiled)
    if wrong:
        # The first line has the position in the grammar and then the error; the other lines show the grammar. Of a
        # regular expression, the last line with `error: ` has the reason.
        reason = str(messages[0].partition("\n")[0].rpartition("JSON schema: ")[2])
        details = [line for line in messages[0].splitlines() if line.startswith("error: ")]
        return f"{reason} {details[-1].removeprefix('error: ')}" if reason.endswith(":") and details else reason
    # White space before an answer fits even if no answer does.
    without_lead = LLMatcher.grammar_from_lark(grammar.replace(f"{START} LEAD? ", f"{START} ", 1))
    matcher = LLMatcher(LLTokenizer("byte"), without_lead, log_level=0)
    matcher.compute_bitmask()
    return "no text fits it" if matcher.is_error() else None


def limit_outside(schema: object) -> str | None:
    """Return a limit in a JSON Schema that is no 64-bit integer, which llguidance would replace; None without one."""
    if isinstance(schema, list):
        return next(filter(None, map(limit_outside, schema)), None)
    if not isinstance(schema, dict):
        return None
    for key in LIMITS:
        value = schema.get(key)
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return f"{key} {value} is no 64-bit integer"
    return next(filter(None, map(limit_outside, schema.values())), None)


def json_rule(rule: str, schema: Mapping[str, Any]) -> str:
    """Return the rule of a JSON value that satisfies a JSON Schema."""
    return f"{rule}: {JSON}{json.dumps({**schema, 'x-guidance': SPACING}, ensure_ascii=False)}"


def quoted(text: str) -> str:
    """Return a text as a string of JSON or of a grammar, which have the same syntax."""
    return json.dumps(text, ensure_ascii=False)
