"""Tokenize the words of rows for a head that predicts a tag for each word."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from partita.data.formatting.base import Row
from partita.data.formatting.head_tokenizer import HeadTokenizer
from partita.data.formatting.row_tokenizer import Example, PromptExample, Span
from partita.lm.marks import with_marks
from partita_schema.errors import RowError
from partita_schema.json_values import NOT_UNICODE
from partita_schema.words import WordText

if TYPE_CHECKING:
    from tokenizers import Encoding


@dataclass(frozen=True)
class WordTokens:
    """The tokens of a row within the context."""

    input_ids: list[int]
    starts: list[int]
    """Index of the first token of each word that has one within the context."""
    cut_tokens: int
    """Number of tokens beyond the context."""


class WordTokenizer(HeadTokenizer):
    """Tokenize each word by itself; the loss tokens of a row are the first tokens of its words.

    A word after a space is tokenized with it, so that tokenizers for which the space is a part of the word give the
    tokens of the text.
    """

    def encode_rows(self, rows: Sequence[Row], keys: Sequence[str]) -> list[Example | RowError]:
        """Tokenize rows with the tags of their words; a bad row is returned as a RowError."""
        examples: list[Example | RowError] = []
        for row, key, encoded in zip(rows, keys, self._encoded(rows), strict=True):
            try:
                targets = self.targets_of(row)
                if encoded is None:
                    raise RowError(NOT_UNICODE)
                tokens = self._within_context(row[self._input], encoded)
                of_words = [(target,) for target in targets[: len(tokens.starts)]]
                spans = tuple(joined(tokens.starts))
                widened = getattr(row[self._output.name], "widened", ())
                examples.append(Example(key, tokens.input_ids, spans, tokens.cut_tokens, of_words, widened))
            except RowError as error:
                examples.append(error)
        return examples

    def encode_prompts(self, rows: Sequence[Row], keys: Sequence[str]) -> list[PromptExample]:
        """Tokenize rows for prediction; the first token of each word is marked."""
        examples = []
        for row, key, encoded in zip(rows, keys, self._encoded(rows), strict=True):
            text = str(row[self._input])
            if encoded is None:
                examples.append(PromptExample(key, "", [], NOT_UNICODE))
                continue
            tokens = self._within_context(row[self._input], encoded)
            ids = with_marks(tokens.input_ids, frozenset(tokens.starts))
            examples.append(PromptExample(key, text, ids, cut_tokens=tokens.cut_tokens))
        return examples

    @cached_property
    def _input(self) -> str:
        return self.formatter.config.input_features[0].name

    def _encoded(self, rows: Sequence[Row]) -> "list[Encoding | None]":
        """Return the tokens of each row without special tokens; None for a text that is not valid Unicode."""
        self.formatter.tokenizer("", verbose=False)  # disables truncation and padding
        words = [words_with_spaces(row[self._input]) for row in rows]
        try:
            return self._encode(words)
        except (TypeError, UnicodeEncodeError):
            return [self._encode_one(of_row) for of_row in words]

    def _encode(self, words: Sequence[Sequence[str]]) -> "list[Encoding | None]":
        backend = self.formatter.tokenizer.backend_tokenizer
        return list(backend.encode_batch(list(words), is_pretokenized=True, add_special_tokens=False))

    def _encode_one(self, words: Sequence[str]) -> "Encoding | None":
        try:
            return self._encode([words])[0]
        except (TypeError, UnicodeEncodeError):
            return None

    def _within_context(self, text: WordText, encoded: "Encoding") -> WordTokens:
        """Return the tokens of a row between the special tokens, truncated to the context."""
        ids_of_words = dict[int, list[int]]()
        for token, word in zip(encoded.ids, encoded.word_ids, strict=True):
            if word is not None:
                ids_of_words.setdefault(word, []).append(token)
        before, after = self._special_tokens
        room = None if self.max_length is None else self.max_length - len(before) - len(after)
        ids, starts = list[int](), list[int]()
        for word in range(len(text.spans)):
            if room is None or len(ids) < room:
                starts.append(len(before) + len(ids))
            ids += ids_of_words.get(word) or [self._unknown]
        kept = ids if room is None else ids[:room]
        return WordTokens([*before, *kept, *after], starts, len(ids) - len(kept))

    @cached_property
    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        encoded = self.formatter.tokenizer.backend_tokenizer.encode("a")
        special = [bool(mask) for mask in encoded.special_tokens_mask]
        first = next((index for index, mask in enumerate(special) if not mask), len(special))
        last = next((index for index in reversed(range(len(special))) if not special[index]), first - 1)
        return encoded.ids[:first], encoded.ids[last + 1 :]

    @cached_property
    def _unknown(self) -> int:
        """The token of a word without tokens, such as one of invisible characters."""
        tokenizer: Any = self.formatter.tokenizer
        token: int = tokenizer.pad_token_id if tokenizer.unk_token_id is None else tokenizer.unk_token_id
        return token


def words_with_spaces(text: WordText) -> list[str]:
    """Return the words, each with one space before it if it stands after white space."""
    return [f"{' ' if text[max(0, start - 1) : start].isspace() else ''}{text[start:end]}" for start, end in text.spans]


def joined(positions: Sequence[int]) -> Iterator[Span]:
    """Yield spans of consecutive positions."""
    for _, run in groupby(enumerate(positions), key=lambda item: item[1] - item[0]):
        members = [position for _, position in run]
        yield members[0], members[-1] + 1
