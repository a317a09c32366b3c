"""Tokenize cleaned rows for a model with a head: the whole text as the tokenizer itself writes it, and targets."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from partita.data.formatting.base import FormattedText, Row, Segment
from partita.data.formatting.row_tokenizer import Example, PromptExample, RowTokenizer
from partita.data.rows import digest
from partita_schema.errors import RowError
from partita_schema.sections.outputs import OutputFeature

NO_TOKENS = "the text is empty"


class WholeTextTokenizer:
    """Tokenize rows of segments as one text each, with the special tokens of the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, rows: Sequence[Sequence[Segment]], *, before: str = "") -> list[list[list[int]]]:
        """Return the token ids of each row as one part; `before` is not used.

        Raises:
            TypeError: If a text is not a string.
            UnicodeEncodeError: If a text is not valid Unicode.
        """
        self._tokenizer("", verbose=False)  # disables truncation and padding
        texts = ["".join(segment.text for segment in segments) for segments in rows]
        encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=True)
        return [[encoding.ids] for encoding in encodings]


@dataclass(frozen=True)
class HeadTokenizer(RowTokenizer):
    """Tokenize rows for a head; the loss token of a row is its last one."""

    labels: tuple[str, ...] = ()
    """Labels of the head, in the order of its outputs."""

    def encode_rows(self, rows: Sequence[Row], keys: Sequence[str]) -> list[Example | RowError]:
        """Tokenize rows with their targets in one tokenizer call; a bad row is returned as a RowError."""
        examples: list[Example | RowError] = []
        for formatted, ids, row, key in zip(*self._tokens(rows, keys, supervised=False), rows, keys, strict=True):
            if isinstance(formatted, RowError):
                examples.append(formatted)
                continue
            try:
                examples.append(self._head_example(formatted, ids, row, key))
            except RowError as error:
                examples.append(error)
        return examples

    def fingerprint_inputs(self) -> dict[str, str]:
        """Return hashes of what decides the ids and the targets, by readable names."""
        return {**super().fingerprint_inputs(), "labels of the head": digest(*self.labels)}

    def targets_of(self, row: Row) -> tuple[float, ...]:
        """Return the targets of a row. Raise RowError for a label that the head does not have."""
        output = self._output
        value = row[output.name]
        unknown = next((label for label in output.labels_in(value) if label not in self._known), None)
        if unknown is not None:
            raise RowError(f"column {output.source_column}: {output.why_unknown(unknown, self.labels)}")
        return tuple(output.head_targets(value, self.labels))

    def _head_example(self, formatted: FormattedText, ids: Sequence[list[int]], row: Row, key: str) -> Example:
        targets = (self.targets_of(row),)
        tokens, cut = self._truncated(formatted, ids)
        if not tokens:
            raise RowError(NO_TOKENS)
        position = len(tokens) - 1
        return Example(key, tokens, ((position, position + 1),), formatted.cut_tokens + cut, targets)

    def _prompt_example(self, formatted: FormattedText, ids: Sequence[list[int]], key: str) -> PromptExample:
        tokens, cut = self._truncated(formatted, ids)
        problem = None if tokens else NO_TOKENS
        return PromptExample(key, formatted.text, tokens, problem, formatted.cut_tokens + cut)

    def _truncated(self, formatted: FormattedText, ids: Sequence[list[int]]) -> tuple[list[int], int]:
        """Return the tokens of a row within the context, as the tokenizer truncates, and the number removed."""
        [tokens] = ids
        limit = self.max_length
        if limit is None or len(tokens) <= limit:
            return tokens, 0
        shortened: list[int] = self.formatter.tokenizer(formatted.text, truncation=True, max_length=limit)["input_ids"]
        return shortened, len(tokens) - len(shortened)

    @cached_property
    def _output(self) -> OutputFeature:
        output = self.formatter.config.head_output
        assert output is not None, "only a model with a head has targets"
        return output

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.labels)

    @cached_property
    def _segment_ids(self) -> WholeTextTokenizer:  # type: ignore[override]  # the same signature
        return WholeTextTokenizer(self.formatter.tokenizer)
