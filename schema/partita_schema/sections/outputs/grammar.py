"""Grammars for constrained answers, in the format of llguidance."""

from collections.abc import Mapping, Sequence

from partita_schema.sections.outputs.base import OutputBase
from partita_schema.sections.outputs.grammar_rules import mistake_in, quoted, whole_grammar


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
    rules = ["COMMA: /, ?/", "COLON: /: ?/"]
    for index, output in enumerate(outputs):
        rules += output.grammar(f"v{index}", seen=labels.get(output.name, ()), alone=alone)
    return whole_grammar(start, rules)


def grammar_mistake(output: OutputBase) -> str | None:
    """Return why answers cannot follow the grammar of an output, or None if they can."""
    grammar = answer_grammar([output], labels={})
    return mistake_in(grammar) if grammar is not None else None
