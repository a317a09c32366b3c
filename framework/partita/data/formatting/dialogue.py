"""Format a dialogue as segments: its messages in order, and the answers to learn.

In packed mode all answers of a dialogue are learned, and each has its own segments. They are found by rendering the
dialogue message by message: the rendering up to an answer must start with the rendering up to the previous one. A
template that rewrites earlier turns (drops thoughts, writes a date, marks the last turn) is rejected, because inference
could never reproduce the text that was learned. Predictions for a packed model use the same segments, so that they have
the same tokens. In other modes the prompt is tokenized as one text.

Tools, tool calls and reasoning are passed to the template, and a row is rejected if it leaves out a part of them.
Reasoning of earlier answers may be left out, as it is when a model is used.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

from partita.data.dialogue import HistoryLimits, Mode, context_of, history
from partita.data.formatting.base import FormattedText, Segment
from partita.data.formatting.chat import ChatTemplate, Rendered, by_marks
from partita.data.formatting.tool_calls import TRIAL_CALL, TRIAL_NAME, TRIAL_TOOL
from partita.data.formatting.turns import build_turn_writer
from partita_schema.config import Config
from partita_schema.dialogues.common_form import ANSWER_KEYS, is_structured
from partita_schema.errors import ModelError, RewrittenError, RowError
from partita_schema.sections.dialogue import DialogueConfig

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
TEMPLATE_KEYS = ("role", *ANSWER_KEYS, "name", "tool_call_id")
"""Keys of messages that chat templates read."""


class DialogueFormatter:
    """Format dialogues in the common form. The result depends only on the dialogue."""

    def __init__(self, config: Config, *, tokenizer: Any, chat: ChatTemplate | None) -> None:
        assert config.dialogue_input is not None
        self.name = config.dialogue_input.name
        """Name of the dialogue feature in rows."""
        self.mode = "last_turn" if config.compares_answers else resolved_mode(config.data.dialogue, chat=chat)
        """How dialogues become rows."""
        self._tokenizer, self._chat = tokenizer, chat
        self._system = config.prompt.system
        self._settings = config.data.dialogue
        self._turns = build_turn_writer(config, tokenizer=tokenizer)
        self._context = context_of(config.data.dialogue) if self.mode != "packed_dialogue" else HistoryLimits()

    def format(self, dialogue: Mapping[str, Any], *, supervised: bool) -> FormattedText:
        """Return the dialogue as text, with the answer to learn if `supervised`. Raise RowError if it is invalid.

        With `output`, the answer is that output of a turn answered in sequence. With `answered`, the prompt asks for
        the output after those.
        """
        if dialogue.get("verbatim"):
            return self._joined(dialogue, supervised=supervised)
        formatted = self._formatted(dialogue, supervised=supervised)
        if self._turns is None or not supervised:
            return formatted
        learned = [message["values"] for message in dialogue["messages"] if "values" in message and message["train"]]
        cut = sum(map(self._turns.cut_tokens, [*(learned if dialogue["train_all"] else ()), dialogue["labels"][0]]))
        return replace(formatted, cut_tokens=cut)

    def _formatted(self, dialogue: Mapping[str, Any], *, supervised: bool) -> FormattedText:
        messages = self._shown(dialogue["messages"])
        packed = self.mode == "packed_dialogue"
        train_all = packed and supervised and dialogue.get("train_all", True)
        answer: str | Message | None = None
        if supervised and self._turns is not None:
            before, answer = self._turns.turn(dialogue["labels"][0], until=dialogue.get("output"))
            messages += before
        elif supervised:
            answer = answer_of(dialogue)
        elif self._turns is not None and "answered" in dialogue:
            messages += self._turns.before(dialogue["answered"])
        if self._chat is None:
            return self._plain(dialogue, messages, answer, packed=packed, train_all=train_all)
        rendering = Rendering(self._chat, dialogue.get("tools", ()), self._hint)
        try:
            return rendering.format(messages, answer, packed=packed, train_all=train_all)
        except RewrittenError:
            if train_all or any(message.get("learn") for message in messages):
                raise
            return rendering.format(messages, answer, packed=False, train_all=False)

    def _joined(self, dialogue: Mapping[str, Any], *, supervised: bool) -> FormattedText:
        """Return a text in segments as it is, without a chat template, speakers or tokens at its ends."""
        for key, is_used in (
            ("prompt.system", self._system is not None),
            ("data.dialogue.context_length, context_turns, context_tokens or include_labels", self._is_cut),
        ):
            if is_used:
                raise RowError(f"segments are used as they are; remove {key}, or the row")
        train_all = supervised and dialogue.get("train_all", True)
        segments = [
            Segment(message["content"], train_all, joined=False)
            if message.get("train")
            else Segment(message["content"], False, joined=index > 0)
            for index, message in enumerate(dialogue["messages"])
        ]
        if supervised:
            segments.append(Segment(dialogue["labels"][0], True))
        return FormattedText(tuple(segments), begins=False, needs_prompt=False)

    @property
    def _is_cut(self) -> bool:
        return context_of(self._settings) != HistoryLimits()

    @property
    def _hint(self) -> str:
        """What to write if the template refuses a dialogue that was cut."""
        cut = ("context_length", "context_turns", "context_tokens")
        cuts = any(getattr(self._context, key) for key in cut)
        return "; context_turns cuts between questions" if cuts else ""

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        shown = [dict(message) for message in messages]
        if self._turns is not None:
            shown = self._turns.history(shown)
        if self._context != HistoryLimits():
            context = self._context if self._tokenizer is not None else self._context._replace(context_tokens=None)
            shown = history(shown, len(shown), context=context, count=self._count)
        if self._turns is not None:
            shown = list(self._turns.flat(shown))
        if self._system and not any(message["role"] == "system" for message in shown):
            shown.insert(0, {"role": "system", "content": self._system})
        return list(shown)

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _plain(
        self,
        dialogue: Mapping[str, Any],
        messages: Sequence[Message],
        answer: str | Message | None,
        *,
        packed: bool,
        train_all: bool,
    ) -> FormattedText:
        """Return the messages as text without a chat template, each after its speaker's name, joined by the delimiter.

        Every earlier answer is a segment, because a simulation keeps its tokens. If `packed`, earlier answers end as
        answers in the loss do; else they are one text with the rest of the prompt.

        Args:
            dialogue: The dialogue in the common form.
            messages: The messages before the answer.
            answer: The answer to learn; None in prediction.
            packed: Whether earlier answers end with the end-of-text token.
            train_all: Whether these are in the loss; otherwise only those with `learn` are.

        Raises:
            RowError: The dialogue has tools, tool calls or reasoning.
        """
        refuse_structure(dialogue)
        segments: list[Segment] = []
        text, delimiter = "", ""
        for message in messages:
            text += delimiter + self._speaker(message["role"])
            delimiter = self._settings.delimiter
            if message.get("train"):
                asked = Segment(text, False, joined=bool(segments))
                learned = train_all or message.get("learn", False)
                # An answer of the same turn has the tokens that the model has just generated: it starts at a boundary.
                joined = not packed and "learn" not in message
                segments += [asked, Segment(message["content"], learned, ends=packed, joined=joined)]
                text = ""
            else:
                text += message["content"]
        segments.append(Segment(text + delimiter + self._speaker("assistant"), False, joined=bool(segments)))
        if answer is not None:
            segments.append(Segment(str(answer), True))
        return FormattedText(tuple(segments), begins=True, ends=answer is not None)

    def _speaker(self, role: str) -> str:
        return str(getattr(self._settings.speakers, role))


class Rendering:
    """Render a dialogue with a chat template."""

    def __init__(self, chat: ChatTemplate, tools: Sequence[Mapping[str, Any]], hint: str) -> None:
        self._chat = chat
        self._tools = tools
        self._hint = hint
        """Added to the reason if the template refuses the dialogue."""

    def format(
        self, messages: Sequence[Message], answer: str | Message | None, *, packed: bool, train_all: bool
    ) -> FormattedText:
        """Return the segments of a dialogue.

        Args:
            messages: The messages before the answer.
            answer: The answer to learn, as text or as a message; None in prediction.
            packed: Whether earlier answers have their own segments.
            train_all: Whether these are in the loss; otherwise only those with `learn` are.
        """
        chat = self._chat
        conversation = [{key: message[key] for key in TEMPLATE_KEYS if key in message} for message in messages]
        segments: list[Segment] = []
        done, last = "", 0
        for index, message in enumerate(messages if packed else ()):
            learned = train_all or message.get("learn", False)
            # The first message of a dialogue answers none, and templates render no empty dialogue.
            if not message.get("train") or (index == 0 and not learned):
                continue
            prompt = self._apply(conversation[:index])
            whole = self._dialogue(conversation[: index + 1], marks=learned)
            asked = Segment(continued(done, prompt, answer=last), False, joined=bool(done))
            said = conversation[index] if is_structured(message) else message["content"]
            start = self._learned_from(conversation[:index], whole, after=last)
            turn = [*marked(asked, done, whole, start=start), *chat.answer_segments(prompt, whole, said)]
            segments += [part._replace(supervised=learned and part.supervised) for part in turn]
            if chat.needs_end:
                segments.append(Segment("", learned, ends=True, joined=True))
            done, last = whole.text, index + 1
        prompt = self._apply(conversation)
        chat.check(conversation, prompt, tools=self._tools)
        asked = Segment(continued(done, prompt, answer=last), False, joined=bool(done))
        if answer is None:
            return FormattedText((*segments, asked), begins=False)
        reply = {"content": answer} if isinstance(answer, str) else answer
        whole = self._dialogue([*conversation, {"role": "assistant", **reply}], marks=True)
        if train_all:
            segments += marked(asked, done, whole, start=self._learned_from(conversation, whole, after=last))
        else:
            segments.append(asked)
        segments += chat.answer_segments(prompt, whole, answer)
        return FormattedText(tuple(segments), begins=False, ends=chat.needs_end)

    def _learned_from(self, before: Sequence[Message], whole: Rendered, *, after: int) -> int:
        """Return where text begins that may be in the loss: after the answers that are not learned.

        Args:
            before: The messages before an answer.
            whole: The dialogue up to the answer.
            after: Number of messages up to the previous answer that is learned.

        Raises:
            RewrittenError: The template writes the messages differently if the answer follows.
        """
        if whole.marks is None or not any(message["role"] == "assistant" for message in before[after:]):
            return 0
        text = self._dialogue(before, marks=False).text
        continued(text, whole.text, answer=len(before))
        return len(text)

    def _dialogue(self, messages: Sequence[Message], *, marks: bool) -> Rendered:
        with self._refusals():
            return self._chat.dialogue(messages, marks=marks, tools=self._tools)

    def _apply(self, messages: Sequence[Message]) -> str:
        with self._refusals():
            return self._chat.apply(messages, prompt=True, tools=self._tools)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except ModelError as error:
            reason = f"{error.__cause__ or error}: the chat template refuses the dialogue{self._hint}"
            raise RowError(reason) from error


def resolved_mode(dialogue: DialogueConfig, *, chat: ChatTemplate | None) -> Mode:
    """Return the configured mode, or the best one for the chat template."""
    if dialogue.mode != "auto":
        return dialogue.mode
    limited = context_of(dialogue) != HistoryLimits() or dialogue.include_outputs is not None
    if chat is None or limited or dialogue.labels == "all":
        return "squash"
    kind = rewritten_kind(chat)
    if kind is None:
        return "packed_dialogue"
    logger.info(
        "the chat template renders earlier turns of %s differently in longer dialogues: a row for each answer", kind
    )
    return "squash"


def rewritten_kind(chat: ChatTemplate) -> str | None:
    """Return the first kind of dialogue whose earlier turns the template rewrites; None if it rewrites none.

    Kinds that the template refuses are left out, except plain dialogues.
    """
    system = [{"role": "system", "content": chat.system or "SYSTEM"}]
    ask, more = ({"role": "user", "content": text} for text in ("QUESTION", "MORE"))
    plain = [{"role": "assistant", "content": "ANSWER"}]
    thought = [{"role": "assistant", "content": "ANSWER", "reasoning_content": "THOUGHT"}]
    result = {"role": "tool", "content": "RESULT", "name": TRIAL_NAME}
    called: list[Message] = [{"role": "assistant", "content": "", "tool_calls": [TRIAL_CALL]}, result, *plain]
    opening = system if chat.system else []
    kinds: tuple[tuple[str, list[Message], list[Any]], ...] = (
        ("dialogues", [*opening, ask, *plain], []),
        ("dialogues with a system message", [*system, ask, *plain], []),
        ("dialogues with reasoning", [*opening, ask, *thought], []),
        ("dialogues with tool calls", [*opening, ask, *called], [TRIAL_TOOL]),
    )
    for kind, messages, tools in kinds:
        try:
            stages = [
                chat.apply(messages[: index + 1], prompt=False, tools=tools)
                for index, message in enumerate(messages)
                if message["role"] == "assistant"
            ]
            whole = chat.apply([*messages, more], prompt=True, tools=tools)
        except (ModelError, RowError):
            if kind == "dialogues":
                return kind
            continue
        if not all(later.startswith(earlier) for earlier, later in pairwise([*stages, whole])):
            return kind
    return None


def answer_of(dialogue: Mapping[str, Any]) -> str | Message:
    """Return the answer to learn: text, or a message with tool calls or reasoning."""
    structured: Message | None = dialogue.get("answer")
    return str(dialogue["labels"][0]) if structured is None else structured


def refuse_structure(dialogue: Mapping[str, Any]) -> None:
    """Raise RowError if a dialogue has what only a chat template can write."""
    parts = [dialogue, dialogue.get("answer") or {}, *dialogue["messages"]]
    for key in ("tools", "tool_calls", "reasoning_content"):
        if any(part.get(key) for part in parts):
            raise RowError(
                f"the dialogue has {key}, which only a chat template can write, and none is used; write a base_model "
                f"with one, or data.dialogue: {{ignore_keys: [{key}]}}"
            )


def marked(asked: Segment, done: str, whole: Rendered, *, start: int) -> list[Segment]:
    """Return the text between an answer and the next one as segments, split at the template's marks if it has any.

    Args:
        asked: The text.
        done: The dialogue up to the first of the two answers.
        whole: The dialogue up to the second one.
        start: Where the marks of the second one begin.
    """
    if whole.marks is None:
        return [asked]
    return list(by_marks([asked], at=len(done), marks=[span for span in whole.marks if span[0] >= start]))


def continued(done: str, prompt: str, *, answer: int) -> str:
    """Return what `prompt` adds to `done`, the text up to message `answer`. Raise RewrittenError if it differs."""
    if not prompt.startswith(done):
        raise RewrittenError(
            f"the chat template renders the dialogue up to message {answer} differently once more messages follow, so "
            "not all answers can be learned in one row; write data.dialogue: {mode: squash}, or last_turn"
        )
    return prompt[len(done) :]
