"""Encode the prompts of successive turns, reusing the tokens that a model has read and generated.

Text and tokens do not correspond one to one: the tokens that a model generated can differ from the tokens of the same
text. To keep the KV cache valid, and answers as they were generated, the next prompt starts with the tokens of the
previous prompt and its answer.

Each prompt is rendered completely, like a row of a dialogue dataset. Its beginning keeps the earlier tokens if it
equals the earlier text and the end of that text is a boundary of segments and of tokens. Otherwise the whole prompt is
tokenized again, like the rows that the model is trained on: for chat templates that render all messages as one segment,
and when exchanges are dropped because a dialogue is too long. An exchange starts with the first message after an
answer; protected messages (`keep`) and the last exchange, which waits for an answer, are never dropped.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partita.data.episode import AGENT, Episode
from partita.data.formatting.row_tokenizer import PromptExample, RowTokenizer
from partita.generation.requests import AnswerSequence
from partita.lm.base import Generated
from partita.simulation.turn_answers import TurnAnswers
from partita.simulation.worlds import fill_template
from partita_schema.common.text import counted

logger = logging.getLogger(__name__)

Message = dict[str, Any]
NOTHING_ANSWERED: Mapping[str, str] = {}


def protected_indices(messages: Sequence[Message], keep: Collection[str]) -> list[int]:
    """Return the indices of messages that are never dropped.

    `keep` may contain `system`, the system messages at the start, and `first_user`, the first message of the user.
    """
    opening = 0
    while opening < len(messages) and messages[opening]["role"] == "system":
        opening += 1
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    return [
        *(range(opening) if "system" in keep else ()),
        *([first] if first is not None and "first_user" in keep else ()),
    ]


def exchanges(messages: Sequence[Message], protected: Collection[int]) -> list[list[int]]:
    """Group the indices of the messages that are not protected by exchange."""
    groups: list[list[int]] = []
    for index, message in enumerate(messages):
        if index in protected:
            continue
        answered = index > 0 and messages[index - 1]["role"] == "assistant"
        # Several messages can precede an answer, for example of a tool: only the first of them starts an exchange.
        if not groups or (answered and message["role"] != "assistant"):
            groups.append([])
        groups[-1].append(index)
    return groups


def without_oldest(messages: Sequence[Message], count: int, keep: Collection[str]) -> list[Message]:
    """Return the messages without the oldest `count` exchanges; the last exchange always stays."""
    protected = protected_indices(messages, keep)
    dropped = {index for group in exchanges(messages, protected)[:-1][:count] for index in group}
    return [message for index, message in enumerate(messages) if index not in dropped]


def droppable(messages: Sequence[Message], keep: Collection[str]) -> int:
    """Return the number of exchanges that can be dropped."""
    return max(0, len(exchanges(messages, protected_indices(messages, keep))) - 1)


@dataclass
class TurnPrompt:
    """The previous prompt and answer of an agent in an episode; empty if the next prompt cannot continue from them."""

    text: str = ""
    """Text of the prompt and the answer."""
    ids: list[int] = field(default_factory=list)
    """Tokens of the prompt and the answer, as the model has read and generated them."""
    dropped: int = 0
    """Number of oldest exchanges that are dropped; never decreases."""


@dataclass
class TurnEncoder:
    """Encodes an agent's prompts, and counts those whose earlier tokens could not be reused."""

    row_tokenizer: RowTokenizer
    name: str
    """Name of the dialogue input."""
    decode: Callable[..., str]
    """Converts the tokens of an answer to text without special tokens."""
    agent: str = AGENT
    """Agent whose prompts are encoded."""
    prompt: str | None = None
    """System prompt that only this agent sees, with `{column}` for values of the task."""
    max_prompt_tokens: int | None = None
    """Prompt length in tokens above which exchanges are dropped; None to drop nothing."""
    keep: Collection[str] = ()
    """Messages that are never dropped: `system`, `first_user`."""
    answers: TurnAnswers | None = None
    """Converts turns with several outputs; None if a turn is only a text."""
    sequence: AnswerSequence | None = None
    """The outputs of a turn that are answered one after the other; None if a turn is one answer."""
    rewritten: int = 0
    """Number of later prompts of an episode that were tokenized again because of the template or a token boundary."""
    dropped: int = 0
    """Number of prompts that were tokenized again because they drop more exchanges than the one before."""
    shortened: int = 0
    """Number of prompts that drop any exchanges."""

    def encode(
        self, episode: Episode, before: TurnPrompt, *, answered: Mapping[str, str] = NOTHING_ANSWERED
    ) -> PromptExample:
        """Encode the next prompt of an episode.

        Args:
            episode: The episode.
            before: The previous prompt; its `dropped` is updated in place.
            answered: Answers to the first outputs of a turn that is answered in sequence.
        """
        messages, dropped = self.messages(episode), before.dropped
        prompt = self.encode_messages(episode, messages, before, answered=answered)
        limit = self.prompt_limit(len(answered))
        if limit is not None and len(prompt.input_ids) > limit:
            most = droppable(messages, self.keep)
            # One at a time, so that no more is dropped than necessary. What is dropped stays dropped in later prompts:
            # as long as the number is the same, they continue from earlier tokens.
            while len(prompt.input_ids) > limit and before.dropped < most:
                before.dropped += 1
                prompt = self.encode_messages(episode, messages, TurnPrompt(dropped=before.dropped), answered=answered)
        if before.dropped > dropped:
            self.dropped += 1
        elif before.text and prompt.error is None and prompt.input_ids[: len(before.ids)] != before.ids:
            self.rewritten += 1
        self.shortened += before.dropped > 0
        return prompt

    def messages(self, episode: Episode) -> list[dict[str, Any]]:
        """Return the messages as the agent sees them, after its system prompt."""
        system = (
            [] if self.prompt is None else [{"role": "system", "content": fill_template(self.prompt, episode.task)}]
        )
        seen = episode.seen_by(self.agent)
        return [*system, *(seen if self.answers is None else self.answers.shown(seen))]

    def encode_messages(
        self,
        episode: Episode,
        messages: Sequence[dict[str, Any]],
        before: TurnPrompt,
        *,
        answered: Mapping[str, str] = NOTHING_ANSWERED,
    ) -> PromptExample:
        """Encode messages without the `before.dropped` oldest exchanges, reusing the tokens of `before` if possible.

        Args:
            episode: The episode.
            messages: Its messages, as the agent sees them.
            before: The previous prompt.
            answered: Answers to the first outputs of a turn that is answered in sequence.
        """
        dialogue = {"messages": without_oldest(messages, before.dropped, self.keep), "labels": [], "train_all": False}
        row = {self.name: dialogue}
        if answered:
            return self.row_tokenizer.encode_next_output(
                row, answered, key=episode.key, earlier_ids=before.ids, earlier_text=before.text
            )
        return self.row_tokenizer.encode_turn(row, key=episode.key, earlier_ids=before.ids, earlier_text=before.text)

    def prompt_limit(self, output: int) -> int | None:
        """Return the prompt length above which exchanges are dropped, before output number `output` of a turn."""
        if self.max_prompt_tokens is None or self.sequence is None:
            return self.max_prompt_tokens
        return self.max_prompt_tokens + self.sequence.max_tokens() - self.sequence.max_tokens(output)

    def after(self, prompt: PromptExample, before: TurnPrompt, answer: Generated, *, is_shown: bool) -> TurnPrompt:
        """Return the state from which the next prompt continues.

        Args:
            prompt: The prompt that was answered.
            before: State before the prompt.
            answer: The answer.
            is_shown: Whether the next prompt shows this answer, and not the gold answer instead.
        """
        if not is_shown or self.decode(answer.ids) != answer.text:
            # The tokens do not apply to the next prompt: it shows another answer, or a stop text was cut off.
            return TurnPrompt(dropped=before.dropped)
        return TurnPrompt(prompt.text + answer.text, [*prompt.input_ids, *answer.ids], before.dropped)


def log_prompt_counts(encoders: Sequence[TurnEncoder]) -> None:
    """Log how many prompts were tokenized again or shortened."""
    rewritten, shortened = sum(turns.rewritten for turns in encoders), sum(turns.shortened for turns in encoders)
    if rewritten:
        logger.info(
            "%s tokenized again from the start, because the template renders all turns in one piece or a token "
            "spans two",
            counted(rewritten, "prompt"),
        )
    if shortened:
        dropped = sum(turns.dropped for turns in encoders)
        logger.info(
            "left out the oldest turns of %s for lack of room; %s tokenized again from the start",
            *(counted(count, "prompt") for count in (shortened, dropped)),
        )
