"""A chat template as a template of ollama, which is written in Go's template language.

A Jinja template cannot be translated in general. Most chat templates write each message as its content between two
texts that depend on its role. These texts are found by rendering dialogues whose contents are marks, and the result is
compared with what the chat template renders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jinja2 import TemplateError

from partita.export.templates import DIALOGUES
from partita_schema.errors import ModelError

Message = Mapping[str, str]

MARKS = tuple(f"\N{BLACK SQUARE}{number}\N{BLACK SQUARE}" for number in range(3))
"""Contents of messages, which occur in no template."""
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class MessageTexts:
    """The texts around messages."""

    beginning: str
    """Text before the first message."""
    around: Mapping[str, tuple[str, str]]
    """Texts before and after the content of a message, by role."""
    answer: str
    """Text before an answer that is generated."""
    default_system: str | None = None
    """Content of the system message that is written if there is none."""

    def render(self, messages: Sequence[Message]) -> str:
        """Return a dialogue with the beginning of an answer."""
        if self.default_system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.default_system}, *messages]
        contents = [f"{message['content']}".join(self.around[message["role"]]) for message in messages]
        return f"{self.beginning}{''.join(contents)}{self.answer}"

    def last_user_message(self, prompt: str) -> str:
        """Return the content of the last message of a prompt, which is one of a user."""
        before, after = self.around["user"]
        return prompt.removesuffix(self.answer).removesuffix(after).rpartition(before)[2] if before else prompt

    def go(self, *, with_beginning: bool) -> str:
        """Return the template of ollama."""
        branches = [
            f'if eq .Role "{role}" }}}}{literal(before)}{{{{ .Content }}}}{literal(after)}{{{{ '
            for role, (before, after) in self.around.items()
        ]
        messages = f"{{{{ range .Messages }}}}{{{{ {'else '.join(branches)}end }}}}{{{{ end }}}}"
        beginning = literal(self.beginning) if with_beginning else ""
        if self.default_system == "":  # a Modelfile has no empty SYSTEM
            beginning += f"{{{{ if not .System }}}}{literal(''.join(self.around['system']))}{{{{ end }}}}"
        return f"{beginning}{messages}{literal(self.answer)}"


def literal(text: str) -> str:
    """Return a text as it is written in a Go template."""
    return text.replace("{{", '{{ "{{" }}')


class Apply(Protocol):
    """Renders a dialogue with a chat template."""

    def __call__(self, messages: Sequence[Message], *, prompt: bool) -> str:
        """Return the dialogue, with the beginning of an answer if `prompt`."""


def find_message_texts(apply: Apply, *, bos_token: str | None) -> MessageTexts | None:
    """Return the texts around messages of a chat template; None if it does not write messages in this form.

    Contents without white space around them are assumed, which many templates remove.

    Args:
        apply: Renders a dialogue with the template.
        bos_token: The token before texts, if there is one.
    """
    try:
        texts = take_apart(apply, bos_token=bos_token)
    except (TemplateError, ModelError, ValueError, KeyError):  # refused, or marks that are not where they should be
        return None
    for messages in DIALOGUES:
        stripped = [{**message, "content": message["content"].strip()} for message in messages]
        if not all(message["role"] in texts.around for message in stripped):
            continue
        if texts.render(stripped) != apply(stripped, prompt=True):
            return None
    return texts


def take_apart(apply: Apply, *, bos_token: str | None) -> MessageTexts:
    """Return the texts around messages, as far as marks show them. Raise ValueError if they do not."""
    first, second, third = MARKS
    user = {"role": "user", "content": first}
    alone = apply([user], prompt=False)
    head, after_user = split(alone, first)
    answer = apply([user], prompt=True).removeprefix(alone)
    dialogue = apply([user, {"role": "assistant", "content": second}, {"role": "user", "content": third}], prompt=False)
    _, between, rest = split(dialogue, first, second)
    middle = split(rest, third)[0]
    before_assistant = between.removeprefix(after_user)
    beginning = bos_token if bos_token and head.startswith(bos_token) else ""
    before_user = head.removeprefix(beginning)
    if not middle.endswith(before_user) and after_user and middle.startswith(after_user):
        before_user = middle.removeprefix(after_user)  # the head has a system message that the template writes
    around = {
        "user": (before_user, after_user),
        "assistant": (before_assistant, middle.removesuffix(before_user)),
    }
    default = None
    try:
        with_system = apply([{"role": "system", "content": second}, user], prompt=False)
    except (TemplateError, ModelError, ValueError):
        return MessageTexts(beginning, around, answer)
    before_system, separator, _ = split(with_system, second, first)
    before_system = before_system.removeprefix(beginning)
    inner = head.removeprefix(beginning).removeprefix(before_system)
    if head != beginning + before_user:
        default = inner.removesuffix(separator)
    around = {"system": (before_system, separator.removesuffix(before_user)), **around}
    return MessageTexts(beginning, around, answer, default)


def split(text: str, *marks: str) -> list[str]:
    """Return the parts of a text between marks, each of which occurs once. Raise ValueError if one does not."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            raise ValueError(f"{mark} is not in the text")
        parts.append(before)
    return [*parts, text]
