"""What the outputs of a file hold answers to: a grammar, or the labels of which one is chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from partita.lm.base import GenerationOptions, Label
from partita_schema.config import Config
from partita_schema.errors import ModelError
from partita_schema.features import CategoryOutput
from partita_schema.grammar import answer_grammar


class AnswerEncoder(Protocol):
    """From an answer to its tokens."""

    def answer_ids(self, answer: str) -> tuple[int, ...]:
        """Tokens of an answer as it is learned behind a prompt, and of what a chat template writes behind it."""


def in_form(
    options: GenerationOptions, config: Config, *, labels: Mapping[str, Sequence[str]], encoder: AnswerEncoder
) -> GenerationOptions:
    """The options, with what the outputs of the file hold answers to; `labels` are those of categories by name.

    Raises ModelError where two labels to be scored cannot be told apart.
    """
    grammar = answer_grammar(config.output_features, labels=labels)
    output = config.output_features[0]
    if isinstance(output, CategoryOutput) and output.decoder.scoring:
        return replace(options, labels=scored_labels(output, labels, encoder))
    return replace(options, grammar=grammar)


def scored_labels(
    output: CategoryOutput,
    labels: Mapping[str, Sequence[str]],
    encoder: AnswerEncoder,
    *,
    at: str = "decoder.scoring",
    advice: str = "rename one, or remove scoring",
) -> tuple[Label, ...]:
    """The labels with their tokens. Raises ModelError about the key `at` where two cannot be told apart."""
    lower = output.preprocessing.lowercase
    texts = dict.fromkeys(label.lower() if lower else label for label in output.labels or labels[output.name])
    found: dict[tuple[int, ...], Label] = {}
    for text in texts:
        label = Label(text, encoder.answer_ids(text))
        same = found.setdefault(label.ids, label)
        if same is not label:
            raise ModelError(f"{at}: the labels {same.text!r} and {text!r} are the same tokens to this model; {advice}")
    return tuple(found.values())
