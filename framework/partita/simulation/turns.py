"""Prompts of dialogues that go on: what a model said keeps the tokens that it said it in.

A prompt is rendered whole each time, as rows of dialogues are. Where the text of the turn before stands unchanged at
its beginning, and a segment and a token begin after the answer, the tokens up to there are those that the model has
seen and made. Elsewhere, as with a chat template that writes a whole prompt in one piece, all is encoded again, as for
the rows that such a model learns from. So it is where exchanges are left out because a dialogue has grown too long.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from partita.data.episode import AGENT, Episode
from partita.data.formatting.row_tokenizer import PromptExample, RowTokenizer
from partita.simulation.context import droppable, without_oldest
from partita.simulation.conversation import filled

logger = logging.getLogger(__name__)


@dataclass
class TurnPrompt:
    """What a model has been shown of a dialogue."""

    text: str = ""
    """The last prompt and the answer to it."""
    ids: list[int] = field(default_factory=list)
    """Their tokens."""
    dropped: int = 0
    """Exchanges that are left out."""


@dataclass
class TurnEncoder:
    """Makes an agent's prompts of dialogues, and counts those that were encoded anew."""

    encoder: RowTokenizer
    name: str
    """Of the dialogue input."""
    decode: Callable[..., str]
    """From tokens of an answer to its text, special tokens left out."""
    agent: str = AGENT
    """Who is to answer."""
    prompt: str | None = None
    """What this agent alone is told by the system, with {column} for values of the task."""
    most_tokens: int | None = None
    """Tokens of a prompt above which exchanges are left out; None to leave out nothing."""
    keep: Collection[str] = ()
    """What is never left out."""
    rewritten: int = 0
    """Prompts, but the first of a dialogue, in which an earlier answer may have other tokens than it was made of,
    because of the template ..."""
    dropped: int = 0
    """... and those because more was left out than before."""
    shortened: int = 0
    """Prompts without some of what was said."""

    @property
    def anew(self) -> int:
        """Prompts that were encoded anew, but the first of a dialogue."""
        return self.rewritten + self.dropped

    def encode(self, dialogues: Sequence[Episode], shown: Sequence[TurnPrompt]) -> list[PromptExample]:
        """The prompt of each dialogue, which goes on from what was `shown` of it; notes there what is left out."""
        return [self.encode_one(dialogue, before) for dialogue, before in zip(dialogues, shown, strict=True)]

    def encode_one(self, episode: Episode, before: TurnPrompt) -> PromptExample:
        """The prompt of one."""
        messages, dropped = self.messages(episode), before.dropped
        prompt = self.rendered(episode, messages, before)
        if self.is_too_long(prompt):
            last = droppable(messages, self.keep)
            while self.is_too_long(prompt) and before.dropped < last:
                before.dropped += 1
                prompt = self.rendered(episode, messages, TurnPrompt(dropped=before.dropped))
        if before.dropped > dropped:
            self.dropped += 1
        elif before.text and prompt.error is None and prompt.input_ids[: len(before.ids)] != before.ids:
            self.rewritten += 1
        self.shortened += before.dropped > 0
        return prompt

    def messages(self, episode: Episode) -> list[dict[str, Any]]:
        """What the agent sees, with what it is told."""
        told = [] if self.prompt is None else [{"role": "system", "content": filled(self.prompt, episode.task)}]
        return [*told, *episode.seen_by(self.agent)]

    def rendered(self, episode: Episode, messages: Sequence[dict[str, Any]], before: TurnPrompt) -> PromptExample:
        """The prompt without the oldest exchanges."""
        row = {self.name: {"messages": without_oldest(messages, before.dropped, self.keep), "learn_all": False}}
        return self.encoder.encode_turn(row, key=episode.key, before=before.ids, behind=before.text)

    def is_too_long(self, prompt: PromptExample) -> bool:
        """Whether a prompt leaves less room than it should."""
        return self.most_tokens is not None and len(prompt.input_ids) > self.most_tokens

    def after(self, prompt: PromptExample, before: TurnPrompt, episode: Episode) -> TurnPrompt:
        """What was shown once the model has answered a prompt, as far as it can be kept."""
        text, tokens = episode.messages[-1]["content"], episode.last_tokens
        hides = self.agent == AGENT and episode.shows_gold
        if hides or self.decode(tokens) != text:
            # another answer is shown in its place, or a stop text was cut off
            return TurnPrompt(dropped=before.dropped)
        return TurnPrompt(prompt.text + text, [*prompt.input_ids, *tokens], before.dropped)


def tell_prompts(encoders: Sequence[TurnEncoder]) -> None:
    """Say of how many prompts earlier answers were encoded anew, and why, and which did not show all."""
    rewritten, shortened = sum(turns.rewritten for turns in encoders), sum(turns.shortened for turns in encoders)
    if rewritten:
        logger.info(
            "%s prompts were encoded as a whole: the template writes earlier turns in one piece, or a token spans two",
            f"{rewritten:,}",
        )
    if shortened:
        dropped = sum(turns.dropped for turns in encoders)
        logger.info(
            "%s prompts left out the oldest turns, for which there was no room; %s were encoded as a whole",
            *(f"{count:,}" for count in (shortened, dropped)),
        )
