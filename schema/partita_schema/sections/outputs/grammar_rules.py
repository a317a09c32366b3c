"""Building blocks of grammars in the format of llguidance.

The only white space in JSON is an optional space after commas and colons. With free white space, an uncertain model
could write line breaks forever, and training targets contain none.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""The white space rule, as llguidance options."""

NO_FORCING = '%llguidance {"no_forcing": true}'
"""Make the model choose forced text token by token too, because tokenizers differ in how they split it."""
LEAD = r"[ \n]{1,2}"
"""Optional white space before an answer, because some tokenizers start every text with a space."""


def whole_grammar(start: str, rules: Iterable[str], *, lead: bool = True) -> str:
    """Return the grammar of an answer.

    Args:
        start: What an answer is, in terms of the rules.
        rules: The rules, each with its name.
        lead: Whether white space may precede the answer.
    """
    first = [f"start: LEAD? {start}", f"LEAD: /{LEAD}/"] if lead else [f"start: {start}"]
    return "\n".join((NO_FORCING, *first, *rules))


def mistake_in(grammar: str) -> str | None:
    """Return why llguidance rejects a grammar, or None if it accepts it."""
    from llguidance import LLMatcher

    wrong, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar))
    if not wrong:
        return None
    # The first line has the position in the grammar and then the error; the other lines show the grammar.
    return str(messages[0].partition("\n")[0].rpartition("JSON schema: ")[2])


def json_rule(rule: str, schema: Mapping[str, Any]) -> str:
    """Return the rule of a JSON value that satisfies a JSON Schema."""
    return f"{rule}: %json {json.dumps({**schema, 'x-guidance': SPACING}, ensure_ascii=False)}"


def quoted(text: str) -> str:
    """Return a text as a string of JSON or of a grammar, which have the same syntax."""
    return json.dumps(text, ensure_ascii=False)
