"""Chat templates of exports, and the comparison of the texts that they render."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.data.formatting.chat import ChatTemplate
from partita.pipeline.build import LocalPipeline
from partita_schema.errors import ModelError

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


SET = "the chat template sets {}, as the run did{}"
UNLESS = "; programs may pass other values as chat_template_kwargs"
OTHER_PROMPTS = (
    "prompts of the exported chat template end {!r}, and those of the run {!r}; write prompts like those of the run in "
    "the program that uses the export"
)
END = 20
"""Characters of the end of a prompt in a note."""


@dataclass(frozen=True)
class TemplateOfRun:
    """What the chat template of an export begins with, so that it renders the prompts of a run."""

    prefix: str = ""
    """Assignments of variables; empty if the template renders the prompts of the run without them."""
    note: str | None = None
    """What a user has to know about the template."""

    def write(self, folder: Path) -> None:
        """Begin the chat templates of a saved tokenizer with the assignments."""
        if self.prefix:
            for path in [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]:
                path.write_text(self.prefix + path.read_text(encoding="utf8"), encoding="utf8")


def find_template_of_run(tokenizer: Any, pipeline: LocalPipeline, *, overridable: bool) -> TemplateOfRun:
    """Return how the chat template of an export renders the prompts of a run.

    A run renders its prompts with `prompt.chat_template_kwargs`, and without thinking unless they ask for it. Other
    programs do not know these values.

    Args:
        tokenizer: The tokenizer of the model.
        pipeline: The pipeline of the run.
        overridable: Whether values that a program passes take precedence. llama.cpp always passes some.
    """
    if not pipeline.row_tokenizer.formatter.chat:
        return TemplateOfRun()
    template = chat_template_of_run(tokenizer, pipeline)
    texts = [render_as_run(template, messages) for messages in DIALOGUES]
    if texts == [render(tokenizer, messages) for messages in DIALOGUES]:
        return TemplateOfRun()
    values = {"enable_thinking": False, **pipeline.config.prompt.chat_template_kwargs}
    prefix = "".join(assignment(name, value, overridable=overridable) for name, value in values.items())
    if texts == [render(tokenizer, messages, prefix=prefix) for messages in DIALOGUES]:
        named = ", ".join(f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
        return TemplateOfRun(prefix, SET.format(named, UNLESS if overridable else ""))
    ends = [(text or "")[-END:] for text in (render(tokenizer, DIALOGUES[0]), texts[0])]
    return TemplateOfRun("", OTHER_PROMPTS.format(*ends))


def chat_template_of_run(tokenizer: Any, pipeline: LocalPipeline) -> ChatTemplate:
    """Return the chat template with the values that a run passes to it."""
    return ChatTemplate(tokenizer, system=None, arguments=pipeline.config.prompt.chat_template_kwargs)


def render_as_run(template: ChatTemplate, messages: Messages) -> str | None:
    """Return a dialogue as a run renders it, with the beginning of an answer; None if the template refuses it."""
    try:
        return template.apply(messages, prompt=True)
    except ModelError:
        return None


def assignment(name: str, value: Any, *, overridable: bool) -> str:
    """Return Jinja statements that assign a JSON value to a variable, unless it has one if that is `overridable`."""
    assigned = f"{{% set {name} = {value!r} %}}"  # Jinja reads the literals of Python
    return f"{{% if {name} is not defined %}}{assigned}{{% endif %}}" if overridable else assigned


def render(tokenizer: Any, messages: Messages, *, prefix: str = "") -> str | None:
    """Return a dialogue as the chat template renders it, with the beginning of an answer; None if it is refused.

    Args:
        tokenizer: The tokenizer with the template.
        messages: The dialogue.
        prefix: Statements before the template.
    """
    from jinja2 import TemplateError

    template = {"chat_template": prefix + tokenizer.get_chat_template()} if prefix else {}
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **template)
        return str(text)
    except (TemplateError, ValueError):
        return None


def same_rendering(tokenizer: Any, other: Callable[[Messages], str | None], *, prefix: str) -> bool | None:
    """Return whether another program renders the dialogues that a template accepts to the same bytes; None without one.

    Args:
        tokenizer: The tokenizer with the template.
        other: Renders a dialogue with the exported template.
        prefix: Statements before the exported template.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    texts = [render(tokenizer, messages, prefix=prefix) for messages in DIALOGUES]
    pairs = [(text, other(messages)) for text, messages in zip(texts, DIALOGUES, strict=True) if text is not None]
    return all(theirs is not None and ours.encode() == theirs.encode() for ours, theirs in pairs)
