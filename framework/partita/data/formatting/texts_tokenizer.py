"""Tokenize rows of several texts for a head: two texts that are scored together, and texts that are embedded."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from partita.data.formatting.base import Row
from partita.data.formatting.head_tokenizer import NO_TOKENS, HeadTokenizer
from partita.data.formatting.row_tokenizer import Example, PromptExample
from partita.lm.marks import with_marks
from partita_schema.config import Config
from partita_schema.errors import RowError
from partita_schema.json_values import NOT_UNICODE
from partita_schema.sections.outputs.embedding import EmbeddingOutput
from partita_trainers.objectives.text_identity import identity_of

if TYPE_CHECKING:
    from tokenizers import Encoding


class TextsTokenizer(HeadTokenizer):
    """Tokenize several texts of a row in one sequence."""

    def encode_rows(self, rows: Sequence[Row], keys: Sequence[str]) -> list[Example | RowError]:
        """Tokenize rows with their targets; a bad row is returned as a RowError."""
        examples: list[Example | RowError] = []
        written = [self.texts(row) for row in rows]
        for row, key, texts, encoded in zip(rows, keys, written, self._encoded(written), strict=True):
            try:
                examples.append(self.example(row, key, texts, encoded_texts(encoded)))
            except RowError as error:
                examples.append(error)
        return examples

    def encode_prompts(self, rows: Sequence[Row], keys: Sequence[str]) -> list[PromptExample]:
        """Tokenize rows for prediction."""
        asked = [self.asked_texts(row) for row in rows]
        examples = []
        for key, texts, encoded in zip(keys, asked, self._encoded(asked), strict=True):
            try:
                ids, cut = self.prompt_ids(encoded_texts(encoded))
                examples.append(PromptExample(key, "\n".join(texts), ids, cut_tokens=cut))
            except RowError as error:
                examples.append(PromptExample(key, "", [], str(error)))
        return examples

    @abstractmethod
    def texts(self, row: Row) -> list[str]:
        """Return the texts of a row in training."""

    @abstractmethod
    def asked_texts(self, row: Row) -> list[str]:
        """Return the texts of a row in prediction."""

    @abstractmethod
    def example(self, row: Row, key: str, texts: Sequence[str], encoded: "Sequence[Encoding]") -> Example:
        """Return the tokenized row for training.

        Args:
            row: The row.
            key: Its key.
            texts: Its texts.
            encoded: Their tokens, without special tokens.

        Raises:
            RowError: The row cannot be learned.
        """

    @abstractmethod
    def prompt_ids(self, texts: "Sequence[Encoding]") -> tuple[list[int], int]:
        """Return the tokens of the row for prediction, and the number of tokens removed."""

    def _encoded(self, rows: Sequence[Sequence[str]]) -> "list[list[Encoding] | None]":
        """Return the tokens of each text without special tokens; None for a row that is not valid Unicode."""
        self.formatter.tokenizer("", verbose=False)  # disables truncation and padding
        try:
            encoded = self._encode([text for texts in rows for text in texts])
        except (TypeError, UnicodeEncodeError):
            return [self._encode_row(texts) for texts in rows]
        parts = iter(encoded)
        return [[next(parts) for _ in texts] for texts in rows]

    def _encode(self, texts: Sequence[str]) -> "list[Encoding]":
        backend = self.formatter.tokenizer.backend_tokenizer
        return list(backend.encode_batch(list(texts), add_special_tokens=False))

    def _encode_row(self, texts: Sequence[str]) -> "list[Encoding] | None":
        try:
            return self._encode(texts)
        except (TypeError, UnicodeEncodeError):
            return None


class PairTokenizer(TextsTokenizer):
    """Tokenize two texts as one sequence, as the tokenizer writes pairs; the loss token is the first of the second.

    Sequences beyond the context lose tokens of the longer text first, as with `truncation=True` of transformers.
    """

    def texts(self, row: Row) -> list[str]:
        """Return the two inputs as they are encoded."""
        return pair_of(row, self.formatter.config, separated=self._has_separator)

    asked_texts = texts

    def example(self, row: Row, key: str, texts: Sequence[str], encoded: "Sequence[Encoding]") -> Example:
        """Return the row with its score; see `TextsTokenizer.example`."""
        ids, second, cut = self._pair(encoded)
        return Example(key, ids, ((second, second + 1),), cut, [self.targets_of(row)])

    def prompt_ids(self, texts: "Sequence[Encoding]") -> tuple[list[int], int]:
        """Return the tokens with the first of the second text marked, and the number of tokens removed."""
        ids, second, cut = self._pair(texts)
        return with_marks(ids, {second}), cut

    def _pair(self, texts: "Sequence[Encoding]") -> tuple[list[int], int, int]:
        """Return the tokens, the index of the first token of the second text, and the number of tokens removed."""
        first, second = texts
        lengths = len(first.ids), len(second.ids)
        if self.max_length is not None:
            kept = longest_first(*lengths, room=self.max_length - self._special_tokens)
            for text, length in zip(texts, kept, strict=True):
                text.truncate(length)
        whole = self.formatter.tokenizer.backend_tokenizer.post_process(first, second, True)
        ids: list[int] = whole.ids
        after = len(ids) - next(index for index, of in enumerate(reversed(whole.sequence_ids)) if of == 1)
        return ids, after - len(second.ids), sum(lengths) - len(first.ids) - len(second.ids)

    @cached_property
    def _special_tokens(self) -> int:
        count: int = self.formatter.tokenizer.num_special_tokens_to_add(pair=True)
        return count

    @cached_property
    def _has_separator(self) -> bool:
        alone: int = self.formatter.tokenizer.num_special_tokens_to_add(pair=False)
        return self._special_tokens > alone


class EmbeddingTokenizer(TextsTokenizer):
    """Tokenize texts one after the other, each with its special tokens; the loss tokens are the last ones of the texts.

    The first text of a row is the anchor, the second the positive, and the others are negatives.
    """

    def texts(self, row: Row) -> list[str]:
        """Return the input as the prompt writes it, and the texts that it is compared with."""
        output = self.formatter.config.head_output
        assert isinstance(output, EmbeddingOutput)
        return [*self.asked_texts(row), *compared_texts(row, output)]

    def asked_texts(self, row: Row) -> list[str]:
        """Return the input as the prompt writes it."""
        [formatted] = self.formatter.format_all([row], [""], supervised=False)
        return [formatted.text]

    def example(self, row: Row, key: str, texts: Sequence[str], encoded: "Sequence[Encoding]") -> Example:
        """Return the texts of the row, with their identities as targets; see `TextsTokenizer.example`."""
        ids, spans, cut = list[int](), list[tuple[int, int]](), 0
        for text in encoded:
            of_text, removed = self._whole(text)
            cut += removed
            ids += of_text
            spans.append((len(ids) - 1, len(ids)))
        return Example(key, ids, tuple(spans), cut, list(map(identity_of, texts)))

    def prompt_ids(self, texts: "Sequence[Encoding]") -> tuple[list[int], int]:
        """Return the tokens of the text, and the number of tokens removed."""
        return self._whole(texts[0])

    def _whole(self, text: "Encoding") -> tuple[list[int], int]:
        """Return a text within the context with its special tokens, and the number of tokens removed."""
        length = len(text.ids)
        if self.max_length is not None:
            text.truncate(self.max_length - self._special_tokens)
        removed = length - len(text.ids)
        ids: list[int] = self.formatter.tokenizer.backend_tokenizer.post_process(text, None, True).ids
        return ids, removed

    @cached_property
    def _special_tokens(self) -> int:
        count: int = self.formatter.tokenizer.num_special_tokens_to_add(pair=False)
        return count


def pair_of(row: Row, config: Config, *, separated: bool) -> list[str]:
    """Return the two inputs of a row; if the tokenizer writes nothing between texts, the second after a line break."""
    first, second = (str(row[feature.name]) for feature in config.input_features)
    return [first, second if separated else f"\n{second}"]


def compared_texts(row: Row, output: EmbeddingOutput) -> list[str]:
    """Return the texts that the input of a row is compared with: the positive, and the negatives if there are any."""
    others = [row[output.name], *(row[output.more_key(column)] for column in output.more_columns)]
    return [f"{output.preprocessing.prefix}{text}" for text in others]


def encoded_texts(texts: "Sequence[Encoding] | None") -> "Sequence[Encoding]":
    """Return the tokens of the texts of a row. Raise RowError if a text has none, or is not valid Unicode."""
    if texts is None:
        raise RowError(NOT_UNICODE)
    if not all(len(text.ids) for text in texts):
        raise RowError(NO_TOKENS)
    return texts


def longest_first(first: int, second: int, *, room: int) -> tuple[int, int]:
    """Return the tokens of two texts that are kept: the longer one is shortened first, then both alike.

    Args:
        first: Tokens of the first text.
        second: Tokens of the second text.
        room: Tokens that fit.
    """
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    longer = min(max(first, second), room - shorter)
    return (longer, shorter) if first > second else (shorter, longer)
