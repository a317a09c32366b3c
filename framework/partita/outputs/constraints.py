"""Constraints on answers: a grammar, or labels to score."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from partita.lm.base import Constraint, GenerationOptions, Label
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.sections.outputs import OutputFeature
from partita_schema.sections.outputs.grammar import answer_grammar


class AnswerTokenizer(Protocol):
    """Tokenizes answers."""

    def answer_ids(self, answer: str) -> tuple[int, ...]:
        """Return the tokens of an answer as it is trained after a prompt, with what a chat template adds after it."""


def with_constraints(
    options: GenerationOptions, config: Config, *, labels: Mapping[str, Sequence[str]], row_tokenizer: AnswerTokenizer
) -> GenerationOptions:
    """Return the generation options with the constraints of the output features.

    Args:
        options: Generation options.
        config: The configuration.
        labels: Labels of the data by output.
        row_tokenizer: Tokenizes answers.

    Raises:
        ModelError: Two labels to score have the same tokens.
    """
    if config.head_output is not None:
        return options
    if config.answers_in_sequence:
        return replace(
            options, constraints=tuple(constraint_of(one, labels, row_tokenizer) for one in config.output_features)
        )
    grammar = answer_grammar(config.output_features, labels=labels)
    output = config.output_features[0]
    if output.scoring:
        return replace(options, labels=scored_labels(output, labels, row_tokenizer))
    return replace(options, grammar=grammar)


def constraint_of(
    output: OutputFeature, labels: Mapping[str, Sequence[str]], row_tokenizer: AnswerTokenizer
) -> Constraint:
    """Return the constraints of an output that is answered by itself, in sequence with others."""
    if output.scoring:
        return Constraint(labels=scored_labels(output, labels, row_tokenizer))
    return Constraint(grammar=answer_grammar([output], labels=labels))


def scored_labels(
    output: OutputFeature,
    labels: Mapping[str, Sequence[str]],
    row_tokenizer: AnswerTokenizer,
    *,
    at: str = "decoder.scoring",
    advice: str = "rename one, or remove scoring",
) -> tuple[Label, ...]:
    """Return the labels with their tokens. Raise ModelError if two have the same tokens.

    Args:
        output: An output of one label.
        labels: Labels of the data by output.
        row_tokenizer: Tokenizes answers.
        at: Key to name in the error.
        advice: The fix to name in the error.
    """
    labels_by_ids: dict[tuple[int, ...], Label] = {}
    for text in output.answer_labels(labels.get(output.name, ())):
        label = Label(text, row_tokenizer.answer_ids(text))
        same = labels_by_ids.setdefault(label.ids, label)
        if same is not label:
            raise ModelError(f"{at}: the labels {same.text!r} and {text!r} are the same tokens to this model; {advice}")
    return tuple(labels_by_ids.values())
