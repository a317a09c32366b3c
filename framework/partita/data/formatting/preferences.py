"""Tokenize rows for trainers on preferences: pairs of answers to one prompt, and answers that are good or bad.

A pair is one example: the prompt, the chosen and the rejected answer. Each answer is a branch that continues the
prompt, with the tokens and the limits of fine-tuning on this answer alone. Without inputs, the prompt is the common
beginning of both texts, in tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from partita.data.formatting.base import Row
from partita.data.formatting.row_tokenizer import Example, RowTokenizer
from partita_schema.config import Config
from partita_schema.dialogues.pairs import rejected_dialogue
from partita_schema.errors import RowError
from partita_schema.sections.outputs.preference import PreferenceOutput
from partita_schema.sections.outputs.text import TextOutput

SEVERAL_PARTS = (
    "the chat template marks several parts of the answer in the column {} as generated, and whole answers are "
    "compared; put one {{% generation %}} around what the assistant says, or remove the marks"
)


class PreferenceTokenizer(RowTokenizer):
    """Tokenize pairs; the loss spans of an example are the chosen and the rejected answer."""

    def encode_rows(self, rows: Sequence[Row], keys: Sequence[str]) -> list[Example | RowError]:
        """Tokenize pairs in one tokenizer call; a bad row is returned as a RowError."""
        worse = [rejected_row(row, self.formatter.config) for row in rows]
        texts, ids = self._tokens([*rows, *worse], [*keys, *keys], supervised=True)
        examples = self._examples(texts, ids, [*keys, *keys])
        pairs: list[Example | RowError] = []
        for text, chosen, rejected in zip(texts, examples[: len(rows)], examples[len(rows) :], strict=False):
            try:
                pairs.append(self._pair(chosen, rejected, cut_inputs=getattr(text, "cut_tokens", 0)))
            except RowError as error:
                pairs.append(error)
        return pairs

    def _pair(self, chosen: Example | RowError, rejected: Example | RowError, *, cut_inputs: int) -> Example:
        """Return both answers as one example. Raise RowError if they cannot be compared.

        `cut_inputs` are the tokens removed from the inputs, which both examples count.
        """
        output = output_of(self.formatter.config)
        better, worse = checked(chosen, rejected, output)
        cut = better.cut_tokens + worse.cut_tokens - cut_inputs
        after = f" after {cut:,} tokens beyond the length limits are cut off" if cut else ""
        if better.input_ids == worse.input_ids:
            raise RowError(f"the answers in the columns {output.chosen} and {output.rejected} are equal{after}")
        prompt = self._prompt_of(better, worse, output)
        answers = []
        for example, column in zip((better, worse), output.answer_columns, strict=True):
            answers.append(example.input_ids[len(prompt) : example.spans[-1][1]])
            if not answers[-1]:
                raise RowError(f"column {column}: nothing of the answer is left after the common beginning{after}")
        ids = [*prompt, *answers[0], *answers[1]]
        middle = len(prompt) + len(answers[0])
        spans = ((len(prompt), middle), (middle, len(ids)))
        return Example(better.key, ids, spans, cut, branched=True)

    def _prompt_of(self, better: Example, worse: Example, output: PreferenceOutput) -> list[int]:
        """Return the tokens before both answers. Raise RowError if they differ, or there are none."""
        if self.formatter.config.plain_text:
            pairs = zip(better.input_ids, worse.input_ids, strict=False)
            prompt = [token for token, _ in takewhile(lambda tokens: tokens[0] == tokens[1], pairs)]
            if len(prompt) <= len(self.beginning):
                raise RowError(
                    f"the texts in the columns {output.chosen} and {output.rejected} have no common beginning, which "
                    "would be the prompt; name the columns of the prompt in input_features"
                )
            return prompt
        for example, column in zip((better, worse), output.answer_columns, strict=True):
            if len(example.spans) > 1:
                raise RowError(SEVERAL_PARTS.format(column))
        start = better.spans[0][0]
        if better.input_ids[:start] != worse.input_ids[: worse.spans[0][0]]:
            raise RowError(
                f"the chat template writes another prompt before the answer in the column {output.rejected} than "
                f"before that in {output.chosen}"
            )
        return better.input_ids[:start]


class LabelTokenizer(RowTokenizer):
    """Tokenize answers that are good or bad; the value of an example is 1 for a good one, else 0."""

    def encode_rows(self, rows: Sequence[Row], keys: Sequence[str]) -> list[Example | RowError]:
        """Tokenize answers with their labels; a bad row is returned as a RowError."""
        [output] = self.formatter.config.output_features
        assert isinstance(output, TextOutput)
        assert output.label is not None
        label = output.more_key(output.label)
        return [
            example if isinstance(example, RowError) else replace(example, values=(float(row[label]),))
            for row, example in zip(rows, self.answer_examples(rows, keys), strict=True)
        ]


def output_of(config: Config) -> PreferenceOutput:
    """Return the output of pairs, which is the only output."""
    [output] = config.output_features
    assert isinstance(output, PreferenceOutput)
    return output


def rejected_row(row: Row, config: Config) -> Row:
    """Return a row with its rejected answer in place of the chosen one."""
    output, dialogue = output_of(config), config.dialogue_input
    if dialogue is not None:
        return {**row, dialogue.name: rejected_dialogue(row[dialogue.name])}
    return {**row, output.name: row[output.more_key(output.rejected)]}


def checked(
    chosen: Example | RowError, rejected: Example | RowError, output: PreferenceOutput
) -> tuple[Example, Example]:
    """Return two examples. Raise RowError, which names the column unless both have the same error."""
    errors = [str(one) if isinstance(one, RowError) else "" for one in (chosen, rejected)]
    if errors[0] == errors[1] != "":
        raise RowError(errors[0])
    for error, column in zip(errors, output.answer_columns, strict=True):
        if error:
            raise RowError(f"column {column}: {error}")
    assert isinstance(chosen, Example)
    assert isinstance(rejected, Example)
    return chosen, rejected
