"""A model's chat template: prompts, and the answers that follow them.

The answer's segments are what the whole dialogue adds to the rendered prompt. A row is rejected if the dialogue does
not start with the prompt, or does not contain the answer unchanged; with tool calls or reasoning, if it does not
contain all of them. `{% generation %}` marks in a template decide what is in the loss. Without marks it is the answer
and what follows, up to the token that ends the turn.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from partita.data.formatting.base import Segment
from partita.data.formatting.chat_sandbox import limited_template
from partita.data.formatting.tool_calls import (
    TRIAL_NAME,
    TRIAL_TOOL,
    ToolCallForm,
    check_answer,
    check_is_written,
    form_of,
)
from partita_schema.errors import ModelError, RowError

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
"""First character and one past the last."""
MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
OPEN_THOUGHT = re.compile(r"<think>\s*$")
"""The end of a prompt in which a model starts to think."""
THINKING = "prompt: {chat_template_kwargs: {enable_thinking: true}}"


class Rendered(NamedTuple):
    """A rendered dialogue."""

    text: str
    marks: tuple[Span, ...] | None = None
    """Spans that the template marks as generated; None if it has no marks."""


class ChatTemplate:
    """Render messages with the tokenizer's chat template.

    Thinking is disabled (`enable_thinking=False`) unless `arguments` enable it.
    """

    def __init__(self, tokenizer: Any, *, system: str | None, arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self.system = system
        """Text of the system message."""
        self._arguments = {"enable_thinking": False, **(arguments or {})}
        self._thinks = bool(self._arguments["enable_thinking"] or self._arguments.get("thinking"))
        self._cuts_thought = False
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

    def answer_segments(self, prompt: str, whole: Rendered, answer: str | Message) -> tuple[Segment, ...]:
        """Return what a rendered dialogue adds to its rendered prompt: the answer, its end and the rest.

        Args:
            prompt: The rendered prompt.
            whole: The rendered dialogue with the answer.
            answer: The answer as text, or a message with tool calls or reasoning.

        Raises:
            RowError: If the template rewrites the prompt or the answer, or marks nothing of it as generated.
        """
        message = {"content": answer} if isinstance(answer, str) else answer
        if not whole.text.startswith(prompt):
            raise RowError(self._why_prompts_differ(prompt, whole.text, message))
        added = whole.text[len(prompt) :]
        segments: Iterable[Segment] = (
            self._text_segments(added, answer) if isinstance(answer, str) else (self._message_segments(added, answer))
        )
        if whole.marks is not None:
            segments = by_marks(segments, at=len(prompt), marks=whole.marks)
        filled = tuple(segment for segment in segments if segment.text)
        if whole.marks is not None and not any(segment.supervised for segment in filled):
            raise RowError(
                f"the chat template marks nothing of the answer {message['content'].strip()[:60]!r} as generated, so "
                "there is nothing to learn; put {% generation %} around what the assistant says, or remove the marks"
            )
        return filled

    def _text_segments(self, added: str, answer: str) -> tuple[Segment, ...]:
        """Return the segments of an answer that is only text."""
        text = next((text for text in (answer, answer.strip()) if added == self._before + text + self._after), None)
        if text is None:
            raise RowError(
                f"the chat template rewrites the answer {answer[:60]!r}; write chat: false or another template"
            )
        return (
            Segment(self._before + text, True),
            Segment(self._after[: self._end], True, joined=True),
            Segment(self._after[self._end :], False, joined=True),
        )

    def _message_segments(self, added: str, answer: Message) -> tuple[Segment, ...]:
        """Return the segments of an answer with tool calls or reasoning.

        Its turn may end with another token than that of an answer that is only text, or with none.
        """
        check_answer(answer, added)
        if self._after and added.endswith(self._after):
            end = len(added) - len(self._after) + self._end
        else:
            ends = [match.end() for match in self._added_tokens.finditer(added)]
            end = ends[-1] if ends and not added[ends[-1] :].strip() else 0
        has_end = end > 0
        return (
            Segment(added[: end or len(added)], True, ends=not has_end and not self.needs_end),
            Segment(added[end or len(added) :], False, joined=True),
        )

    def _why_prompts_differ(self, prompt: str, whole: str, answer: Message) -> str:
        """Return why a dialogue does not start with its prompt."""
        if answer.get("reasoning_content") and not self._thinks:
            return (
                "the chat template writes the reasoning of an answer only after a prompt that asks for it; write "
                f"{THINKING}, or data.dialogue: {{ignore_keys: [reasoning_content]}}"
            )
        if whole.startswith(OPEN_THOUGHT.sub("", prompt)):
            return (
                "the chat template begins to think in the prompt, but writes no thought in the dialogue; remove "
                "enable_thinking from prompt.chat_template_kwargs"
            )
        return (
            "the chat template renders the prompt differently if the answer follows, so the answer's "
            "tokens cannot be separated from the prompt's; write chat: false or another template"
        )

    @property
    def writes_before_answers(self) -> bool:
        """Whether the template writes text between a prompt and an answer."""
        return bool(self._before.strip())

    @cached_property
    def _added_tokens(self) -> re.Pattern[str]:
        """A pattern of all added tokens, special ones included."""
        texts = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.content}
        longest_first = sorted(texts, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) if texts else "(?!)")

    @cached_property
    def _tool_calls(self) -> ToolCallForm:
        """The form of tool calls that the template takes."""
        return form_of(lambda messages: self.apply(messages, prompt=False, tools=[TRIAL_TOOL], form=ToolCallForm()))

    @cached_property
    def _writes_tools(self) -> bool:
        """Whether the template writes definitions of tools."""
        try:
            return TRIAL_NAME in self.apply(self._messages("QUESTION", []), prompt=True, tools=[TRIAL_TOOL])
        except ModelError:
            return True  # its reason is that of each row

    def check(self, messages: Sequence[Message], text: str, *, tools: Tools) -> None:
        """Raise RowError if the template left out tools, tool calls or results of tools from a rendered text."""
        check_is_written(messages, text, tools=tools, writes_tools=not tools or self._writes_tools)

    def dialogue(self, messages: Sequence[Message], *, marks: bool, tools: Tools = ()) -> Rendered:
        """Render the messages, with the template's marks if `marks`. Raise ModelError if the template fails."""
        template = self._tokenizer.get_chat_template(tools=list(tools) or None)
        if not marks or not MARK.search(template):
            return Rendered(self.apply(messages, prompt=False, tools=tools))
        from transformers.utils.chat_template_utils import render_jinja_template

        # apply_chat_template returns only a mask of tokens, and a span that ends with white space without a token makes
        # that mask run to the end of the dialogue (transformers #47325).
        with refusals(self.system):
            [text], [spans] = render_jinja_template(
                conversations=[self._written(messages)],
                tools=list(tools) or None,
                chat_template=template,
                return_assistant_tokens_mask=True,
                add_generation_prompt=False,
                **{**self._tokenizer.special_tokens_map, **self._arguments},
            )
        return Rendered(text, tuple(spans))

    def apply(
        self, messages: Sequence[Message], *, prompt: bool, tools: Tools = (), form: ToolCallForm | None = None
    ) -> str:
        """Render messages.

        Args:
            messages: Messages in the common form.
            prompt: Whether to add the generation prompt.
            tools: Definitions of tools.
            form: How tool calls are passed. Default: the form that the template takes.

        Raises:
            ModelError: If the template fails.
        """
        written = self._written(messages, form=form)
        with refusals(self.system):
            text = str(
                self._tokenizer.apply_chat_template(
                    written, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt, **self._arguments
                )
            )
        return OPEN_THOUGHT.sub("", text) if prompt and self._cuts_thought else text

    def _written(self, messages: Sequence[Message], *, form: ToolCallForm | None = None) -> list[dict[str, Any]]:
        """Return messages as the template takes them."""
        if form is None and any("tool_calls" in message or message["role"] == "tool" for message in messages):
            form = self._tool_calls
        return form.messages(messages) if form is not None else [dict(message) for message in messages]

    def _surroundings(self) -> tuple[str, str]:
        """Return what the template writes between the prompt and an answer, and after the answer."""
        messages = self._messages("QUESTION", [])
        prompt = self.apply(messages, prompt=True)
        whole = self.apply([*messages, {"role": "assistant", "content": "ANSWER"}], prompt=False)
        if not whole.startswith(prompt) and whole.startswith(without := OPEN_THOUGHT.sub("", prompt)):
            # DeepSeek R1 begins to think in the prompt, and drops thoughts from dialogues.
            self._cuts_thought = not self._thinks
            prompt = without
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
