"""Grammars for constrained answers, in the format of llguidance.

The only white space in the JSON is an optional space after commas and colons. With free white space, an uncertain model
could write line breaks forever, and training targets contain none.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from partita_schema.features import CategoryOutput, JsonOutput, NumberOutput, OutputFeature

SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""The white space rule, as llguidance options."""
NO_FORCING = '%llguidance {"no_forcing": true}'
"""Make the model choose forced text token by token too, because tokenizers differ in how they split it."""
LEAD = r"[ \n]{1,2}"
"""Optional white space before an answer, because some tokenizers start every text with a space."""


def answer_grammar(outputs: Sequence[OutputFeature], *, labels: Mapping[str, Sequence[str]]) -> str | None:
    """Return the grammar of an answer, or None if no output is constrained.

    One output is a JSON value. Several are one object with the output names as keys, in file order. `labels` maps
    category outputs to their labels; a category without labels is a string.
    """
    if not any(isinstance(output, JsonOutput) and output.decoder.constrain for output in outputs):
        return None
    if len(outputs) == 1:
        start, kinds = "v0", [sole_value(outputs[0])]
    else:
        kinds = [member(output, labels=labels.get(output.name, ())) for output in outputs]
        members = (f"{quoted(quoted(output.name))} COLON v{place}" for place, output in enumerate(outputs))
        start = f'"{{" {" COMMA ".join(members)} "}}"'
    lines = [NO_FORCING, f"start: LEAD? {start}", f"LEAD: /{LEAD}/", "COMMA: /, ?/", "COLON: /: ?/"]
    return "\n".join([*lines, *(f"v{place}: %json {written(kind)}" for place, kind in enumerate(kinds))])


def sole_value(output: OutputFeature) -> dict[str, Any]:
    """Return the JSON Schema of an answer with a single output."""
    schema = output.decoder.json_schema if isinstance(output, JsonOutput) else None
    return {"type": "object"} if schema is None else schema


def member(output: OutputFeature, *, labels: Sequence[str]) -> dict[str, Any]:
    """Return the JSON Schema of one output among several."""
    if isinstance(output, JsonOutput):
        return output.decoder.json_schema or {}
    if isinstance(output, NumberOutput):
        limits = {"minimum": output.decoder.minimum, "maximum": output.decoder.maximum}
        return {"type": "number"} | {name: limit for name, limit in limits.items() if limit is not None}
    # With match rules, any text may contain a label.
    if isinstance(output, CategoryOutput) and labels and not output.decoder.match:
        lower = output.preprocessing.lowercase
        return {"enum": list(dict.fromkeys(label.lower() if lower else label for label in labels))}
    return {"type": "string"}


def written(schema: Mapping[str, Any]) -> str:
    """Return a JSON Schema as text, with the llguidance options added."""
    return json.dumps({**schema, "x-guidance": SPACING}, ensure_ascii=False)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def grammar_mistake(output: JsonOutput) -> str | None:
    """Return why llguidance rejects the JSON Schema of an output, or None if it accepts it."""
    from llguidance import LLMatcher

    grammar = answer_grammar([output], labels={})
    if grammar is None:
        return None
    wrong, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar))
    if not wrong:
        return None
    # The first line has the position in the grammar and then the error; the other lines show the grammar.
    return messages[0].partition("\n")[0].rpartition("JSON schema: ")[2]
