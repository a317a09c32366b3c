"""Comparison of the text that a chat template renders."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, str]]

SYSTEM, USER, ANSWER = "Be brief.", 'Is 2 < 3 & "true"?', "Yes.\nIt is."
DIALOGUES: tuple[Messages, ...] = (
    ({"role": "user", "content": USER},),
    ({"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}),
    (
        {"role": "user", "content": USER},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": " Why?\n"},
    ),
    (
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": USER},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "Überlege \N{GRINNING FACE}"},
    ),
)
"""Dialogues that are rendered; a template may refuse some of them."""


def rendered(tokenizer: Any) -> list[str | None] | None:
    """Return the dialogues as the chat template of a tokenizer renders them; None without a template.

    A dialogue that the template refuses is None.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    return [render(tokenizer, messages) for messages in DIALOGUES]


def render(tokenizer: Any, messages: Messages) -> str | None:
    """Return a dialogue as the chat template renders it, with the beginning of an answer; None if it is refused."""
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
    except (TemplateError, ValueError):
        return None


def same_rendering(tokenizer: Any, other: Callable[[Messages], str | None]) -> bool | None:
    """Return whether another program renders the dialogues that a template accepts to the same bytes; None without one.

    Args:
        tokenizer: The tokenizer with the template.
        other: Renders a dialogue with the exported template.
    """
    texts = rendered(tokenizer)
    if texts is None:
        return None
    pairs = [(text, other(messages)) for text, messages in zip(texts, DIALOGUES, strict=True) if text is not None]
    return all(theirs is not None and ours.encode() == theirs.encode() for ours, theirs in pairs)
