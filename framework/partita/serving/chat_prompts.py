"""From the messages of a chat to the prompt that a model was trained on, and from its settings to generation options.

A file with a dialogue input renders messages as its rows are rendered. For any other file, it is the chat template of
the tokenizer, with the file's `prompt.system` and `prompt.chat_template_kwargs`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from partita.data.formatting.chat import ChatTemplate
from partita.data.formatting.dialogue import TEMPLATE_KEYS
from partita.lm.base import GenerationOptions
from partita.pipeline.build import LocalPipeline
from partita_schema.dialogues.common_form import FormatError
from partita_schema.dialogues.formats import dialogue_of
from partita_schema.dialogues.messages import OPENAI, KnownKeys, messages_of
from partita_schema.dialogues.tools import tools_of
from partita_schema.errors import ModelError, RowError

Messages = Sequence[Mapping[str, Any]]

NO_TEMPLATE = (
    "the model has no chat template, so messages cannot be written as a prompt; send a text to /v1/completions, or "
    "rows to /predict"
)
NOT_A_CHAT = "the model writes no text to messages: {}; send rows to /predict"
SAMPLING_ONLY: dict[str, float] = {"top_p": 1, "top_k": 0, "min_p": 0}
"""Settings of requests that apply only to sampling, with the values that many clients send and that change nothing."""
NO_EFFECT = "{} has no effect on greedy generation"


class ChatPrompts:
    """Encodes the messages of chats as prompts."""

    def __init__(self, pipeline: LocalPipeline) -> None:
        self._pipeline, self._config = pipeline, pipeline.config
        self._feature = pipeline.config.dialogue_input if not pipeline.config.compares_answers else None

    @property
    def why_none(self) -> str | None:
        """Why the model does not answer messages; None if it does."""
        config = self._config
        if config.head_output is not None:
            return NOT_A_CHAT.format("it has a head")
        if config.scores_answers:
            return NOT_A_CHAT.format("it is a reward model")
        if config.answers_in_sequence:
            return NOT_A_CHAT.format("it answers several outputs in sequence")
        if self._pipeline.generation.scores_labels and self._feature is None and not self._has_template:
            return NOT_A_CHAT.format("it chooses among labels")
        if self._feature is None and not self._has_template:
            return NO_TEMPLATE
        return None

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self._pipeline.lm.tokenizer, "chat_template", None))

    @property
    def system(self) -> str | None:
        """The system prompt of messages that have none: `prompt.system` of the file."""
        return self._config.prompt.system or None

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None if the model has none."""
        if not self._has_template:
            return None
        prompt = self._config.prompt
        return ChatTemplate(self._pipeline.lm.tokenizer, system=prompt.system, arguments=prompt.chat_template_kwargs)

    @property
    def _ignored(self) -> tuple[str, ...]:
        """Keys of messages that are not read: the name of the author, and those that the file ignores."""
        return ("name", *(self._config.data.dialogue.ignore_keys if self._feature is not None else ()))

    def encode(self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the prompt tokens of a chat, which may be more than the context holds.

        Args:
            messages: Messages with role and content, also with tool calls, as in the OpenAI API.
            tools: Definitions of tools.

        Raises:
            RowError: The messages are invalid, or the template refuses them.
            ModelError: The model does not answer messages.
        """
        if self.why_none is not None:
            raise ModelError(self.why_none)
        shown = [without_empty(one) for one in messages]
        shown = [one for one in shown if not is_blank_system(one)]
        try:
            common = messages_of(shown, OPENAI, KnownKeys(ignored=self._ignored, allows_blank=True))
            defined = tools_of(list(tools), "tools") if tools else []
        except FormatError as error:
            raise RowError(str(error)) from None
        if not common:
            raise RowError("there are no messages; write at least one of role user")
        if self._feature is not None:
            return self._encode_dialogue(common, defined)
        assert self.template is not None, "checked above"
        if self.system and common[0]["role"] != "system":
            common = [{"role": "system", "content": self.system}, *common]
        for_template = [{key: message[key] for key in TEMPLATE_KEYS if key in message} for message in common]
        try:
            text = self.template.apply(for_template, prompt=True, tools=defined)
        except ModelError as error:
            raise RowError(str(error)) from error
        self.template.check(for_template, text, tools=defined)
        ids: list[int] = self._pipeline.lm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _encode_dialogue(self, messages: Sequence[Mapping[str, Any]], tools: Messages) -> list[int]:
        """Return the prompt tokens of a chat as those of a row of the file."""
        assert self._feature is not None, "the file has a dialogue input"
        try:
            dialogue = dialogue_of(messages) | {"train_all": False}
        except FormatError as error:
            raise RowError(str(error)) from None
        row = {self._feature.name: {**dialogue, "tools": tools} if tools else dialogue}
        row_tokenizer = replace(self._pipeline.row_tokenizer, max_length=None)  # the caller checks the length
        [prompt] = row_tokenizer.encode_prompts([row], [""])
        if prompt.error is not None:
            raise RowError(prompt.error)
        return list(prompt.input_ids)


def without_empty(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message without keys that are null, as clients send them back, and a blank text as an empty one."""
    if not isinstance(message, Mapping):
        return message
    return {
        key: "" if key == "content" and is_blank(value) else value
        for key, value in message.items()
        if value is not None
    }


def is_blank(content: object) -> bool:
    """Return whether the content of a message is a blank text, or a list of parts that are blank texts."""
    if isinstance(content, str):
        return not content.strip()
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and is_blank(part.get("text", 0)) for part in content
    )


def is_blank_system(message: Mapping[str, Any]) -> bool:
    """Return whether a message is a system message without text, as of a client whose user has written none."""
    return isinstance(message, Mapping) and message.get("role") == "system" and message.get("content") == ""


def ineffective_setting(options: GenerationOptions, settings: Mapping[str, Any]) -> str | None:
    """Return the first of these settings that has no effect, because decoding is greedy; None if there is none."""
    changing = (name for name, neutral in SAMPLING_ONLY.items() if settings.get(name, neutral) != neutral)
    return None if options.do_sample else next(changing, None)


def sampling_options(
    options: GenerationOptions,
    *,
    temperature: float | None = None,
    stop: Sequence[str] | None = None,
    stop_token_ids: Sequence[int] = (),
    logprobs: bool = False,
    top_logprobs: int | None = None,
    grammar: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> GenerationOptions:
    """Return the file's options, changed by those of a request.

    Args:
        options: The options of the file.
        temperature: 0 for greedy decoding; None for the value in the file.
        stop: Stop strings that replace those of the file; None to keep them.
        stop_token_ids: Further end tokens.
        logprobs: Whether log probabilities are reported.
        top_logprobs: How many of the most probable tokens are reported at each position; None for no positions.
        grammar: Grammar that constrains the answer.
        more: Further settings by transformers' names, such as `top_p`.
    """
    arguments = {**options.arguments, **(more or {}), "num_beams": 1}
    if temperature is not None:
        arguments["do_sample"] = temperature > 0
        if temperature > 0:
            arguments["temperature"] = temperature
    return replace(
        options,
        arguments=arguments,
        stop=options.stop if stop is None else tuple(stop),
        stop_token_ids=(*options.stop_token_ids, *stop_token_ids),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        grammar=grammar,
        labels=(),
        constraints=(),
    )
