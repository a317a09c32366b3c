"""Grammars for constrained answers, in the format of llguidance."""

from collections.abc import Mapping, Sequence

from partita_schema.sections.outputs.base import OutputBase
from partita_schema.sections.outputs.grammar_rules import quoted

NO_FORCING = '%llguidance {"no_forcing": true}'
"""Make the model choose forced text token by token too, because tokenizers differ in how they split it."""
LEAD = r"[ \n]{1,2}"
"""Optional white space before an answer, because some tokenizers start every text with a space."""


def answer_grammar(outputs: Sequence[OutputBase], *, labels: Mapping[str, Sequence[str]]) -> str | None:
    """Return the grammar of an answer, or None if no output is constrained.

    One output is its value. Several are one JSON object with the output names as keys, in file order. `labels` maps
    outputs to the labels of the data; a category without labels is a string.
    """
    if not any(output.constrain for output in outputs):
        return None
    alone = len(outputs) == 1
    start = "v0"
    if not alone:
        members = (f"{quoted(quoted(output.name))} COLON v{index}" for index, output in enumerate(outputs))
        start = f'"{{" {" COMMA ".join(members)} "}}"'
    lines = [NO_FORCING, f"start: LEAD? {start}", f"LEAD: /{LEAD}/", "COMMA: /, ?/", "COLON: /: ?/"]
    for index, output in enumerate(outputs):
        lines += output.grammar(f"v{index}", seen=labels.get(output.name, ()), alone=alone)
    return "\n".join(lines)


def grammar_mistake(output: OutputBase) -> str | None:
    """Return why llguidance rejects the grammar of an output, or None if it accepts it."""
    from llguidance import LLMatcher

    grammar = answer_grammar([output], labels={})
    if grammar is None:
        return None
    wrong, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar))
    if not wrong:
        return None
    # The first line has the position in the grammar and then the error; the other lines show the grammar.
    return messages[0].partition("\n")[0].rpartition("JSON schema: ")[2]
