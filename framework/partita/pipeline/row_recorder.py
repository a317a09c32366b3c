"""Records the results of the rows of an evaluation in a run directory, while they are scored."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from partita.data.formatting.formatter import answer_text, sample_text, text_inputs
from partita.data.formatting.preferences import rejected_text
from partita.data.rows import row_content
from partita.generation.predictions import Answer
from partita.outputs.registry import output_types
from partita.outputs.scorer import RowScore, scores_of
from partita.pipeline.dataset_loss import DatasetLoss, RowLosses
from partita.pipeline.eval_dataset import EvalDataset
from partita.runs.row_results import (
    EvaluationHeader,
    OutputResult,
    RecordedRow,
    RowSpool,
    completeness,
    evaluation_path,
    recorded_header,
)
from partita_schema.config import Config
from partita_schema.dialogues.common_form import message_text
from partita_schema.errors import shortened
from partita_schema.rows import check_rows, row_schema
from partita_trainers.process_group import ProcessGroup, synchronized_errors

MAX_PROMPT = 300
"""Characters of a prompt that are recorded."""
MAX_CONTEXT = 300
"""Characters of the earlier turns of a dialogue that are recorded."""
MAX_SCORES = 10
"""Labels whose log probabilities are recorded, in addition to those of the reference."""


@dataclass(frozen=True)
class RecordedEvaluation:
    """Where the results of an evaluation are recorded, and what is evaluated."""

    run: Path
    """The run directory."""
    split: str
    model: Literal["result", "base"] = "result"
    step: int | None = None
    """Training step of the weights."""

    @property
    def path(self) -> Path:
        """The file of the results."""
        return evaluation_path(self.run, self.split, base=self.model == "base")


@dataclass(frozen=True)
class ScoredRow:
    """A row whose answer has been scored."""

    index: int
    """Index of the row in the split."""
    raw: Mapping[str, Any]
    """The row by column."""
    truths: Sequence[Mapping[str, Any]]
    """The row by feature with the reference of each output, once for each correct answer."""
    answer: Answer
    """Its answer."""
    scores: Mapping[str, RowScore]
    """The score of each output, by name."""


class RowRecorder:
    """Collects the results of the rows of a split, and writes them in the order of the rows."""

    def __init__(
        self,
        to: RecordedEvaluation,
        config: Config,
        dataset: EvalDataset,
        loss: DatasetLoss | None,
        *,
        answered: bool,
        is_whole: bool,
        file: IO[bytes],
    ) -> None:
        """Start without rows.

        Args:
            to: What is evaluated, and where it is recorded.
            config: The configuration.
            dataset: The rows of the split.
            loss: Their loss; None if the backend computes none.
            answered: Whether answers are generated; otherwise the rows are recorded with their losses only.
            is_whole: Whether all rows are recorded; of those without an expected answer, the losses only.
            file: A temporary file, in which the rows are collected.
        """
        self._to, self._config, self._rows, self._answered = to, config, dataset.rows, answered
        self._without_answer_N = np.full(len(dataset.rows), is_whole)
        if answered:
            self._without_answer_N[slice(None) if dataset.expected_N is None else dataset.expected_N] = False
        self._types = output_types(config)
        self._losses: np.ndarray | None = None
        self._tokens = np.zeros(0, dtype=np.int64)
        if loss is not None and loss.rows is not None:
            self._losses, self._tokens = loss.rows.means_of_answers(dataset.answer_of_N, answers=len(dataset.rows))
        self._values = {} if loss is None or loss.rows is None else values_of_answers(loss.rows, dataset.answer_of_N)
        self._num_labels: dict[str, int] = {}
        self._spool = RowSpool(file, rows=len(dataset.rows))

    def add(self, scored: ScoredRow) -> None:
        """Record a row with its answer."""
        outputs = {name: self._output(name, scored) for name in self._types}
        self._add(scored.index, scored.raw, scored.truths[0], answer=scored.answer.record.text, outputs=outputs)

    def write(self, metrics: Mapping[str, float]) -> None:
        """Write the results of the recorded rows. Raise OSError if they cannot be written."""
        if self._without_answer_N.any():
            self._add_losses()
        header = EvaluationHeader(
            split=self._to.split,
            model=self._to.model,
            fingerprint="",  # the spool knows the rows
            step=self._to.step,
            outputs={name: output.feature.type for name, output in self._types.items()},
            answered=self._answered,
            num_labels=self._num_labels,
            metrics=metrics,
        )
        self._spool.write(self._to.path, header)

    def _add_losses(self) -> None:
        """Record the rows without an answer with their losses, and with the numbers of the objective."""
        schema, start = row_schema(self._config, supervised=True), 0
        for chunk in self._rows.iterate():
            for index, row in check_rows(schema, chunk).clean.items():
                if self._without_answer_N[start + index]:
                    outputs = self._outputs_without_answer(start + index, row)
                    self._add(start + index, chunk[index], row, answer=None, outputs=outputs)
            start += len(chunk)

    def _outputs_without_answer(self, index: int, row: Mapping[str, Any]) -> Mapping[str, OutputResult]:
        """Return the numbers of the objective for a row; nothing of an objective without any."""
        of_row = self._of_row(index, row)
        if of_row is None:
            return {}
        return {
            name: OutputResult(row.get(name) if output.feature.free_text else None, None, of_row=of_row)
            for name, output in self._types.items()
        }

    def _of_row(self, index: int, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the numbers of the objective for a row, of a pair with the rejected answer; None without any."""
        values = self._values.get(index)
        if values is None:
            return None
        numbers = {name: value if isinstance(value, int) else float(f"{value:.9g}") for name, value in values.items()}
        has_pairs = self._config.output_features[0].has_pairs
        return numbers | ({"rejected": rejected_text(row, self._config)} if has_pairs else {})

    def _add(
        self,
        index: int,
        raw: Mapping[str, Any],
        row: Mapping[str, Any],
        *,
        answer: str | None,
        outputs: Mapping[str, OutputResult],
    ) -> None:
        """Record a row.

        Args:
            index: Index of the row in the split.
            raw: The row by column.
            row: The row by feature.
            answer: The generated text.
            outputs: The results of the outputs.
        """
        result = RecordedRow(
            key=self._rows.key(index),
            prompt=shortened(readable_inputs(self._config, row), MAX_PROMPT),
            context=earlier_turns(self._config, row),
            answer=answer,
            loss=None if self._losses is None else float(self._losses[index]),
            tokens=None if self._losses is None else int(self._tokens[index]),
            outputs=outputs,
        )
        self._spool.add(index, result, content=row_content(raw))

    def _output(self, name: str, scored: ScoredRow) -> OutputResult:
        """Return the result of an output of a row."""
        output, record = self._types[name], scored.answer.record
        scores = scores_of(name, record.scores, in_sequence=self._config.answers_in_sequence)
        right, of_row, closest = scored.scores[name]
        log_probabilities, reference = output.log_probabilities(scores), scored.truths[closest][name]
        best = None
        if log_probabilities is not None:
            self._num_labels[name] = len(log_probabilities)
            best = best_scores(log_probabilities, known=output.feature.labels_in(reference))
        of_objective = self._of_row(scored.index, scored.truths[0])
        if of_objective is not None:
            of_row = {**(of_row or {}), **of_objective}
        value, is_read = scored.answer.decoded.values[name], name not in scored.answer.decoded.errors
        return OutputResult(reference, value, right, best, of_row, is_null=value is None and is_read)


