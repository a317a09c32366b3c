"""Write the outputs of dialogue turns as messages: one answer per turn, or one after the other.

Answered together, a turn is one message of the assistant: a JSON object, or the value of a single output. Answered in
sequence, it is one message per output; before each output but the first, a message of the user asks for it. Every
output is then an answer like any other: it ends with the token that ends an answer, and the same tokens precede it in
training and in prediction.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from partita_schema.cells import compact_json
from partita_schema.common.json_text import parse_json
from partita_schema.config import Config
from partita_schema.dialogues.common_form import ANSWER
from partita_schema.turn_outputs import TurnOutputs, Values, build_turn_outputs

Message = dict[str, Any]
Texts = Mapping[str, str]
"""What the model answers, by output name."""


class TurnWriter:
    """Writes turns with named outputs. The result depends only on the values."""

    def __init__(self, config: Config, outputs: TurnOutputs, *, tokenizer: Any) -> None:
        """Store how the configuration answers a turn; without a tokenizer, texts are not truncated."""
        self.in_sequence = config.answers_in_sequence
        """Whether the outputs are answered one after the other."""
        self.names = outputs.names
        """Names of the outputs, in the order of the file."""
        self._outputs = outputs
        self._features = {feature.name: feature for feature in outputs.features}
        self._tokenizer = tokenizer
        self._limits = {
            feature.name: getattr(feature.preprocessing, "max_sequence_length", None)
            for feature in outputs.features
            if feature.free_text and tokenizer is not None and len(self.names) > 1
        }
        """Maximum number of tokens of texts; RowTokenizer truncates the answer of a single output."""
        questions = config.data.dialogue.questions
        self._questions = {name: questions.get(name, name) for name in self.names}

    # Whole answers

    def answer(self, values: Values) -> str:
        """Return the whole answer of a turn with these values, as a text."""
        return compact_json(self._texts(values)) if self.in_sequence else self.together(values)

    def together(self, values: Values) -> str:
        """Return values as one text: the text of a single output, or a JSON object; None is an unreadable value."""
        if len(self.names) == 1:
            value = values[self.names[0]]
            return "" if value is None else self.text(self.names[0], value)
        limited = self._limited(values)
        return compact_json(
            {
                name: None if value is None else self._features[name].answer_member(value)
                for name, value in limited.items()
            }
        )

    def text(self, name: str, value: Any) -> str:
        """Return the value of an output as a text."""
        return self._features[name].answer_text(value)

    def texts(self, answer: str) -> Texts:
        """Return a whole answer by output; by the empty name if it is one text."""
        return dict(json.loads(answer)) if self.in_sequence else {"": answer}

    def cut_tokens(self, values: Values) -> int:
        """Return the number of tokens by which the texts of a turn are truncated."""
        return sum(self._clipped(name, values[name])[1] for name in self._limits if name in values)

    # Messages

    def history(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in which earlier answers have their text as `content`, and in sequence `parts` by output."""
        return [self._shown(message) if message["role"] == "assistant" else message for message in messages]

    def with_right_answers(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with the values of a turn as one text in `content`, and as the model writes them."""
        return [self._with_right_answer(message) if "values" in message else message for message in messages]

    def _with_right_answer(self, message: Message) -> Message:
        texts = {"content": self.together(message["values"]), ANSWER: self.answer(message["values"])}
        several = {"labels": list(map(self.together, message["labels"]))} if "labels" in message else {}
        return {**message, **texts, **several}

    def turn(self, values: Values, *, until: str | None = None) -> tuple[list[Message], str]:
        """Return the messages of a turn before an answer in the loss, and this answer.

        Args:
            values: The values of the turn.
            until: The output whose answer is returned. Default: the last one, with those before it in the loss.
        """
        if not self.in_sequence:
            return [], self.together(values)
        texts, last = self._texts(values), until or self.names[-1]
        before = {name: texts[name] for name in self.names[: self.names.index(last)]}
        return self.before(before, learn=until is None), texts[last]

    def before(self, texts: Texts, *, learn: bool = False) -> list[Message]:
        """Return the messages of a turn up to the next output, after the answers to the first ones."""
        flat = [message | {"learn": learn} for message in self._exchange(texts, {"train": True})]
        return [*flat, *self._question(self.names[len(texts)], first=not texts)]

    def flat(self, messages: Sequence[Message]) -> Iterator[Message]:
        """Yield messages with one message per output in place of those with `parts`."""
        for message in messages:
            if "parts" in message:
                yield from self._exchange(message["parts"], {"train": message["train"]})
            else:
                yield message

    def _exchange(self, texts: Texts, flags: Mapping[str, bool]) -> Iterator[Message]:
        for index, (name, text) in enumerate(texts.items()):
            yield from self._question(name, first=not index)
            yield {"role": "assistant", "content": text, **flags}

    def _question(self, name: str, *, first: bool) -> list[Message]:
        return [] if first else [{"role": "user", "content": self._questions[name]}]

    def _shown(self, message: Message) -> Message:
        """Return an earlier answer as later prompts show it."""
        if "values" in message:
            values = {name: message["values"][name] for name in self._outputs.shown}
            parts: Texts = self._texts(values) if self.in_sequence else {}
            whole = "" if self.in_sequence else self.together(values)
        elif ANSWER in message:
            parts, whole = self._shown_answer(message[ANSWER])
        else:
            return message
        shown: Message = {"role": "assistant", "train": message["train"]}
        return shown | ({"content": "\n".join(parts.values()), "parts": parts} if parts else {"content": whole})

    def _shown_answer(self, answer: str) -> tuple[Texts, str]:
        """Return the outputs of a generated answer that later prompts show, in sequence by name and else as a text."""
        shown = self._outputs.shown
        if self.in_sequence:
            texts = self.texts(answer)
            return {name: texts[name] for name in shown if name in texts}, ""
        if shown == self.names:
            return {}, answer
        try:
            members = parse_json(answer)
        except ValueError:
            members = None
        if not isinstance(members, dict):
            return {}, answer  # without an object, there is no part to leave out
        return {}, compact_json({name: members[name] for name in shown if name in members})

    def _texts(self, values: Values) -> dict[str, str]:
        return {name: self.text(name, value) for name, value in self._limited(values).items()}

    def _limited(self, values: Values) -> Values:
        """Return the values with texts truncated to their features' max_sequence_length."""
        return values | {name: self._clipped(name, values[name])[0] for name in self._limits if name in values}

    def _clipped(self, name: str, text: str) -> tuple[str, int]:
        limit = self._limits[name]
        return (text, 0) if limit is None else clip(text, limit, self._tokenizer)


def build_turn_writer(config: Config, *, tokenizer: Any = None) -> TurnWriter | None:
    """Return the writer of turns; None if a turn is only a text. Without a tokenizer, texts are not truncated."""
    outputs = build_turn_outputs(config)
    return None if outputs is None else TurnWriter(config, outputs, tokenizer=tokenizer)


def clip(text: str, limit: int, tokenizer: Any) -> tuple[str, int]:
    """Return the text up to the end of token number `limit`, and the number of tokens removed."""
    if len(text) * 4 <= limit:  # no tokenizer produces more tokens than bytes
        return text, 0
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoding["offset_mapping"]
    if len(offsets) <= limit:
        return text, 0
    return text[: offsets[limit - 1][1]], len(offsets) - limit
