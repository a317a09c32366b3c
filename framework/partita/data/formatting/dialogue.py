"""Format a dialogue as segments: its messages in order, and the answers to learn.

In packed mode all answers of a dialogue are learned, and each has its own segments. They are found by rendering the
dialogue message by message: the rendering up to an answer must start with the rendering up to the previous one. A
template that rewrites earlier turns (drops thoughts, writes a date, marks the last turn) is rejected, because inference
could never reproduce the text that was learned. Predictions for a packed model use the same segments, so that they have
the same tokens. In other modes the prompt is tokenized as one text.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from partita.data.dialogue import HistoryLimits, Mode, context_of, history
from partita.data.formatting.base import FormattedText, Segment
from partita.data.formatting.chat import ChatTemplate, Rendered, by_marks
from partita_schema.config import Config
from partita_schema.errors import ModelError, RewrittenError, RowError
from partita_schema.sections.dialogue import DialogueConfig

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


class DialogueFormatter:
    """Format dialogues in their standard form. The result depends only on the dialogue."""

    def __init__(self, config: Config, *, tokenizer: Any, chat: ChatTemplate | None) -> None:
        assert config.dialogue_input is not None
        self.name = config.dialogue_input.name
        """Name of the dialogue feature in rows."""
        self.mode = resolved_mode(config.data.dialogue, chat=chat)
        """How dialogues become rows."""
        self._tokenizer, self._chat = tokenizer, chat
        self._system = config.prompt.system
        self._settings = config.data.dialogue
        self._context = context_of(config.data.dialogue) if self.mode != "packed_dialogue" else HistoryLimits()

    def format(self, dialogue: Mapping[str, Any], *, supervised: bool) -> FormattedText:
        """Return the dialogue as text, with the answer to learn if `supervised`. Raise RowError if it is invalid."""
        messages = self._shown(dialogue["messages"])
        packed = self.mode == "packed_dialogue"
        train_all = packed and supervised and dialogue.get("train_all", True)
        answer = dialogue["labels"][0] if supervised else None
        if self._chat is None:
            return self._plain(messages, answer, packed=packed, train_all=train_all)
        try:
            return self._rendered(self._chat, messages, answer, packed=packed, train_all=train_all)
        except RewrittenError:
            if train_all:
                raise
            return self._rendered(self._chat, messages, answer, packed=False, train_all=False)

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        shown = [dict(message) for message in messages]
        if self._context != HistoryLimits():
            context = self._context if self._tokenizer is not None else self._context._replace(context_tokens=None)
            shown = history(shown, len(shown), context=context, count=self._count)
        if self._system and not any(message["role"] == "system" for message in shown):
            shown.insert(0, {"role": "system", "content": self._system})
        return list(shown)

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    # With a chat template

    def _rendered(
        self, chat: ChatTemplate, messages: list[Message], answer: str | None, *, packed: bool, train_all: bool
    ) -> FormattedText:
        """Return segments rendered by the chat template.

        Args:
            chat: The chat template.
            messages: The messages before the answer.
            answer: The answer to learn; None in prediction.
            packed: Whether earlier answers have their own segments.
            train_all: Whether these are in the loss.
        """
        conversation = [{"role": message["role"], "content": message["content"]} for message in messages]
        segments: list[Segment] = []
        done, last = "", 0
        for index, message in enumerate(messages if packed else ()):
            if not message.get("train"):
                continue
            prompt = self._apply(chat, conversation[:index], prompt=True)
            whole = self._dialogue(chat, conversation[: index + 1], marks=train_all)
            asked = Segment(continued(done, prompt, answer=last), False, joined=bool(done))
            turn = [*marked(asked, done, whole), *chat.answer_segments(prompt, whole, message["content"])]
            segments += [part._replace(supervised=train_all and part.supervised) for part in turn]
            if chat.needs_end:
                segments.append(Segment("", train_all, ends=True, joined=True))
            done, last = whole.text, index + 1
        prompt = self._apply(chat, conversation, prompt=True)
        asked = Segment(continued(done, prompt, answer=last), False, joined=bool(done))
        if answer is None:
            return FormattedText((*segments, asked), begins=False)
        whole = self._dialogue(chat, [*conversation, {"role": "assistant", "content": answer}], marks=True)
        segments += marked(asked, done, whole) if train_all else [asked]
        segments += chat.answer_segments(prompt, whole, answer)
        return FormattedText(tuple(segments), begins=False, ends=chat.needs_end)

    def _dialogue(self, chat: ChatTemplate, messages: Sequence[Mapping[str, str]], *, marks: bool) -> Rendered:
        with self._refusals():
            return chat.dialogue(messages, marks=marks)

    def _apply(self, chat: ChatTemplate, messages: Sequence[Mapping[str, str]], *, prompt: bool) -> str:
        with self._refusals():
            return chat.apply(messages, prompt=prompt)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except ModelError as error:
            cut = ("context_length", "context_turns", "context_tokens")
            hint = "; context_turns cuts between questions" if any(getattr(self._context, key) for key in cut) else ""
            raise RowError(f"{error.__cause__ or error}: the chat template refuses the dialogue{hint}") from error

    # Without a chat template

    def _plain(
        self, messages: Sequence[Message], answer: str | None, *, packed: bool, train_all: bool
    ) -> FormattedText:
        """Return the messages as text without a chat template, each after its speaker's name, joined by the delimiter.

        Every earlier answer is a segment, because a simulation keeps its tokens. If `packed`, earlier answers end as
        answers in the loss do; else they are one text with the rest of the prompt.

        Args:
            messages: The messages before the answer.
            answer: The answer to learn; None in prediction.
            packed: Whether earlier answers end with the end-of-text token.
            train_all: Whether these are in the loss.
        """
        segments: list[Segment] = []
        text, delimiter = "", ""
        for message in messages:
            text += delimiter + self._speaker(message["role"])
            delimiter = self._settings.delimiter
            if message.get("train"):
                asked = Segment(text, False, joined=bool(segments))
                segments += [asked, Segment(message["content"], train_all, ends=packed, joined=not packed)]
                text = ""
            else:
                text += message["content"]
        segments.append(Segment(text + delimiter + self._speaker("assistant"), False, joined=bool(segments)))
        if answer is not None:
            segments.append(Segment(answer, True))
        return FormattedText(tuple(segments), begins=True, ends=answer is not None)

    def _speaker(self, role: str) -> str:
        return str(getattr(self._settings.speakers, role))


def resolved_mode(dialogue: DialogueConfig, *, chat: ChatTemplate | None) -> Mode:
    """Return the configured mode, or the best one for the chat template."""
    if dialogue.mode != "auto":
        return dialogue.mode
    if chat is None or context_of(dialogue) != HistoryLimits() or dialogue.labels == "all":
        return "squash"
    if leaves_turns(chat):
        return "packed_dialogue"
    logger.info("the chat template writes earlier turns in another way as a dialogue grows: a row for each answer")
    return "squash"


def leaves_turns(chat: ChatTemplate) -> bool:
    """Return whether a dialogue of two exchanges starts with the rendering of its first one."""
    system = [{"role": "system", "content": chat.system}] if chat.system else []
    first = [*system, {"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}]
    try:
        before = chat.apply(first, prompt=False)
        return chat.apply([*first, {"role": "user", "content": "MORE"}], prompt=True).startswith(before)
    except ModelError:
        return False


def marked(asked: Segment, done: str, whole: Rendered) -> list[Segment]:
    """Return the text between `done` and an answer as segments, split at the template's marks if it has any."""
    return [asked] if whole.marks is None else list(by_marks([asked], at=len(done), marks=whole.marks))


def continued(done: str, prompt: str, *, answer: int) -> str:
    """Return what `prompt` adds to `done`, the text up to message `answer`. Raise RewrittenError if it differs."""
    if not prompt.startswith(done):
        raise RewrittenError(
            f"the chat template writes message {answer} or what stands before it in another way once the dialogue goes "
            "on, so not all answers can be learned in one row; write data.dialogue: {mode: squash}, or last_turn"
        )
    return prompt[len(done) :]
