"""A chat with a model: its messages, those that fit into the context of the model, and the file it is saved to."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from partita.runs.files import new_file, output_file, why_not_written
from partita_schema.common.json_text import json_bytes
from partita_schema.common.text import counted
from partita_schema.errors import DataError, WriteError, shortened

Message = dict[str, Any]
SUFFIX = ".jsonl"
FORMAT = 'JSON lines such as {"messages": [...]}'


class ChatPrompt(NamedTuple):
    """The prompt of the next answer."""

    input_ids: list[int]
    """Its tokens."""
    max_new_tokens: int
    """Most tokens of the answer, at least 1."""
    left_out: int
    """Number of messages at the beginning of the chat, without the system prompt, that are not in the prompt."""


@dataclass
class Conversation:
    """The messages of a chat. Every question but the last one has an answer."""

    system: str | None = None
    """The system prompt, which is in every prompt."""
    messages: list[Message] = field(default_factory=list)
    """Questions of the user and answers, in turn; an incomplete answer has `weight: 0`."""
    left_out: int = 0
    """Number of messages at the beginning that no longer fit into the context."""
    saved: dict[Path, bytes] = field(default_factory=dict)
    """The line that was last written to each file."""

    def reset(self) -> None:
        """Remove all messages; the system prompt stays."""
        self.messages = []
        self.left_out = 0
        self.saved = {}

    def add_question(self, text: str) -> None:
        """Add a message of the user."""
        self.messages.append({"role": "user", "content": text})

    def add_answer(self, text: str, *, is_complete: bool) -> None:
        """Add an answer. An incomplete one was stopped or reached its limit; training does not learn how it ends."""
        weight = {} if is_complete else {"weight": 0}
        self.messages.append({"role": "assistant", "content": text, **weight})

    def remove_last(self, role: str) -> Message | None:
        """Remove the last message if it has this role, and return it."""
        is_last = self.messages and self.messages[-1]["role"] == role
        return self.messages.pop() if is_last else None

    def prompt(
        self, encode: Callable[[Sequence[Message]], list[int]], *, context_tokens: int, max_new_tokens: int
    ) -> ChatPrompt:
        """Return the prompt of the next answer. The oldest questions are left out, with their answers, until it fits.

        At most half of the context is kept free for the answer, and all of it if the prompt is short.

        Args:
            encode: Returns the tokens of messages, up to where the answer starts.
            context_tokens: Most tokens of a prompt and its answer.
            max_new_tokens: Most tokens of an answer.

        Raises:
            DataError: If the system prompt and the last question alone are too long.
        """
        reserved = min(max_new_tokens, max(context_tokens // 2, 1))
        starts = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        for start in [index for index in starts if index >= min(self.left_out, starts[-1])]:
            input_ids = encode(self._shown(start))
            is_last = start == starts[-1]
            if len(input_ids) + (1 if is_last else reserved) <= context_tokens:
                self.left_out = start
                return ChatPrompt(input_ids, min(max_new_tokens, context_tokens - len(input_ids)), start)
        raise DataError(
            f"the message has {counted(len(input_ids), 'token')} with the system prompt and the chat template, and the "
            f"context holds {counted(context_tokens, 'token')} with the answer; write a shorter message"
        )

    def _shown(self, start: int) -> list[Message]:
        """Return the system prompt and the messages from `start` as the chat template reads them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [{key: message[key] for key in ("role", "content")} for message in self.messages[start:]]

    def save(self, path: Path) -> str:
        """Append the chat to a JSON-lines file, in the format that `train` reads, and return what was written.

        If the chat is already the last line of the file, that line is replaced. All other lines are kept.

        Raises:
            DataError: If there is no answer, or the path is no file of dialogues.
            WriteError: If the file cannot be written.
        """
        if not any(message["role"] == "assistant" for message in self.messages):
            raise DataError("there is no answer to save yet; write a message first")
        if path.suffix != SUFFIX:
            raise DataError(f"{path}: a chat is saved as JSON lines; write a name that ends in {SUFFIX}")
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        line = json_bytes({"messages": system + self.messages}) + b"\n"
        try:
            path = output_file(path.expanduser()).absolute()
            before = path.read_bytes() if path.exists() else b""
            own = self.saved.get(path)
            kept = before.removesuffix(own) if own is not None else before
            check_is_dialogues(kept, path)
            if kept and not kept.endswith(b"\n"):
                kept += b"\n"
            with new_file(path) as file:
                file.write(kept + line)
        except OSError as error:
            raise WriteError(why_not_written(error, path)) from error
        self.saved[path] = line
        incomplete = sum("weight" in message for message in self.messages)
        note = f"; {counted(incomplete, 'incomplete answer')} with weight 0" if incomplete else ""
        lines = counted(kept.count(b"\n") + 1, "chat")
        return f"saved {counted(len(self.messages), 'message')} to {path}, which has {lines}{note}"


def check_is_dialogues(text: bytes, path: Path) -> None:
    """Raise DataError if the first line of a file is not a dialogue, so that no other file is changed."""
    first = text.strip().partition(b"\n")[0]
    if not first:
        return
    try:
        row = json.loads(first)
    except ValueError:
        row = None
    if not isinstance(row, dict) or "messages" not in row:
        begins = shortened(first.decode("utf8", "replace"))
        raise DataError(f"{path} is not {FORMAT}: its first line is {begins!r}; write the name of another file")
