"""Tokenize cleaned rows, with the spans that are in the loss.

A token boundary precedes each answer, so the ids of prompts are the same in training and in prediction. An example
that is too long loses the end of its answer, including the end-of-text token: a truncated answer must not be trained
as a complete one. A dialogue is cut at the limit and ends with its last loss token. A row without a loss token is
rejected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from partita.data.dialogue import Expander
from partita.data.formatting.base import FormattedText, Row, Segment
from partita.data.formatting.formatter import CustomFormatter, Formatter
from partita.data.formatting.segments import SegmentTokenizer
from partita.data.rows import digest
from partita.lm.decoding.continuation import decode_continuation
from partita_schema.errors import RowError
from partita_schema.json_values import NOT_UNICODE

Span = tuple[int, int]
"""First token and one past the last."""
IGNORED = -100
"""Label of tokens that are not in the loss."""
RULES = "3: tool calls, reasoning and segments"
"""Version of the rules that turn text into tokens and loss. Changing it invalidates cached tokens."""


@dataclass(frozen=True)
class Example:
    """A tokenized row for training."""

    key: str
    input_ids: list[int]
    spans: tuple[Span, ...]
    """Spans of loss tokens."""
    cut_tokens: int
    """Number of tokens removed by limits of features, of the answer and of the example."""
    targets: Sequence[Sequence[float]] = ()
    """For a model with a head, the targets of each loss token."""
    widened_spans: tuple[str, ...] = ()
    """For tags of words, the spans of characters that begin or end inside a word, which has the tag as a whole."""
    branched: bool = False
    """Whether each loss span is a branch: it follows the tokens before the first span, and sees no other span."""
    values: tuple[float, ...] = ()
    """Numbers of the row that an objective uses in addition to the tokens, such as the label of KTO."""

    @property
    def labels(self) -> list[int]:
        """Ids of loss tokens, -100 elsewhere."""
        labels = [IGNORED] * len(self.input_ids)
        for start, end in self.spans:
            labels[start:end] = self.input_ids[start:end]
        return labels


@dataclass(frozen=True)
class PromptExample:
    """A tokenized row for prediction."""

    key: str
    text: str
    """The formatted prompt."""
    input_ids: list[int]
    error: str | None = None
    """Why nothing can be generated for it."""
    cut_tokens: int = 0
    """Number of tokens removed by limits of features and of the context."""


@dataclass(frozen=True)
class RowTokenizer:
    """Tokenize rows; the same row always has the same ids. Can be pickled for other processes."""

    formatter: Formatter | CustomFormatter
    max_length: int | None = None
    """Maximum tokens of an example, prompt and answer together; None for no limit."""
    answer_limit: int | None = None
    """Maximum tokens of an answer, without its end."""
    completion_only: bool = True
    """Whether only answers are in the loss; else all tokens are."""
    chunk_length: int | None = None
    """Tokens of the chunks that documents are cut into; None if they are not. Documents are then tokenized whole."""
    beginning: tuple[int, ...] = ()
    """Tokens before a prompt that is not formatted by a chat template (BOS)."""

    @cached_property
    def end(self) -> int | None:
        """The end-of-text token; cached, since the tokenizer looks it up on each access."""
        token: int | None = self.formatter.tokenizer.eos_token_id
        return token

    @property
    def expander(self) -> Expander | None:
        """The expander of dialogues into training rows; None if a row is one already."""
        return self.formatter.expander if isinstance(self.formatter, Formatter) else None

    def encode(self, row: Row, *, key: str) -> Example:
        """Tokenize a row for training. Raise RowError if it cannot be used."""
        example = self.encode_rows([row], [key])[0]
        if isinstance(example, RowError):
            raise example
        return example

    def encode_prompt(self, row: Row, *, key: str) -> PromptExample:
        """Tokenize a row for prediction."""
        return self.encode_prompts([row], [key])[0]

    def encode_turn(self, row: Row, *, key: str, earlier_ids: Sequence[int], earlier_text: str) -> PromptExample:
        """Tokenize the prompt of the next turn of a dialogue, reusing the tokens of the text so far.

        The whole prompt is tokenized if the prompt does not start with that text, if the text ends within a segment,
        or if a token of the whole prompt spans its end.

        Args:
            row: The dialogue so far.
            key: Key of the row.
            earlier_ids: Token ids of the text so far.
            earlier_text: The text so far: the last prompt and the answer to it.
        """
        [formatted], [ids] = self._tokens([row], [key], supervised=False)
        if isinstance(formatted, RowError):
            return PromptExample(key, "", [], str(formatted))
        index, length = 0, 0
        while index < len(formatted.segments) and length < len(earlier_text):
            length += len(formatted.segments[index].text)
            index += 1
        if not earlier_text or length != len(earlier_text) or not formatted.text.startswith(earlier_text):
            return self._prompt_example(formatted, ids, key)
        [rest] = self._segment_ids([formatted.segments[index:]], before=earlier_text)
        added = [token for part in rest for token in part]
        if added and added != [token for part in ids for token in part][-len(added) :]:
            return self._prompt_example(formatted, ids, key)
        parts, _ = self._parts(formatted.segments[index:], rest)
        end = [self.end] if formatted.segments[index - 1].ends and self.end is not None else []
        ids_of_rest = [token for part, _ in parts for token in part]
        return self._checked_prompt([*earlier_ids, *end, *ids_of_rest], formatted, key)

    def encode_next_output(
        self, row: Row, answered: Mapping[str, str], *, key: str, earlier_ids: Sequence[int], earlier_text: str
    ) -> PromptExample:
        """Tokenize the prompt of the next output of a turn that is answered in sequence.

        Args:
            row: The dialogue before the turn.
            answered: The answers to the outputs before it, by name.
            key: Key of the row.
            earlier_ids: Token ids of the text so far; empty to tokenize all of it.
            earlier_text: The text so far: the prompt of the output before, and the answer to it.
        """
        feature = self.formatter.config.dialogue_input
        assert feature is not None, "only turns of dialogues are answered in sequence"
        row = {**row, feature.name: {**row[feature.name], "answered": dict(answered)}}
        return self.encode_turn(row, key=key, earlier_ids=earlier_ids, earlier_text=earlier_text)

    def question_tokens(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the maximum number of tokens between the end of an answer and the next output, for each output."""
        feature = self.formatter.config.dialogue_input
        assert feature is not None, "only turns of dialogues are answered in sequence"
        messages = [{"role": "user", "content": "QUESTION"}]
        row = {feature.name: {"messages": messages, "labels": [], "train_all": False}}
        lengths = [
            len(
                self.encode_next_output(
                    row, dict.fromkeys(names[:index], "x"), key="", earlier_ids=(), earlier_text=""
                ).input_ids
            )
            for index in range(len(names))
        ]
        # The token of the answer is counted too, and another one in case that a token spans the end of an answer.
        return (0, *(max(0, after - before) + 1 for before, after in pairwise(lengths)))

    def answer_ids(self, answer: str) -> tuple[int, ...]:
        """Return the tokens of an answer as they are in the loss after any prompt, with the template's end token."""
        assert isinstance(self.formatter, Formatter), "a custom formatter formats only the answers of rows"
        segments = self.formatter.any_prompt(answer)
        [parts] = self._segment_ids([segments])
        return tuple(
            token for segment, part in zip(segments, parts, strict=True) if segment.supervised for token in part
        )

    def reference(self, row: Row, *, key: str) -> Row:
        """Return a row whose answer is what the chat template writes for it, with which a generated one is compared.

        That differs from the answer of the data if it has tool calls or reasoning, or if the template writes text
        before every answer, such as an empty thought.
        """
        config = self.formatter.config
        feature, outputs = config.dialogue_input, config.output_features
        if feature is None or len(outputs) > 1 or not outputs[0].free_text:
            return row
        has_prefix = isinstance(self.formatter, Formatter) and self.formatter.writes_before_answers
        if "verbatim" in row[feature.name] or ("answer" not in row[feature.name] and not has_prefix):
            return row
        [example] = replace(self, completion_only=True).answer_examples([row], [key])
        if isinstance(example, RowError):
            raise example
        ids = [token for start, end in example.spans for token in example.input_ids[start:end]]
        return {**row, outputs[0].name: decode_continuation(self.formatter.tokenizer, ids)}

    def encode_rows(self, rows: Sequence[Row], keys: Sequence[str]) -> list[Example | RowError]:
        """Tokenize rows for training in one tokenizer call; a bad row is returned as a RowError."""
        return self.answer_examples(rows, keys)

    def answer_examples(self, rows: Sequence[Row], keys: Sequence[str]) -> list[Example | RowError]:
        """Tokenize rows with one answer each, as in fine-tuning; a bad row is returned as a RowError."""
        return self._examples(*self._tokens(rows, keys, supervised=True), keys)

    def _examples(
        self, texts: Sequence[FormattedText | RowError], ids_of_rows: Sequence[Sequence[list[int]]], keys: Sequence[str]
    ) -> list[Example | RowError]:
        """Return the examples of texts, given the ids of their segments."""
        examples: list[Example | RowError] = []
        for formatted, ids, key in zip(texts, ids_of_rows, keys, strict=True):
            if isinstance(formatted, RowError):
                examples.append(formatted)
                continue
            try:
                examples.append(self._example(formatted, ids, key))
            except RowError as error:
                examples.append(error)
        return examples

    def encode_prompts(self, rows: Sequence[Row], keys: Sequence[str]) -> list[PromptExample]:
        """Tokenize rows for prediction in one tokenizer call."""
        return [
            PromptExample(key, "", [], str(formatted))
            if isinstance(formatted, RowError)
            else self._prompt_example(formatted, ids, key)
            for formatted, ids, key in zip(*self._tokens(rows, keys, supervised=False), keys, strict=True)
        ]

    def _prompt_example(self, formatted: FormattedText, ids: Sequence[list[int]], key: str) -> PromptExample:
        parts, _ = self._parts(formatted.segments, ids)
        prompt = [*self._beginning(formatted), *(token for part, _ in parts for token in part)]
        return self._checked_prompt(prompt, formatted, key)

    def _checked_prompt(self, prompt: list[int], formatted: FormattedText, key: str) -> PromptExample:
        """Return a prompt, with the reason if nothing can be generated for it."""
        error = None
        if not prompt:
            error = "the prompt is empty"
        elif self.max_length is not None and len(prompt) >= self.max_length:
            error = no_room(self.max_length) + self._advice()
        return PromptExample(key, formatted.text, prompt, error, formatted.cut_tokens)

    def _example(self, formatted: FormattedText, ids: Sequence[list[int]], key: str) -> Example:
        tokens, spans = self._beginning(formatted), list[Span]()
        parts, cut = self._parts(formatted.segments, ids)
        if formatted.ends and self.end is not None and not cut:
            parts.append(([self.end], True))
        for part, supervised in parts:
            if supervised and part:
                joined = spans and spans[-1][1] == len(tokens)
                start = spans.pop()[0] if joined else len(tokens)
                spans.append((start, len(tokens) + len(part)))
            tokens = tokens + part
        if not spans:
            raise RowError("the answer is empty: there is nothing to learn")
        if self.formatter.config.plain_text:
            spans[0] = (0, spans[0][1])
        elif formatted.needs_prompt and not spans[0][0]:
            raise RowError("the prompt is empty")
        limit = len(tokens) if self.max_length is None else self.max_length
        if spans[0][0] >= limit:
            raise RowError(no_room(limit) + self._advice())
        needed = spans[-1][1]  # what a template writes after the last turn may be dropped
        spans = [(start, min(end, limit)) for start, end in spans if start < limit]
        # Tokens without loss after the last answer that fits would only take memory.
        limit = min(limit, spans[-1][1]) if limit < len(tokens) else limit
        if not self.completion_only:
            spans = [(0, min(limit, len(tokens)))]
        lost = formatted.cut_tokens + cut + max(0, needed - limit)
        return Example(key, tokens[:limit], tuple(spans), lost)

    def _parts(self, segments: Sequence[Segment], ids: Sequence[list[int]]) -> tuple[list[tuple[list[int], bool]], int]:
        """Return the ids of each segment and whether they are in the loss, and the number of tokens removed.

        The limit applies to an answer: the first loss segment where a model starts to answer. The answer's end token is
        not part of it and has no limit.
        """
        parts: list[tuple[list[int], bool]] = []
        end = self.end
        limit = self.answer_limit
        begins = True
        for index, (segment, part) in enumerate(zip(segments, ids, strict=True)):
            begins = begins or not segment.joined
            if segment.supervised and begins and limit is not None and len(part) > limit:
                return [*parts, (part[:limit], True)], len(part) - limit + tokens_after(segments, ids, index)
            begins = begins and not segment.supervised
            parts.append(([*part, end] if segment.ends and end is not None else part, segment.supervised))
        return parts, 0

    def _advice(self) -> str:
        """Return a hint on how to shorten the prompt of a dialogue."""
        return "; data.dialogue: {context_tokens: ...} shows less of it" if self.formatter.config.dialogue_input else ""

    def _beginning(self, formatted: FormattedText) -> list[int]:
        return list(self.beginning) if formatted.begins else []

    def _tokens(
        self, rows: Sequence[Row], keys: Sequence[str], *, supervised: bool
    ) -> tuple[list[FormattedText | RowError], list[list[list[int]]]]:
        """Return text and ids of each row's segments."""
        formatted = self._format(rows, keys, supervised=supervised)
        try:
            return formatted, self._segment_ids([segments_of(item) for item in formatted])
        except (TypeError, UnicodeEncodeError):
            return self._tokens_by_row(formatted)

    def _tokens_by_row(
        self, formatted: Sequence[FormattedText | RowError]
    ) -> tuple[list[FormattedText | RowError], list[list[list[int]]]]:
        """Tokenize row by row, because the text of some row is not valid Unicode."""
        results: list[FormattedText | RowError] = []
        ids: list[list[list[int]]] = []
        for item in formatted:
            try:
                ids += self._segment_ids([segments_of(item)])
                results.append(item)
            except (TypeError, UnicodeEncodeError):
                ids.append([])
                results.append(RowError(NOT_UNICODE))
        return results, ids

    def _format(self, rows: Sequence[Row], keys: Sequence[str], *, supervised: bool) -> list[FormattedText | RowError]:
        try:
            return list(self.formatter.format_all(rows, keys, supervised=supervised))
        except RowError as error:
            if len(rows) == 1:
                return [error]
        return [self._format([row], [key], supervised=supervised)[0] for row, key in zip(rows, keys, strict=True)]

    @cached_property
    def _segment_ids(self) -> SegmentTokenizer:
        return SegmentTokenizer(self.formatter.tokenizer)

    def fingerprint_inputs(self) -> dict[str, str]:
        """Return hashes of what decides the ids, by readable names."""
        from partita.tokenizers.load import tokenizer_digest

        config = self.formatter.config
        dialogue = {"dialogue": digest(config.data.dialogue.model_dump_json())} if config.dialogue_input else {}
        features = [feature.model_dump_json(exclude={"decoder"}) for feature in config.input_features]
        features += [feature.model_dump_json(exclude={"decoder"}) for feature in config.output_features]
        custom = {"formatter": self.formatter.fingerprint} if isinstance(self.formatter, CustomFormatter) else {}
        chosen_from = "" if isinstance(self.formatter, CustomFormatter) else self.formatter.examples_from
        examples = {"examples": chosen_from} if chosen_from else {}
        limits = f"{self.max_length} in all, {self.answer_limit} of the answer"
        return {
            "tokenizer": tokenizer_digest(self.formatter.tokenizer),
            "token rules": RULES,
            "prompt": digest(config.prompt.model_dump_json()),
            "features": digest(*features),
            "token limits": limits.replace("None", "unlimited"),
            "loss tokens": "answers" if self.completion_only else "all",
            **examples,
            **custom,
            **dialogue,
        }


def segments_of(formatted: FormattedText | RowError) -> tuple[Segment, ...]:
    """Return the segments of a row; none for a bad one."""
    return formatted.segments if isinstance(formatted, FormattedText) else ()


def tokens_after(segments: Sequence[Segment], ids: Sequence[list[int]], index: int) -> int:
    """Return the number of tokens in the turns after the answer at `index`, without the answer's end."""
    later = list(zip(segments, ids, strict=True))[index + 1 :]
    while later and later[0][0].supervised:
        later.pop(0)
    return sum(len(part) for _, part in later) if any(segment.supervised for segment, _ in later) else 0


def no_room(limit: int) -> str:
    """Return the message for a prompt without room for an answer, the same for prompts of any length."""
    return f"the prompt leaves no room for an answer within {limit:,} tokens"
