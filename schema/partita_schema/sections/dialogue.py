"""How dialogues become training rows."""

from typing import Literal

from pydantic import field_validator, model_validator

from partita_schema.base import ConfigModel, Name, PositiveInt, StrictBool, is_set, rule_error
from partita_schema.common.text import nearest
from partita_schema.dialogues.formats import STANDARD_COLUMNS


class Speakers(ConfigModel):
    """Text before each message, by role."""

    system: str = ""
    """Text before a system message."""
    user: str = ""
    """Text before a user message, such as `"User: "`."""
    assistant: str = ""
    """Text before an assistant message, such as `"Assistant: "`."""
    tool: str = ""
    """Text before a tool result."""


class DialogueConfig(ConfigModel):
    """How dialogues become training rows; used with an input feature of type dialogue."""

    mode: Literal["auto", "packed_dialogue", "squash", "last_turn"] = "auto"
    """packed_dialogue: one row per dialogue, with the loss on all answers. squash: one row per answer, with the
    messages before it as the prompt. last_turn: one row for the last answer only. auto: packed_dialogue if the chat
    template does not change earlier turns, otherwise squash."""
    format: Literal[
        "auto",
        "messages",
        "sharegpt",
        "alpaca",
        "prompt_completion",
        "chosen_rejected",
        "parlai",
        "turns",
        "chatml",
        "segments",
    ] = "auto"
    """Format of the dialogues in the data. auto: detected from the columns of each row."""
    columns: dict[str, Name] = {}
    """Names of columns in the data, by the name that the format has for them, such as `{instruction: question, output:
    answer}`. Default: the names of the format."""
    ignore_keys: tuple[Name, ...] = ()
    """Message keys to ignore, such as id or reasoning_content. A row is unusable if a message has any other unknown
    key. List the columns system, input, history, tools, functions, images, videos and audios here to ignore them."""
    include_labels: StrictBool = True
    """Include earlier answers in the prompt (squash and last_turn)."""
    context_length: PositiveInt | None = None
    """Number of most recent messages in the prompt, including the question to answer; questions and answers count one
    each. Default: all."""
    context_turns: PositiveInt | None = None
    """Number of most recent exchanges (question and answer) in the prompt, including the question to answer. Default:
    all."""
    context_tokens: PositiveInt | None = None
    """Maximum number of prompt tokens from messages; the oldest messages are dropped first. Default: no limit."""
    answers: Literal["together", "in_sequence"] = "together"
    """How a turn with several outputs is answered. together: as one JSON object; in_sequence: one output after the
    other in the order of the file, each with its own constraint and after the outputs before it."""
    questions: dict[Name, str] = {}
    """Message of the user before an output that follows another one in the same turn, by output (in_sequence). Default:
    the name of the output."""
    include_outputs: tuple[Name, ...] | None = None
    """Outputs that earlier answers in the prompt show (squash and last_turn). Default: all."""
    labels: Literal["first", "all", "random"] = "first"
    """Training target if a question has several correct answers. first: the first one; all: one row per answer; random:
    one at random, seeded."""
    delimiter: str = "\n"
    """Text between messages, for models without a chat template."""
    speakers: Speakers = Speakers.model_construct()
    """Text before each message, for models without a chat template."""

    @field_validator("columns")
    @classmethod
    def columns_are_those_of_formats(cls, columns: dict[str, str]) -> dict[str, str]:
        unknown = next((name for name in columns if name not in STANDARD_COLUMNS), None)
        if unknown is not None:
            near = nearest(unknown, STANDARD_COLUMNS)
            raise rule_error(
                f"no format has a column {unknown!r}; write the format's name first, as in {{output: answer}}"
                + (f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(STANDARD_COLUMNS)}"),
                at=unknown,
            )
        return columns

    @model_validator(mode="after")
    def whole_dialogues_are_not_cut(self) -> "DialogueConfig":
        if self.mode == "packed_dialogue":
            for key in ("include_labels", "include_outputs", "context_length", "context_turns", "context_tokens"):
                if is_set(self, key):
                    raise rule_error(f"{key} has no effect on mode: packed_dialogue; write mode: squash", at=key)
            if self.labels == "all":
                raise rule_error("labels: all needs a row for each answer; write mode: squash", at="labels")
        return self
