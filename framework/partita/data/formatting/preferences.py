"""Tokenize rows for trainers on preferences: pairs of answers to one prompt, and answers that are good or bad.

A pair is one example: the prompt, the chosen and the rejected answer. Each answer is a branch that continues the
prompt, with the tokens and the limits of fine-tuning on this answer alone. Without inputs, the prompt is the common
beginning of both texts, in tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from partita.data.formatting.base import Row
from partita.data.formatting.row_tokenizer import Example, PromptExample, RowTokenizer
from partita.lm.marks import with_marks
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.dialogues.common_form import message_text
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
        output = output_of(self.formatter.config)
        pairs = self.pairs(rows, keys)
        if not output.margin_columns:
            return pairs
        for index, (row, pair) in enumerate(zip(rows, pairs, strict=True)):
            if isinstance(pair, Example):
                try:
                    pairs[index] = replace(pair, values=margin_of(row, output))
                except RowError as error:
                    pairs[index] = error
        return pairs

    def pairs(self, rows: Sequence[Row], keys: Sequence[str]) -> list[Example | RowError]:
        """Tokenize pairs without their margins."""
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
        better, worse = both_examples(chosen, rejected, output)
        cut = better.cut_tokens + worse.cut_tokens - cut_inputs
        after = f" after {cut:,} tokens beyond the length limits are cut off" if cut else ""
        if better.input_ids == worse.input_ids:
            raise RowError(f"the answers in the columns {output.chosen} and {output.rejected} are equal{after}")
        prompt = self._prompt_of(better, worse, output)
        answers = []
        for example, column in zip((better, worse), output.answer_columns, strict=True):
            answers.append(example.input_ids[len(prompt) : self._end_of_answer(example)])
            if not answers[-1]:
                raise RowError(f"column {column}: nothing of the answer is left after the common beginning{after}")
        ids = [*prompt, *answers[0], *answers[1]]
        middle = len(prompt) + len(answers[0])
        spans = ((len(prompt), middle), (middle, len(ids)))
        return Example(better.key, ids, spans, cut, branched=True)

    def _end_of_answer(self, example: Example) -> int:
        """Return one past the last token of the answer."""
        return example.spans[-1][1]

    def _most_of_prompt(self, example: Example) -> int:
        """Return the most tokens of a text without inputs that may be the prompt."""
        return len(example.input_ids)

    def _prompt_of(self, better: Example, worse: Example, output: PreferenceOutput) -> list[int]:
        """Return the tokens before both answers. Raise RowError if they differ, or there are none."""
        if self.formatter.config.plain_text:
            pairs = zip(*(one.input_ids[: self._most_of_prompt(one)] for one in (better, worse)), strict=False)
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


class RewardTokenizer(PreferenceTokenizer):
    """Tokenize pairs, and answers to score, for a reward model.

    A chat template may write something after an answer, which is then a part of it: the score of an answer is that of
    the whole dialogue as the template writes it, which other programs compute too.
    """

    def _end_of_answer(self, example: Example) -> int:
        return len(example.input_ids)

    def _most_of_prompt(self, example: Example) -> int:
        """Return the index of the last token that is not the pad token: the score is read there, within the answer.

        The end token may be the pad token, and all that follows the common beginning of both texts.
        """
        pad = self.formatter.tokenizer.pad_token_id
        return max((index for index, token in enumerate(example.input_ids) if token != pad), default=0)

    def encode_prompts(self, rows: Sequence[Row], keys: Sequence[str]) -> list[PromptExample]:
        """Tokenize rows to score: a prompt with both answers of a pair, or with one.

        The last tokens of the prompt and of each answer of a pair are marked. A row is an error if an answer is cut,
        because its end decides the score.
        """
        config = self.formatter.config
        with_pair = [index for index, row in enumerate(rows) if holds_rejected(row, config)]
        alone = sorted({*range(len(rows))} - {*with_pair})
        examples = dict[int, Example | RowError]()
        for indices, tokenize in ((with_pair, self.pairs), (alone, self.answer_examples)):
            examples |= zip(indices, tokenize([rows[i] for i in indices], [keys[i] for i in indices]), strict=True)
        return [self._scored(rows[index], examples[index], key=key) for index, key in enumerate(keys)]

    def _scored(self, row: Row, example: Example | RowError, *, key: str) -> PromptExample:
        """Return the tokens of a row to score, with marks, or why it has no score."""
        if isinstance(example, RowError):
            return PromptExample(key, "", [], str(example))
        formatted = self.formatter.format_all([row], [key])[0]
        cut = example.cut_tokens - formatted.cut_tokens
        if cut:
            message = f"the answer is {counted(cut, 'token')} too long, and its end decides the score"
            return PromptExample(key, formatted.text, [], message)
        ids = example.input_ids
        if example.branched:
            (start, end), _ = example.spans
            ids = with_marks(ids, {start - 1, end - 1, len(ids) - 1})
        return PromptExample(key, formatted.text, ids, cut_tokens=formatted.cut_tokens)

    def fingerprint_inputs(self) -> dict[str, str]:
        """Return hashes of what decides the ids, by readable names."""
        return {**super().fingerprint_inputs(), "end of answers": "with what the template writes after them"}


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


def holds_rejected(row: Row, config: Config) -> bool:
    """Return whether a row has a rejected answer; one that is scored need not have one."""
    output, dialogue = output_of(config), config.dialogue_input
    return "rejected" in row[dialogue.name] if dialogue is not None else output.more_key(output.rejected) in row


def margin_of(row: Row, output: PreferenceOutput) -> tuple[float, ...]:
    """Return the margin of a pair, if the data has one. Raise RowError if the chosen answer is not the better one."""
    columns = output.margin_columns
    if not columns:
        return ()
    numbers = [row[output.more_key(column)] for column in columns]
    if len(numbers) == 1:
        if numbers[0] < 0:
            raise RowError(
                f"column {columns[0]}: the margin {numbers[0]:g} is below 0, so rejected is better than chosen"
            )
        return (numbers[0],)
    margin = numbers[0] - numbers[1]
    if margin == 0:
        raise RowError(f"a tie: the scores in the columns {columns[0]} and {columns[1]} are both {numbers[0]:g}")
    if margin < 0:
        raise RowError(
            f"the score in the column {columns[0]}, {numbers[0]:g}, is below that in {columns[1]}, {numbers[1]:g}"
        )
    return (margin,)


def rejected_row(row: Row, config: Config) -> Row:
    """Return a row with its rejected answer in place of the chosen one."""
    output, dialogue = output_of(config), config.dialogue_input
    if dialogue is not None:
        return {**row, dialogue.name: rejected_dialogue(row[dialogue.name])}
    return {**row, output.name: row[output.more_key(output.rejected)]}


def rejected_text(row: Row, config: Config) -> str:
    """Return the rejected answer of a row as text."""
    output, dialogue = output_of(config), config.dialogue_input
    if dialogue is not None:
        return message_text(row[dialogue.name]["rejected"])
    return output.answer_text(row[output.more_key(output.rejected)])


def both_examples(
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
