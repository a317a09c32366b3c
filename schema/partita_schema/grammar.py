"""What an answer may be, as a grammar that llguidance understands.

JSON has no white space but a space behind commas and colons, if the model likes one: an uncertain model could write
line breaks for ever, and answers are learned without them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from partita_schema.features import CategoryOutput, JsonOutput, NumberOutput, OutputFeature

SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""How llguidance is told so."""
NO_FORCING = '%llguidance {"no_forcing": true}'
"""Text that can be no other is chosen token by token as well: tokenizers differ in how they would cut a piece of it."""
LEAD = r"[ \n]{1,2}"
"""White space before an answer: some tokenizers begin every text with a space."""


def answer_grammar(outputs: Sequence[OutputFeature], *, labels: Mapping[str, Sequence[str]]) -> str | None:
    """What the answer to a prompt may be; None where no output is constrained.

    One output is a JSON value. Several are one object with their names as keys, in the order of the file. `labels` are
    those of categories; without any, a category is a text.
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
    """The JSON Schema of an answer that is one output."""
    schema = output.decoder.json_schema if isinstance(output, JsonOutput) else None
    return {"type": "object"} if schema is None else schema


def member(output: OutputFeature, *, labels: Sequence[str]) -> dict[str, Any]:
    """The JSON Schema of an output among others."""
    if isinstance(output, JsonOutput):
        return output.decoder.json_schema or {}
    if isinstance(output, NumberOutput):
        limits = {"minimum": output.decoder.minimum, "maximum": output.decoder.maximum}
        return {"type": "number"} | {name: limit for name, limit in limits.items() if limit is not None}
    # Where rules find a label, any text may hold it.
    if isinstance(output, CategoryOutput) and labels and not output.decoder.match:
        lower = output.preprocessing.lowercase
        return {"enum": list(dict.fromkeys(label.lower() if lower else label for label in labels))}
    return {"type": "string"}


def written(schema: Mapping[str, Any]) -> str:
    """A JSON Schema with what llguidance is told beside it."""
    return json.dumps({**schema, "x-guidance": SPACING}, ensure_ascii=False)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def grammar_mistake(output: JsonOutput) -> str | None:
    """Why llguidance does not take the JSON Schema of an output; None where it does."""
    from llguidance import LLMatcher

    grammar = answer_grammar([output], labels={})
    if grammar is None:
        return None
    wrong, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar))
    if not wrong:
        return None
    # The first line tells the mistake, behind its place in the grammar; the others show the grammar.
    return messages[0].partition("\n")[0].rpartition("JSON schema: ")[2]
