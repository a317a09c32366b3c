"""Format a cleaned row as text: the prompt, and the answer to learn; or with a user's class (`data.formatter`).

A token boundary precedes each answer, so the tokens before an answer are the same in training and in prediction.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partita.data.dialogue import Expander, build_expander
from partita.data.formatting.base import FormattedText, Retriever, Row, Segment
from partita.data.formatting.chat import ChatTemplate
from partita.data.formatting.dialogue import DialogueFormatter
from partita.data.formatting.turns import clip
from partita.data.user_objects import errors_of, make_user_object, source_digest
from partita_schema.cells import compact_json
from partita_schema.common.text import counted
from partita_schema.config import Config
from partita_schema.errors import DataError, ModelError
from partita_schema.sections.features import TextInput
from partita_schema.sections.prompt import template_fields
from partita_trainers.user_modules import load_class


class Formatter:
    """Format rows as text. The result depends only on the row and its key."""

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: Any,
        labels: Mapping[str, Sequence[str]] | None = None,
        retriever: Retriever | None = None,
        chat: ChatTemplate | None = None,
    ) -> None:
        """Create a formatter.

        Args:
            config: The configuration.
            tokenizer: A fast transformers tokenizer; None to format without length limits and chat template.
            labels: Labels of each output; the worked examples of the file must use them.
            retriever: Selects further worked examples for each row.
            chat: Replaces the tokenizer's chat template.

        Raises:
            ModelError: If the chat template is missing or rejects the shape of the prompt.
            DataError: If a worked example is invalid.
        """
        self.config = config
        self.tokenizer = tokenizer
        self._retriever = retriever
        self._prompt = config.prompt
        self._fields = frozenset(template_fields(config.prompt.template or ""))
        self._inputs = text_inputs(config)
        self._limits = length_limits(config) if tokenizer is not None else {}
        self._examples = [worked_example(config, index, labels or {}) for index in range(len(config.prompt.examples))]
        self._chat = chat
        if chat is None and uses_chat(config, tokenizer):
            self._chat = ChatTemplate(
                tokenizer, system=config.prompt.system, arguments=config.prompt.chat_template_kwargs
            )
        self._dialogues = self._dialogue_formatter()

    @property
    def examples_from(self) -> str:
        """A hash of the rows that worked examples are selected from; empty without retrieval."""
        return self._retriever.fingerprint if self._retriever is not None else ""

    @property
    def chat(self) -> bool:
        """Whether prompts use the model's chat template."""
        return self._chat is not None

    @property
    def writes_before_answers(self) -> bool:
        """Whether the chat template writes text between a prompt and an answer, such as an empty thought."""
        return self._chat is not None and self._chat.writes_before_answers

    @property
    def expander(self) -> Expander | None:
        """The expander of dialogues into training rows; None if a row is one already."""
        if self._dialogues is None or self.config.compares_answers:
            return None
        return build_expander(self.config, mode=self._dialogues.mode)

    def format(self, row: Row) -> FormattedText:
        """Return prompt and answer of a row. Raise RowError if it is invalid."""
        return self.format_all([row], [""])[0]

    def format_prompt(self, row: Row) -> FormattedText:
        """Return the prompt of a row. Raise RowError if it is invalid."""
        return self.format_all([row], [""], supervised=False)[0]

    def format_all(self, rows: Sequence[Row], keys: Sequence[str], *, supervised: bool = True) -> list[FormattedText]:
        """Return rows as text, with one retrieval for all of them."""
        chosen = self._retriever.choose(rows, keys) if self._retriever is not None else [[] for _ in rows]
        return [
            self._format(row, [*self._examples, *examples], supervised=supervised)
            for row, examples in zip(rows, chosen, strict=True)
        ]

    def any_prompt(self, answer: str) -> tuple[Segment, ...]:
        """Return segments of a prompt and of `answer`, whose tokens are the same after every prompt."""
        if self._chat is not None:
            return self._chat.render("QUESTION", answer, turns=())[0]
        return Segment("QUESTION\n", False), Segment(answer, True)

    def _format(self, row: Row, examples: Sequence[Row], *, supervised: bool) -> FormattedText:
        if self._dialogues is not None:
            return self._dialogues.format(row[self._dialogues.name], supervised=supervised)
        if self.config.plain_text:
            return document_text(self.config, row) if supervised else FormattedText((), begins=True)
        row, cut = self._limited(row)
        examples = [self._limited(example)[0] for example in examples]
        answer = answer_text(self.config, row) if supervised else None
        turns: list[tuple[str, str]] = []
        if self._chat is None or "__context__" in self._fields:
            user = self._user_text(row, context="\n\n".join(map(self._worked, examples)))
        else:
            user = self._user_text(row)
            turns = [(self._user_text(example), answer_text(self.config, example)) for example in examples]
        if self._chat is not None:
            segments, ends = self._chat.render(user, answer, turns=turns)
            return FormattedText(segments, begins=False, ends=ends, cut_tokens=cut)
        system = f"{self._prompt.system}\n\n" if self._prompt.system else ""
        prompt = Segment(system + user, False)
        if answer is None:
            return FormattedText((prompt,), begins=True, cut_tokens=cut)
        return FormattedText((prompt, Segment(answer, True)), begins=True, ends=True, cut_tokens=cut)

    def _dialogue_formatter(self) -> DialogueFormatter | None:
        feature = self.config.dialogue_input
        return None if feature is None else DialogueFormatter(self.config, tokenizer=self.tokenizer, chat=self._chat)

    def _worked(self, example: Row) -> str:
        """Return a worked example with its answer, in the form of the row itself."""
        template = self._prompt.template
        placed = template is None or "__context__" in self._fields
        question = sample_text(self._inputs, example) + "\n" if placed else self._user_text(example)
        return question + answer_text(self.config, example)

    def _user_text(self, row: Row, *, context: str = "") -> str:
        """Return the user's part of the prompt: the template, or task, context and sample separated by blank lines.

        A single input without anything else is returned as it is. Anything longer ends with a line break, so that the
        answer starts on a new line; in a chat the answer is a separate turn, and with a head there is none.
        """
        prompt = self._prompt
        if prompt.template is not None:
            sample = sample_text(self._inputs, row) if "__sample__" in self._fields else ""
            shown = {"__sample__": sample, "__task__": prompt.task or "", "__context__": context}
            text = prompt.template.format_map({**row, **shown})
            return f"{context}\n\n{text}" if context and "__context__" not in self._fields else text
        blocks = [block for block in (prompt.task, context, sample_text(self._inputs, row)) if block]
        alone = len(self.config.input_features) == 1 and not prompt.task and not context
        is_whole = alone or self._chat is not None or not self.config.has_answer_texts
        return "\n\n".join(blocks) + ("" if is_whole else "\n")

    def _limited(self, row: Row) -> tuple[Row, int]:
        """Truncate the row's texts to their features' max_sequence_length; return it with the number of tokens removed.

        The answer of a single output is not truncated here but as tokens, by RowTokenizer.
        """
        limited, total = dict(row), 0
        for name, limit in self._limits.items():
            value = limited.get(name)
            if isinstance(value, str):
                limited[name], cut = clip(value, limit, self.tokenizer)
                total += cut
        return limited, total


