"""How dialogues become rows."""

from typing import Literal

from pydantic import model_validator

from partita_schema.base import Base, Count, Flag, Name, broken, changed


class Speakers(Base):
    """What stands before a piece by its role."""

    system: str = ""
    """Before instructions."""
    user: str = ""
    """Before a question, such as `"User: "`."""
    assistant: str = ""
    """Before an answer, such as `"Assistant: "`."""
    tool: str = ""
    """Before what a tool gave."""


class DialogueConfig(Base):
    """How dialogues become rows to learn from; used with an input feature of type dialogue."""

    mode: Literal["auto", "packed_dialogue", "squash", "last_turn"] = "auto"
    """packed_dialogue: one row a dialogue, in which all answers are learned. squash: a row for each answer, behind
    what was said before. last_turn: a row for the last answer alone. auto: packed_dialogue with a chat template that
    leaves earlier turns as they are, else squash."""
    format: Literal[
        "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "chosen_rejected", "parlai", "turns"
    ] = "auto"
    """How the data writes dialogues. auto: told from each row's columns."""
    ignore_keys: tuple[Name, ...] = ()
    """Keys of messages that are left out, such as id or tool_calls. A message with any other key that is not read makes
    its row unusable. The columns tools and functions are left out by name as well."""
    include_labels: Flag = True
    """Whether earlier answers are part of what was said before (squash, last_turn)."""
    context_length: Count | None = None
    """Pieces of the dialogue that a row shows, what was asked last included; question and answer count one each.
    Default: all."""
    context_turns: Count | None = None
    """Exchanges of question and answer that a row shows, the last question's included. Default: all."""
    context_tokens: Count | None = None
    """Tokens of what was said that a row shows; the oldest pieces go first. Default: all."""
    labels: Literal["first", "all", "random"] = "first"
    """Which of several right answers is learned: the first, each in a row of its own, or one at random, seeded."""
    delimiter: str = "\n"
    """What stands between pieces where there is no chat template."""
    speakers: Speakers = Speakers.model_construct()
    """What stands before a piece where there is no chat template."""

    @model_validator(mode="after")
    def whole_dialogues_are_not_cut(self) -> "DialogueConfig":
        if self.mode == "packed_dialogue":
            for key in ("include_labels", "context_length", "context_turns", "context_tokens"):
                if changed(self, key):
                    raise broken(f"{key} has no effect on mode: packed_dialogue; write mode: squash", at=key)
            if self.labels == "all":
                raise broken("labels: all needs a row for each answer; write mode: squash", at="labels")
        return self
