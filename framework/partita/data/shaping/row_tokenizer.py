"""From cleaned rows to token ids with the spans that are learned.

A token begins with each answer, so ids of prompts are the same in training and in prediction. Too long an example loses
the end of its answer, and with it the end-of-text token: a cut answer must not be learned as a whole one. A dialogue
loses what stands after the cut, and ends with its last token in the loss. A row without such a token is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.data.rows import digest
from partita.data.shaping.custom import CustomFormatter
from partita.data.shaping.formatter import FormattedText, Formatter, Retriever, Row, Segment
from partita.data.shaping.segments import SegmentTokenizer
from partita_schema.config import Config
from partita_schema.errors import ModelError, RowError

if TYPE_CHECKING:
    from partita.data.dialogue.expand import Expander

Span = tuple[int, int]
"""First token and the one behind the last."""
IGNORED = -100
"""Label of tokens that are not learned."""
RULES = "2: joined text"
"""How text becomes tokens and loss. It changes with the code that decides them, so that kept tokens are made again."""


@dataclass(frozen=True)
class Example:
    """A row for training."""

    key: str
    input_ids: list[int]
    spans: tuple[Span, ...]
    """Tokens that are learned."""
    cut_tokens: int
    """Tokens that did not fit: of features, of the answer, of the example."""

    @property
    def labels(self) -> list[int]:
        """Ids where a token is learned, -100 elsewhere."""
        labels = [IGNORED] * len(self.input_ids)
        for start, end in self.spans:
            labels[start:end] = self.input_ids[start:end]
        return labels


@dataclass(frozen=True)
class PromptExample:
    """A row for prediction."""

    key: str
    text: str
    """The rendered prompt."""
    input_ids: list[int]
    error: str | None = None
    """Why nothing can be generated for it."""


@dataclass(frozen=True)
class RowTokenizer:
    """Encodes rows; the same row always gives the same ids. Can be sent to other processes."""

    formatter: Formatter | CustomFormatter
    max_length: int | None = None
    """Longest example in tokens, prompt and answer together; None for no limit."""
    answer_limit: int | None = None
    """Longest answer in tokens, without its end."""
    completion_only: bool = True
    """Learn answers only; otherwise every token."""
    beginning: tuple[int, ...] = ()
    """Tokens before a prompt that is not made by a chat template (BOS)."""

    @cached_property
    def end(self) -> int | None:
        """The token that ends a text; the tokenizer looks it up anew each time."""
        found: int | None = self.formatter.tokenizer.eos_token_id
        return found

    @property
    def expander(self) -> "Expander | None":
        """What makes training rows of dialogues; None where no input is a dialogue."""
        return self.formatter.expander if isinstance(self.formatter, Formatter) else None

    def encode(self, row: Row, *, key: str) -> Example:
        """A row for training. Raises RowError."""
        example = self.encode_rows([row], [key])[0]
        if isinstance(example, RowError):
            raise example
        return example

    def encode_prompt(self, row: Row, *, key: str) -> PromptExample:
        """A row for prediction."""
        return self.encode_prompts([row], [key])[0]

    def encode_turn(self, row: Row, *, key: str, before: Sequence[int], behind: str) -> PromptExample:
        """The prompt of a dialogue that goes on: the text `behind` has the tokens `before`, as it had them then.

        The whole prompt is encoded again where that text does not stand at the beginning or ends within a segment, or
        where a token of the whole prompt spans its end.
        """
        [shaped], [ids] = self._tokens([row], [key], supervised=False)
        if isinstance(shaped, RowError):
            return PromptExample(key, "", [], str(shaped))
        place, length = 0, 0
        while place < len(shaped.segments) and length < len(behind):
            length += len(shaped.segments[place].text)
            place += 1
        if not behind or length != len(behind) or not shaped.text.startswith(behind):
            return self._prompt_example(shaped, ids, key)
        [rest] = self._segment_ids([shaped.segments[place:]], before=behind)
        added = [token for part in rest for token in part]
        if added and added != [token for part in ids for token in part][-len(added) :]:
            return self._prompt_example(shaped, ids, key)
        parts, _ = self._parts(shaped.segments[place:], rest)
        end = [self.end] if shaped.segments[place - 1].ends and self.end is not None else []
        return self._checked_prompt([*before, *end, *(token for part, _ in parts for token in part)], shaped.text, key)

    def answer_ids(self, answer: str) -> tuple[int, ...]:
        """Tokens of an answer as it is in the loss after any prompt, and of the end that a chat template writes."""
        assert isinstance(self.formatter, Formatter), "a formatter of one's own knows no answers but those of rows"
        segments = self.formatter.any_prompt(answer)
        [parts] = self._segment_ids([segments])
        return tuple(
            token for segment, part in zip(segments, parts, strict=True) if segment.supervised for token in part
        )

    def encode_rows(self, rows: Sequence[Row], keys: Sequence[str]) -> list[Example | RowError]:
        """Rows for training in one call of the tokenizer; a RowError stands in the place of a bad one."""
        found: list[Example | RowError] = []
        for shaped, ids, key in zip(*self._tokens(rows, keys, supervised=True), keys, strict=True):
            if isinstance(shaped, RowError):
                found.append(shaped)
                continue
            try:
                found.append(self._example(shaped, ids, key))
            except RowError as error:
                found.append(error)
        return found

    def encode_prompts(self, rows: Sequence[Row], keys: Sequence[str]) -> list[PromptExample]:
        """Rows for prediction in one call of the tokenizer."""
        return [
            PromptExample(key, "", [], str(shaped))
            if isinstance(shaped, RowError)
            else self._prompt_example(shaped, ids, key)
            for shaped, ids, key in zip(*self._tokens(rows, keys, supervised=False), keys, strict=True)
        ]

    def _prompt_example(self, shaped: FormattedText, ids: Sequence[list[int]], key: str) -> PromptExample:
        parts, _ = self._parts(shaped.segments, ids)
        prompt = [*self._beginning(shaped), *(token for part, _ in parts for token in part)]
        return self._checked_prompt(prompt, shaped.text, key)

    def _checked_prompt(self, prompt: list[int], text: str, key: str) -> PromptExample:
        """A prompt, with the reason where nothing can be generated for it."""
        error = None
        if not prompt:
            error = "the prompt is empty"
        elif self.max_length is not None and len(prompt) >= self.max_length:
            error = too_long(len(prompt), self.max_length) + self._advice()
        return PromptExample(key, text, prompt, error)

    def _example(self, shaped: FormattedText, ids: Sequence[list[int]], key: str) -> Example:
        tokens, spans = self._beginning(shaped), list[Span]()
        parts, cut = self._parts(shaped.segments, ids)
        if shaped.ends and self.end is not None and not cut:
            parts.append(([self.end], True))
        for part, supervised in parts:
            if supervised and part:
                joined = spans and spans[-1][1] == len(tokens)
                start = spans.pop()[0] if joined else len(tokens)
                spans.append((start, len(tokens) + len(part)))
            tokens = tokens + part
        if not spans:
            raise RowError("the answer is empty: there is nothing to learn")
        if not spans[0][0]:
            raise RowError("the prompt is empty")
        limit = len(tokens) if self.max_length is None else self.max_length
        if spans[0][0] >= limit:
            raise RowError(too_long(spans[0][0], limit) + self._advice())
        needed = spans[-1][1]  # what a template writes after the last turn may be left out
        spans = [(start, min(end, limit)) for start, end in spans if start < limit]
        # What nobody learns behind the last answer that fits would only take memory.
        limit = min(limit, spans[-1][1]) if limit < len(tokens) else limit
        if not self.completion_only:
            spans = [(0, min(limit, len(tokens)))]
        lost = shaped.cut_tokens + cut + max(0, needed - limit)
        return Example(key, tokens[:limit], tuple(spans), lost)

    def _parts(self, segments: Sequence[Segment], ids: Sequence[list[int]]) -> tuple[list[tuple[list[int], bool]], int]:
        """Ids of each segment and whether they are learned, up to the limit of an answer; and the tokens cut there.

        An answer is the first segment in the loss where a model begins to answer; its end is no part of it and has no
        limit.
        """
        parts: list[tuple[list[int], bool]] = []
        end = self.end
        limit = self.answer_limit
        begins = True
        for place, (segment, part) in enumerate(zip(segments, ids, strict=True)):
            begins = begins or not segment.joined
            if segment.supervised and begins and limit is not None and len(part) > limit:
                return [*parts, (part[:limit], True)], len(part) - limit + tokens_behind(segments, ids, place)
            begins = begins and not segment.supervised
            parts.append(([*part, end] if segment.ends and end is not None else part, segment.supervised))
        return parts, 0

    def _advice(self) -> str:
        """What shortens the prompt of a dialogue."""
        return "; data.dialogue: {context_tokens: ...} shows less of it" if self.formatter.config.dialogue_input else ""

    def _beginning(self, shaped: FormattedText) -> list[int]:
        return list(self.beginning) if shaped.begins else []

    def _tokens(
        self, rows: Sequence[Row], keys: Sequence[str], *, supervised: bool
    ) -> tuple[list[FormattedText | RowError], list[list[list[int]]]]:
        """Text and ids of each row's segments."""
        shaped = self._format(rows, keys, supervised=supervised)
        try:
            return shaped, self._segment_ids([segments_of(item) for item in shaped])
        except (TypeError, UnicodeEncodeError):
            return self._tokens_by_row(shaped)

    def _tokens_by_row(
        self, shaped: Sequence[FormattedText | RowError]
    ) -> tuple[list[FormattedText | RowError], list[list[list[int]]]]:
        """The same row by row, where a text of some row is no Unicode."""
        found: list[FormattedText | RowError] = []
        ids: list[list[list[int]]] = []
        for item in shaped:
            try:
                ids += self._segment_ids([segments_of(item)])
                found.append(item)
            except (TypeError, UnicodeEncodeError):
                ids.append([])
                found.append(RowError("not Unicode: half of a surrogate pair"))
        return found, ids

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

    def parts(self) -> dict[str, str]:
        """Hashes of what decides the ids, by the names under which a person knows it."""
        from partita.lm.tokenizers import tokenizer_digest

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
            "learned tokens": "answers" if self.completion_only else "all",
            **examples,
            **custom,
            **dialogue,
        }