def uses_chat(config: Config, tokenizer: Any) -> bool:
    """Return whether prompts use the chat template. Raise ModelError if it is required and missing."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if config.prompt.chat is True and tokenizer is not None and not has_template:
        raise ModelError(
            f"prompt.chat is true, but the tokenizer of {config.base_model} has no chat template; write chat: auto"
        )
    writes_nothing = config.plain_text or not config.has_answer_texts
    return has_template and config.prompt.chat is not False and not writes_nothing


def document_text(config: Config, row: Row) -> FormattedText:
    """Return a document of language modelling: text without a prompt, between the begin and end tokens."""
    return FormattedText((Segment(answer_text(config, row), True),), begins=True, ends=True)


def length_limits(config: Config) -> dict[str, int]:
    """Return the maximum number of tokens of each text feature that has one, by name.

    The answer of a single output has none here: RowTokenizer truncates its tokens.
    """
    outputs = [output for output in config.output_features if output.free_text]
    features = (*text_inputs(config), *(outputs if len(config.output_features) > 1 else ()))
    return {feature.name: limit for feature in features if (limit := feature.length_limit) is not None}


def text_inputs(config: Config) -> list[TextInput]:
    """Return the text inputs."""
    return [feature for feature in config.input_features if isinstance(feature, TextInput)]


def sample_text(inputs: Sequence[TextInput], row: Row) -> str:
    """Return the inputs of a row: a single one as text, several as lines `name: value`."""
    if len(inputs) == 1:
        return str(row.get(inputs[0].name, ""))
    return "\n".join(f"{feature.name}: {row[feature.name]}" for feature in inputs if feature.name in row)


def answer_text(config: Config, row: Row) -> str:
    """Return the answer: the only output as text, or several as one JSON object in the order of the configuration."""
    outputs = config.output_features
    if len(outputs) == 1:
        return outputs[0].answer_text(row[outputs[0].name])
    return compact_json({feature.name: feature.answer_member(row[feature.name]) for feature in outputs})


def worked_example(config: Config, index: int, labels: Mapping[str, Sequence[str]]) -> Row:
    """Return a worked example of the configuration as a cleaned row. Raise DataError if it is invalid."""
    from marshmallow import ValidationError

    from partita_schema.rows import reasons, row_schema

    columns = {feature.name: feature.source_column for feature in (*config.input_features, *config.output_features)}
    written = {
        columns.get(name, name): list(value) if isinstance(value, tuple) else value
        for name, value in config.prompt.examples[index].items()
    }
    try:
        row: dict[str, Any] = row_schema(config, supervised=True, single=True).load(written)
    except ValidationError as error:
        raise DataError(f"prompt.examples[{index}]: {'; '.join(reasons(error))}") from None
    for feature in config.output_features:
        known = labels.get(feature.name, ())
        wrong = next((label for label in feature.labels_in(row[feature.name]) if label not in known), None)
        if known and wrong is not None:
            message = f"{feature.name} is {wrong!r}, none of the labels {', '.join(known)}"
            raise DataError(f"prompt.examples[{index}]: {message}")
    return row


class CustomFormatter:
    """`data.formatter`: a user's class, created as `Class(config, tokenizer=...)`, instead of Formatter.

    Unpickling loads the class again from the same module.
    """

    chat = False
    """Whether to use a chat template is up to the class."""

    def __init__(self, config: Config, *, tokenizer: Any, folder: Path | None) -> None:
        """Load the class and create an object of it.

        Args:
            config: The configuration.
            tokenizer: The tokenizer.
            folder: Folder of the configuration file, in which modules are also searched.

        Raises:
            ConfigError: There is no such class, or it does not take these arguments.
            DataError: It has raised an exception.
        """
        assert config.data.formatter is not None
        self.config, self.tokenizer, self._folder = config, tokenizer, folder
        self._target = config.data.formatter
        formatter_class = load_class(self._target, key="data.formatter", folder=folder)
        self.fingerprint = source_digest(formatter_class)
        """A hash of the module's source, since a changed module may format rows differently."""
        self._shaper = make_user_object(
            formatter_class,
            self._target,
            key="data.formatter",
            signature="def __init__(self, config, *, tokenizer)",
            arguments=(config,),
            options={"tokenizer": tokenizer},
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (self.config, self.tokenizer, self._folder)

    def format_all(self, rows: Sequence[Row], keys: Sequence[str], *, supervised: bool = True) -> list[FormattedText]:
        """Return rows as text. Raise DataError if the class fails, or does not return a FormattedText for each row."""
        with errors_of(f"data.formatter: {self._target}"):
            results = list(self._shaper.format_all(rows, keys, supervised=supervised))
        if len(results) != len(rows):
            texts, requested = counted(len(results), "text"), counted(len(rows), "row")
            raise DataError(
                f"data.formatter: {self._target} gave {texts} for {requested}; give a FormattedText for each"
            )
        odd = next((type(item).__name__ for item in results if not isinstance(item, FormattedText)), None)
        if odd is not None:
            raise DataError(f"data.formatter: {self._target} gave a {odd} for a row; give a FormattedText for each")
        return results


def rebuilt(config: Config, tokenizer: Any, folder: Path | None) -> CustomFormatter:
    return CustomFormatter(config, tokenizer=tokenizer, folder=folder)
