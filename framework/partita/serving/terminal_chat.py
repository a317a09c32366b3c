"""A chat in the terminal, or of messages on standard input: commands, and answers as they are generated."""

import queue
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO

from partita.runs.log import terminal_width, wrap
from partita.serving.conversation import ChatPrompt, Conversation
from partita.serving.engine import EngineStoppedError
from partita.serving.request_queue import AnswerEnd, AnswerPiece, AnswerRequest
from partita_schema.common.text import counted
from partita_schema.errors import DataError, JobError, PartitaError

if TYPE_CHECKING:
    from partita.lm.base import Generated, GenerationOptions
    from partita.serving.engine import ServingEngine

HINT = "Enter sends. Esc Enter, or a backslash at the end, starts a new line. /help lists the commands, Ctrl-D ends."
UNCHANGED = "nothing was added to the chat"
HELP = """\
/system TEXT      use a system prompt; without TEXT, that of the file
/regenerate       answer the last message again
/reset            start a new chat; the system prompt stays
/save FILE.jsonl  append the chat to a file that partita train reads
/help             this list
/quit             end; so does Ctrl-D
Ctrl-C            stop the answer
//TEXT            send a message that begins with a slash"""
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and marks that reorder text: a model must not be able to control the terminal."""


class ChatSettings(NamedTuple):
    """How answers are generated."""

    options: "GenerationOptions"
    max_new_tokens: int
    seed: int | None = None
    """Seed of sampling; None draws one."""


class Terminal(Protocol):
    """The input of messages, and the output of answers and notes."""

    is_interactive: bool
    """Whether a person writes the messages, and errors do not end the chat."""
    answers: TextIO
    notes: TextIO

    def read(self) -> str:
        """Return the next message. Raise EOFError after the last one."""


class Quit(Exception):  # noqa: N818 -- not an error
    """The user has ended the chat."""


@dataclass
class TerminalChat:
    """A chat between a terminal and an engine."""

    engine: "ServingEngine"
    settings: ChatSettings
    terminal: Terminal
    conversation: Conversation

    def __post_init__(self) -> None:
        seed = self.settings.seed
        self._seed = secrets.token_bytes(16) if seed is None else str(seed).encode()
        self._num_answers = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/regenerate": self._regenerate,
            "/reset": self._reset,
            "/save": self._save,
            "/help": self._help,
            "/quit": self._quit,
        }

    def run(self) -> None:
        """Answer messages until the end of the input. Errors end it if the input is not a terminal."""
        while True:
            try:
                text = self.terminal.read()
                if text.strip():
                    self._handle(text)
            except (EOFError, Quit):
                return
            except KeyboardInterrupt:
                if not self.terminal.is_interactive:
                    raise
                self._note("Ctrl-D or /quit ends the chat")
            except PartitaError as error:
                if not self.terminal.is_interactive:
                    raise
                self._note(f"error: {error}")

    def _handle(self, text: str) -> None:
        """Run a command, or answer a message."""
        if text.startswith("/") and not text.startswith("//"):
            name, _, argument = text.strip().partition(" ")
            command = self._commands.get(name)
            if command is None:
                known = ", ".join(self._commands)
                raise DataError(f"there is no command {name}; write one of {known}, or //{text[1:]} to send the text")
            command(argument.strip())
            return
        self.conversation.add_question(text.removeprefix("/"))
        self._answer_or(lambda: self.conversation.remove_last("user"))

    def _regenerate(self, argument: str) -> None:
        answer = self.conversation.remove_last("assistant")
        if answer is None:
            raise DataError("there is no answer to generate again; write a message first")
        self._answer_or(lambda: self.conversation.messages.append(answer))

    def _set_system(self, argument: str) -> None:
        self.conversation.system = argument or None
        of_file = self.engine.prompts.system
        if argument:
            self._note("system prompt set")
        else:
            self._note("no system prompt" if of_file is None else f"the system prompt is that of the file: {of_file}")

    def _reset(self, argument: str) -> None:
        self.conversation.reset()
        self._note("new chat")

    def _save(self, argument: str) -> None:
        if not argument:
            raise DataError("write the file after the command, such as /save chat.jsonl")
        self._note(self.conversation.save(Path(argument)))

    def _help(self, argument: str) -> None:
        self._note(HELP)

    def _quit(self, argument: str) -> None:
        raise Quit

    def _answer_or(self, undo: Callable[[], object]) -> None:
        """Generate an answer; after an error or an answer without text, restore the chat."""
        num_messages = len(self.conversation.messages)
        try:
            self._answer()
        finally:
            if len(self.conversation.messages) == num_messages:
                undo()

    def _answer(self) -> None:
        """Write the next answer, add it to the conversation, and write a line about it."""
        prompt = self.conversation.prompt(
            self.engine.prompts.encode,
            context_tokens=self.engine.context_tokens,
            max_new_tokens=self.settings.max_new_tokens,
        )
        started = time.monotonic()
        text, generated = self._generate(prompt)
        is_cut = generated is None or generated.finish_reason == "length"
        has_text = bool(text.strip())
        if has_text:
            self.conversation.add_answer(text, is_complete=not is_cut)
        if generated is None:
            self._note("stopped" if has_text else f"stopped; {UNCHANGED}")
        elif not has_text:
            self._note(f"the model answered without any text; {UNCHANGED}")
        else:
            seconds = time.monotonic() - started
            self._note("; ".join(self._facts(prompt, generated.num_tokens, seconds=seconds, is_cut=is_cut)))

    def _generate(self, prompt: ChatPrompt) -> tuple[str, "Generated | None"]:
        """Write an answer while it is generated; return its text and the whole, None if Ctrl-C has stopped it."""
        self._num_answers += 1
        key = self._seed + b":%d" % self._num_answers
        events: queue.SimpleQueue[AnswerPiece | AnswerEnd] = queue.SimpleQueue()
        request = AnswerRequest(prompt.input_ids, prompt.max_new_tokens, self.settings.options, key, streams=True)
        try:
            ticket = self.engine.submit(request, events.put)
        except EngineStoppedError as error:
            raise JobError(str(error)) from None
        text = ""
        try:
            while isinstance(event := events.get(), AnswerPiece):
                text += event.text
                self._write(event.text)
        except KeyboardInterrupt:
            ticket.cancel()
            if not self.terminal.is_interactive:
                raise
            self._write("\n")
            return text, None
        self._write("\n")
        if event.generated is None:
            raise JobError(str(event.error))
        return text, event.generated

    def _facts(self, prompt: ChatPrompt, num_tokens: int, *, seconds: float, is_cut: bool) -> Iterator[str]:
        """Yield what is shown after an answer."""
        yield f"{counted(num_tokens, 'token')}, {num_tokens / max(seconds, 1e-9):.1f} tokens/s"
        if prompt.left_out:
            were = "message was" if prompt.left_out == 1 else "messages were"
            context = counted(self.engine.context_tokens, "token")
            yield f"the first {prompt.left_out} {were} left out, the context holds {context}"
        if is_cut:
            yield f"the answer ended at the limit of {counted(prompt.max_new_tokens, 'token')}"

    def _write(self, text: str) -> None:
        """Write a piece of an answer; on a terminal without control characters."""
        file = self.terminal.answers
        file.write(printable(text) if file.isatty() else text)
        file.flush()

    def _note(self, text: str) -> None:
        """Write a note, dim on a terminal."""
        file = self.terminal.notes
        lines = wrap(text, width=terminal_width())
        file.write(f"\x1b[2m{lines}\x1b[0m\n" if file.isatty() else f"{lines}\n")
        file.flush()


def printable(text: str) -> str:
    """Return a text that cannot control the terminal."""
    return UNPRINTABLE.sub("\ufffd", text)