def build_row_tokenizer(
    config: Config,
    *,
    tokenizer: Any,
    context_length: int | None,
    labels: Mapping[str, Sequence[str]] | None = None,
    retriever: Retriever | None = None,
    folder: Path | None = None,
) -> RowTokenizer:
    """The encoder of a run. `context_length` is the model's, None for no limit; `folder` is that of the file.

    Raises ModelError where preprocessing.global_max_sequence_length is above it.
    """
    wanted = config.preprocessing.global_max_sequence_length
    if wanted is not None and context_length is not None and wanted > context_length:
        raise ModelError(
            f"preprocessing.global_max_sequence_length is {wanted:,}, above the model's context of {context_length:,} "
            f"tokens; write at most {context_length}"
        )
    outputs = config.output_features
    return RowTokenizer(
        Formatter(config, tokenizer=tokenizer, labels=labels, retriever=retriever)
        if config.data.formatter is None
        else CustomFormatter(config, tokenizer=tokenizer, folder=folder),
        max_length=wanted or context_length,
        answer_limit=outputs[0].preprocessing.max_sequence_length
        if len(outputs) == 1 and outputs[0].type != "category"
        else None,
        completion_only=getattr(config.trainer, "completion_only_loss", True),
        beginning=beginning_of(tokenizer),
    )


def segments_of(shaped: FormattedText | RowError) -> tuple[Segment, ...]:
    """The segments of a row; none of a bad one."""
    return shaped.segments if isinstance(shaped, FormattedText) else ()


def tokens_behind(segments: Sequence[Segment], ids: Sequence[list[int]], place: int) -> int:
    """Tokens of the turns behind the answer at `place`, whose own end does not count."""
    later = list(zip(segments, ids, strict=True))[place + 1 :]
    while later and later[0][0].supervised:
        later.pop(0)
    return sum(len(part) for _, part in later) if any(segment.supervised for segment, _ in later) else 0


def beginning_of(tokenizer: Any) -> tuple[int, ...]:
    """The BOS token where the tokenizer puts one before a text, else nothing."""
    made = tokenizer("", verbose=False)["input_ids"]
    return (made[0],) if made and made[0] == tokenizer.bos_token_id else ()


def too_long(prompt: int, limit: int) -> str:
    """What is said of a prompt without room for an answer."""
    return f"the prompt has {prompt:,} tokens, which leaves no room for an answer within {limit:,}"
