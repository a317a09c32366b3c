"""A model's chat template: prompts, and the answers that follow them.

The answer's segments are what the whole dialogue adds to the rendered prompt. A row is rejected if the dialogue does
not start with the prompt, or does not contain the answer unchanged. `{% generation %}` marks in a template decide what
is in the loss. Without marks it is the answer and what follows, up to the token that ends the turn.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from partita.data.formatting.base import Segment
from partita.data.formatting.chat_sandbox import limited_template
from partita_schema.errors import ModelError, RowError

Message = Mapping[str, str]
Span = tuple[int, int]
"""First character and one past the last."""
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """A rendered dialogue."""

    text: str
    marks: tuple[Span, ...] | None = None
    """Spans that the template marks as generated; None if it has no marks."""


class ChatTemplate:
    """Render messages with the tokenizer's chat template.

    Thinking is disabled (`enable_thinking=False`): answers are learned and parsed as they are in the data.
    """

    _has_marks = False

    def __init__(self, tokenizer: Any, *, system: str | None) -> None:
        self._tokenizer = tokenizer
        self.system = system
        """Text of the system message."""
        self._has_marks = MARK.search(tokenizer.get_chat_template()) is not None
        self._before, self._after = self._surroundings()
        end = self._end_of_turn()
        self.needs_end = end is None
        """Whether the end-of-text token must be added after an answer."""
        self._end = len(self._after) if end is None else end
        """Number of characters after an answer up to the end of its turn; the rest is not in the loss."""

    def render(
        self, user: str, answer: str | None, *, turns: Sequence[tuple[str, str]]
    ) -> tuple[tuple[Segment, ...], bool]:
        """Render a dialogue.

        Args:
            user: The last user message.
            answer: The answer to it; None in prediction.
            turns: Earlier pairs of question and answer.

        Returns:
            The segments, and whether the end-of-text token must be added.

        Raises:
            RowError: If the template rewrites the prompt or the answer.
        """
        messages = self._messages(user, turns)
        prompt = self.apply(messages, prompt=True)
        if answer is None:
            return (Segment(prompt, False),), False
        whole = self.dialogue([*messages, {"role": "assistant", "content": answer}], marks=True)
        return (Segment(prompt, False), *self.answer_segments(prompt, whole, answer)), self.needs_end

    def answer_segments(self, prompt: str, whole: Rendered, answer: str) -> tuple[Segment, ...]:
        """Return what a rendered dialogue adds to its rendered prompt: the answer, its end and the rest.

        Raises:
            RowError: If the template rewrites the prompt or the answer, or marks nothing of it as generated.
        """
        if not whole.text.startswith(prompt):
            raise RowError(
                "the chat template writes the prompt in another way once the answer is there, so the answer's "
                "tokens cannot be separated from the prompt's; write chat: false or another template"
            )
        added = whole.text[len(prompt) :]
        text = next((text for text in (answer, answer.strip()) if added == self._before + text + self._after), None)
        if text is None:
            raise RowError(
                f"the chat template rewrites the answer {answer[:60]!r}; write chat: false or another template"
            )
        segments: Iterable[Segment] = (
            Segment(self._before + text, True),
            Segment(self._after[: self._end], True, joined=True),
            Segment(self._after[self._end :], False, joined=True),
        )
        if whole.marks is not None:
            segments = by_marks(segments, at=len(prompt), marks=whole.marks)
        filled = tuple(segment for segment in segments if segment.text)
        if whole.marks is not None and not any(segment.supervised for segment in filled):
            raise RowError(
                f"the chat template marks nothing of the answer {text[:60]!r} as generated, so there is nothing to "
                "learn; put {% generation %} around what the assistant says, or remove the marks"
            )
        return filled

    def dialogue(self, messages: Sequence[Message], *, marks: bool) -> Rendered:
        """Render the messages, with the template's marks if `marks`. Raise ModelError if the template fails."""
        if not marks or not self._has_marks:
            return Rendered(self.apply(messages, prompt=False))
        from transformers.utils.chat_template_utils import render_jinja_template

        # apply_chat_template returns only a mask of tokens, and a span that ends with white space without a token makes
        # that mask run to the end of the dialogue (transformers #47325).
        with refusals(self.system):
            [text], [spans] = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self._tokenizer.get_chat_template(),
                return_assistant_tokens_mask=True,
                add_generation_prompt=False,
                **{**self._tokenizer.special_tokens_map, "enable_thinking": False},
            )
        return Rendered(text, tuple(spans))

    def apply(self, messages: Sequence[Message], *, prompt: bool) -> str:
        """Render the messages, with the generation prompt if `prompt`. Raise ModelError if the template fails."""
        with refusals(self.system):
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=prompt, enable_thinking=False
                )
            )

    def _surroundings(self) -> tuple[str, str]:
        """Return what the template writes between the prompt and an answer, and after the answer."""
        messages = self._messages("QUESTION", [])
        prompt = self.apply(messages, prompt=True)
        whole = self.apply([*messages, {"role": "assistant", "content": "ANSWER"}], prompt=False)
        before, match, after = whole[len(prompt) :].partition("ANSWER")
        if not whole.startswith(prompt) or not match:
            raise ModelError(
                "the chat template writes no answer after the prompt (its dialogue does not begin with its generation "
                "prompt), so the answer's tokens cannot be separated from the prompt's; write prompt: {chat: false}"
            )
        return before, after

    def _end_of_turn(self) -> int | None:
        """Return the number of characters after an answer up to the EOS or first special token; None without one."""
        tokenizer = self._tokenizer
        ids = tokenizer(self._after, add_special_tokens=False)["input_ids"] if self._after else []
        special = {tokenizer.eos_token_id, *tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        end = (
            tokenizer.eos_token_id if tokenizer.eos_token_id in ids else next((id for id in ids if id in special), None)
        )
        if end is None:
            return None
        text = tokenizer.added_tokens_decoder[end].content if end in tokenizer.added_tokens_decoder else ""
        index = self._after.find(text) if text else -1
        return len(self._after) if index < 0 else index + len(text)

    def _messages(self, user: str, turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": user}]


def by_marks(segments: Iterable[Segment], *, at: int, marks: Sequence[Span]) -> Iterator[Segment]:
    """Split segments at the borders of marks; marked text is in the loss. The first segment starts at `at`."""
    for segment in segments:
        end = at + len(segment.text)
        borders = {at, end}.union(border for span in marks for border in span if at < border < end)
        for start, stop in pairwise(sorted(borders)):
            yield segment._replace(
                text=segment.text[start - at : len(segment.text) - (end - stop)],
                supervised=any(low <= start and stop <= high for low, high in marks),
                joined=segment.joined or start > at,
            )
        at = end


@contextmanager
def refusals(system: str | None) -> Iterator[None]:
    """Limit what a template may do, and convert its errors to ModelError."""
    from jinja2 import TemplateError

    try:
        with limited_template():
            yield
    except TemplateError as error:
        hint = "; without prompt.system (its text can stand in prompt.task) it may take them" if system else ""
        raise ModelError(f"the model's chat template refuses the messages: {error}{hint}") from error