@contextmanager
def open_recorder(
    to: RecordedEvaluation | None,
    config: Config,
    dataset: EvalDataset,
    loss: DatasetLoss | None,
    *,
    is_whole: bool,
    answered: bool,
    process_group: ProcessGroup,
) -> Iterator[RowRecorder | None]:
    """Yield the recorder of an evaluation; None on ranks that record nothing.

    The results of an earlier evaluation of the split are kept if they are more complete: with a loss rather than
    without, with answers rather than without, of all rows rather than of some. So an evaluation of some rows during
    training is recorded until the first one of all rows.

    Args:
        to: What is evaluated, and where it is recorded; None to record nothing.
        config: The configuration.
        dataset: The rows of the split.
        loss: Their loss; None if the backend computes none.
        is_whole: Whether all rows are recorded.
        answered: Whether answers are generated.
        process_group: The ranks that share the rows; rank 0 records them.

    Raises:
        OSError: The run directory cannot be written.
    """
    recorder = None
    with ExitStack() as stack:
        with synchronized_errors(process_group, "the file of the results of rows"):
            if to is not None and process_group.rank == 0:
                earlier = recorded_header(to.path)
                metrics = {} if loss is None else loss.metrics
                own = completeness(metrics, answered=answered, is_whole=is_whole)
                if earlier is None or earlier.completeness <= own:
                    to.path.parent.mkdir(parents=True, exist_ok=True)
                    # It has no name, so that a killed process leaves nothing.
                    file = stack.enter_context(tempfile.TemporaryFile(dir=to.path.parent))
                    recorder = RowRecorder(to, config, dataset, loss, answered=answered, is_whole=is_whole, file=file)
        yield recorder


def values_of_answers(rows: RowLosses, answer_of_N: np.ndarray) -> dict[int, Mapping[str, float]]:
    """Return the numbers of the objective by index of the answer, of objectives whose rows are answers."""
    return {int(answer_of_N[index]): values for index, values in rows.values.items()}


def best_scores(scores: Mapping[str, float], *, known: tuple[str, ...]) -> dict[str, float]:
    """Return the log probabilities of the most probable labels, the first one first, and of the `known` ones."""
    best = sorted(scores, key=lambda label: -scores[label])[:MAX_SCORES]
    chosen = [*best, *(label for label in known if label in scores and label not in best)]
    return {label: float(f"{scores[label]:.9g}") for label in chosen}


def readable_inputs(config: Config, row: Mapping[str, Any]) -> str:
    """Return the inputs of a row as text: of a dialogue the last user message, of a document its own text.

    Of a pair without inputs, that is the common beginning of its texts.
    """
    if config.plain_text:
        text = answer_text(config, row)
        return common_beginning(text, rejected_text(row, config)) if config.output_features[0].has_pairs else text
    if config.dialogue_input is None:
        return sample_text(text_inputs(config), row)
    _, asked = split_dialogue(row[config.dialogue_input.name]["messages"])
    return message_text(asked[0]) if asked else ""


def common_beginning(one: str, other: str) -> str:
    """Return the characters that two texts begin with."""
    return "".join(letter for letter, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def earlier_turns(config: Config, row: Mapping[str, Any]) -> str:
    """Return the end of what was said before the last user message of a dialogue; empty for other rows."""
    if config.plain_text or config.dialogue_input is None:
        return ""
    earlier, _ = split_dialogue(row[config.dialogue_input.name]["messages"])
    lines = "\n".join(f"{message['role']}: {message_text(message)}" for message in earlier)
    return lines if len(lines) <= MAX_CONTEXT else f"... {lines[-MAX_CONTEXT:]}"


def split_dialogue(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], ...]:
    """Return the messages before the last one of the user, and those from it on; the last one if the user has none."""
    places = [index for index, message in enumerate(messages) if message["role"] == "user"] or [len(messages) - 1]
    return messages[: places[-1]], messages[places[-1] :]
