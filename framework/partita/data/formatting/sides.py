"""Tokenize rows for an encoder-decoder: the prompt as the encoder reads it, and the answer as the decoder writes it.

Both get the special tokens that the tokenizer adds to a text, as `tokenizer(prompt, text_target=answer)` does. A row is
still one sequence, prompt first; the loss splits it where its labels start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from partita.data.formatting.base import FormattedText, Row, Segment
from partita.data.formatting.formatter import Formatter
from partita.data.formatting.row_tokenizer import Example, PromptExample, RowTokenizer, no_room
from partita_schema.errors import RowError


@dataclass(frozen=True)
class SideLimits:
    """The most tokens of each side of a row; None without limit."""

    prompt: int | None = None
    """Tokens that the encoder reads."""
    answer: int | None = None
    """Tokens that the decoder writes."""


class SideTokenizer:
    """Tokenize both sides of rows. Can be pickled for other processes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, rows: Sequence[Sequence[Segment]], *, before: str = "") -> list[list[list[int]]]:
        """Return the token ids of each row: first those of the prompt, then those of the answer.

        `before` has no effect: the sides are tokenized separately.

        Raises:
            TypeError: If a text is not a string.
            UnicodeEncodeError: If a text is not valid Unicode.
        """
        prompts = [self._prompt_text(segments) for segments in rows]
        answers = ["".join(segment.text for segment in segments if segment.supervised) for segments in rows]
        prompt_ids = self._ids(prompts)
        answer_ids = self._ids(answers, target=True) if any(map(has_answer, rows)) else [[] for _ in rows]
        return [
            [prompt if text.strip() else [], self._ended(answer) if has_answer(segments) else []]
            for segments, text, prompt, answer in zip(rows, prompts, prompt_ids, answer_ids, strict=True)
        ]

    def cut(self, answer: list[int], *, tokens: int) -> list[int]:
        """Return an answer with at most `tokens` tokens of its text; one that is cut loses its end."""
        first = self._first_of_text
        extra = len(self._empty) - first
        return answer if len(answer) - first - extra <= tokens else answer[: first + tokens]

    def _prompt_text(self, segments: Sequence[Segment]) -> str:
        """Return the text before the answer, without the line break that separates the two in one sequence."""
        text = "".join(segment.text for segment in segments if not segment.supervised)
        return text.rstrip("\n")

    def _ids(self, texts: Sequence[str], *, target: bool = False) -> list[list[int]]:
        if not texts:
            return []
        given = {"text_target" if target else "text": list(texts)}
        ids: list[list[int]] = self._tokenizer(**given, verbose=False, return_attention_mask=False)["input_ids"]
        return ids

    def _ended(self, answer: list[int]) -> list[int]:
        """Return an answer with an end token, which some tokenizers do not add."""
        end = self._tokenizer.eos_token_id
        return answer if end is None or end in answer[-2:] else [*answer, end]

    @cached_property
    def _empty(self) -> list[int]:
        """The tokens of an answer without text."""
        return self._ended(self._ids([""], target=True)[0])

    @cached_property
    def _first_of_text(self) -> int:
        """Number of tokens before the text of an answer, such as the `<s>` of BART."""
        end = self._tokenizer.eos_token_id
        return self._empty.index(end) if end in self._empty else len(self._empty)


def has_answer(segments: Sequence[Segment]) -> bool:
    """Return whether a row has an answer to learn."""
    return any(segment.supervised for segment in segments)


def check_order(segments: Sequence[Segment]) -> None:
    """Raise RowError if text follows an answer, which neither side of the row could hold."""
    marks = [segment.supervised for segment in segments if segment.text]
    if True in marks and False in marks[marks.index(True) :]:
        raise RowError("text follows the answer, and an encoder-decoder learns one answer per row, at its end")


def prompt_problem(prompt: Sequence[int], limits: SideLimits, *, total: int | None) -> str | None:
    """Return why the encoder cannot read a prompt; None if it can."""
    if not prompt:
        return "the prompt is empty"
    if limits.prompt is not None and len(prompt) > limits.prompt:
        return (
            f"the prompt is longer than the {limits.prompt:,} tokens that the encoder reads; "
            "preprocessing: {max_sequence_length: ...} of an input cuts it"
        )
    if total is not None and len(prompt) >= total:
        return no_room(total)
    return None


@dataclass(frozen=True)
class SideRowTokenizer(RowTokenizer):
    """Tokenize rows for an encoder-decoder; the loss tokens of a row are its answer."""

    sides: SideLimits = SideLimits()
    """Limits of each side; `max_length` is that of their sum."""

    def encode_turn(self, row: Row, *, key: str, earlier_ids: Sequence[int], earlier_text: str) -> PromptExample:
        """Tokenize the prompt of the next turn of a dialogue: the encoder reads all of it again.

        Args:
            row: The dialogue so far.
            key: Key of the row.
            earlier_ids: Not used.
            earlier_text: Not used.
        """
        return self.encode_prompt(row, key=key)

    def answer_ids(self, answer: str) -> tuple[int, ...]:
        """Return the tokens of an answer as they are in the loss, with the tokenizer's special tokens."""
        assert isinstance(self.formatter, Formatter), "a custom formatter formats only the answers of rows"
        [(_, ids)] = self._segment_ids([self.formatter.any_prompt(answer)])
        return tuple(ids)

    def fingerprint_inputs(self) -> dict[str, str]:
        """Return hashes of what decides the ids, by readable names."""
        limits = f"{self.sides.prompt} and {self.sides.answer} tokens".replace("None", "unlimited")
        return {**super().fingerprint_inputs(), "encoder and decoder": limits}

    def _prompt_example(self, formatted: FormattedText, ids: Sequence[list[int]], key: str) -> PromptExample:
        problem = self._prompt_problem(ids[0])
        return PromptExample(key, formatted.text, ids[0], problem, formatted.cut_tokens)

    def _example(self, formatted: FormattedText, ids: Sequence[list[int]], key: str) -> Example:
        """Return a row within its limits; an answer that is too long loses its end. Raise RowError."""
        prompt, answer = ids
        check_order(formatted.segments)
        if not answer:
            raise RowError("the answer is empty: there is nothing to learn")
        problem = self._prompt_problem(prompt)
        if problem is not None:
            raise RowError(problem)
        kept = answer if self.answer_limit is None else self._segment_ids.cut(answer, tokens=self.answer_limit)
        kept = kept[: self.sides.answer]
        kept = kept if self.max_length is None else kept[: self.max_length - len(prompt)]
        tokens = [*prompt, *kept]
        lost = formatted.cut_tokens + len(answer) - len(kept)
        return Example(key, tokens, ((len(prompt), len(tokens)),), lost)

    def _prompt_problem(self, prompt: Sequence[int]) -> str | None:
        problem = prompt_problem(prompt, self.sides, total=self.max_length)
        return None if problem is None else problem + self._advice()

    @cached_property
    def _segment_ids(self) -> SideTokenizer:  # type: ignore[override]  # the same signature
        return SideTokenizer(self.formatter.tokenizer)
