"""Turns of an agent with several outputs: what the others receive, what is saved, and how answers are scored.

The `answer` of a turn is what the model generated: one text, or in sequence a JSON object with the text of each output.
Its `values` are a JSON object with the value of each output, null if it is unreadable, or the value of a single output.
Right answers (`gold`) have the form of `values`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partita.data.episode import Episode
from partita.data.formatting.turns import TurnWriter
from partita.outputs.decode import Decoded, Decoder
from partita.outputs.scorer import Scorer
from partita_schema.config import Config
from partita_schema.dialogues.common_form import ANSWER, FormatError
from partita_schema.turn_outputs import TurnOutputs, build_turn_outputs

Message = dict[str, Any]


@dataclass(frozen=True)
class SpokenTurn:
    """A turn with several outputs."""

    text: str
    """What the others receive."""
    answer: str
    """What the model generated."""
    values: str
    """The values of the outputs, as JSON."""


@dataclass(frozen=True)
class TurnAnswers:
    """Converts the turns of an agent."""

    outputs: TurnOutputs
    writer: TurnWriter
    decoder: Decoder
    reply: str | None = None
    """The output that the others receive; None for the whole answer."""

    def spoken(self, answer: str) -> SpokenTurn:
        """Return a turn, given what the model generated."""
        decoded = self.decoder.decode(answer)
        values = self.writer.together(decoded.values)
        if self.reply is not None:
            return SpokenTurn(self._reply(self.reply, decoded), answer, values)
        return SpokenTurn(values if self.writer.in_sequence else answer, answer, values)

    def _reply(self, name: str, decoded: Decoded) -> str:
        value = decoded.values[name]
        return decoded.raw[name] if value is None else self.writer.text(name, value)

    def check_gold(self, gold: str) -> None:
        """Raise ValueError if a right answer does not have a valid value for each output."""
        try:
            self.outputs.values_of(gold, where="gold")
        except FormatError as error:
            raise ValueError(str(error)) from None

    def shown(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with the values of right answers, which stand in for generated ones in a gold history."""
        return [self._shown(message) for message in messages]

    def _shown(self, message: Message) -> Message:
        if not message.get("train") or ANSWER in message:
            return message
        try:
            return {**message, "values": self.outputs.values_of(message["content"], where="gold")}
        except FormatError:
            return message  # a text that the configuration or the world has given to the agent

    def scores(self, config: Config, episodes: Sequence[Episode]) -> dict[str, float]:
        """Return the metrics of all turns with a right answer, by output; empty without any."""
        scorer = Scorer(config)
        for episode in episodes:
            for turn in episode.replies if episode.status != "failed" else ():
                if turn.gold is not None and turn.answer is not None:
                    truth, *more = (self.outputs.values_of(gold, where="gold") for gold in turn.golds)
                    scorer.add(truth, self.decoder.decode(turn.answer), answered=True, more_truths=more)
        # Transcripts hold no scores of labels, so the metrics of these are NaN.
        return {name: value for name, value in scorer.scores().flat.items() if not math.isnan(value)}


def build_turn_answers(config: Config, decoder: Decoder, *, reply: str | None) -> TurnAnswers | None:
    """Return what converts the turns of an agent; None if they are only a text.

    Args:
        config: Configuration of the agent's model.
        decoder: Parses its answers.
        reply: The output that the others receive; None for the whole answer.
    """
    outputs = build_turn_outputs(config)
    if outputs is None:
        return None
    writer = TurnWriter(config, outputs, tokenizer=None)
    return TurnAnswers(outputs, writer, decoder, reply if reply in outputs.names else None)
