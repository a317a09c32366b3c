"""One prediction job: its inputs, and the statistics of its batches."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from partita.generation.best_of import AnswerChooser, BestOf
from partita.generation.generator import Generator
from partita.generation.journal import Journal
from partita.generation.oom_backoff import BatchBudget
from partita.generation.predictions import Answer, PredictionStats, answer_of
from partita.generation.prompts import PromptRows, PromptSource, PromptTokenizer
from partita.generation.record import PredictionRecord, Status
from partita.generation.requests import (
    AnswerSequence,
    BatchResult,
    GenerationJob,
    GenerationSettings,
    RowResult,
    unanswerable,
)
from partita.generation.sampled_prompts import SampledPrompts
from partita.generation.spent import Spent
from partita.lm.base import GenerationOptions
from partita.outputs.decode import Decoder
from partita_schema.config import Config
from partita_schema.rows import RowSchema, row_schema
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

logger = logging.getLogger(__name__)


@dataclass
class Tally:
    """Sums over the batches of a call."""

    spent: Spent = field(default_factory=Spent)
    batches: int = 0
    generated_tokens: int = 0
    unreadable: int = 0
    batch_size: int = 0

    def add(self, batch: BatchResult) -> None:
        """Add the counts of a batch."""
        self.spent += batch.spent
        self.batches += 1
        self.batch_size = batch.batch_size
        self.generated_tokens += sum(result.generated.num_tokens for result in batch.results if result.generated)

    @classmethod
    def together(cls, tallies: "Sequence[Tally]") -> "Tally":
        """Merge the sums of all ranks. The ranks ran at the same time, so their seconds are averaged."""
        return cls(
            sum((tally.spent for tally in tallies), Spent()).with_mean_seconds(len(tallies)),
            batches=sum(tally.batches for tally in tallies),
            generated_tokens=sum(tally.generated_tokens for tally in tallies),
            unreadable=sum(tally.unreadable for tally in tallies),
            batch_size=sum(tally.batch_size for tally in tallies),
        )

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second; 0 before the first batch."""
        return self.generated_tokens / self.spent.seconds if self.spent.seconds else 0.0

    @property
    def display_values(self) -> dict[str, float | str]:
        """The values that a progress display shows in addition to the rows."""
        spent, shown = self.spent, dict[str, float | str]()
        if self.generated_tokens:
            shown["tokens_per_second"] = self.tokens_per_second
        if spent.slot_steps:
            shown["slots"] = f"{spent.row_steps / spent.slot_steps:.0%} of {self.batch_size:,}"
        if spent.padded_tokens:
            shown["padding"] = f"{self.padding:.0%}"
        if spent.seconds:
            shown["prompt_tokens_per_second"] = spent.prompt_tokens / spent.seconds
        return shown

    @property
    def padding(self) -> float:
        """Share of padding in the tokens processed."""
        return 1 - self.spent.prompt_tokens / self.spent.padded_tokens if self.spent.padded_tokens else 0.0

    def stats(self, journal: Journal, *, resumed: int, seconds: float) -> PredictionStats:
        """Return the statistics of the job, with the totals of the journal; `seconds` is the time of the whole job."""
        spent = self.spent
        on_host = max(0.0, seconds - spent.prefill_seconds - spent.decode_seconds)
        return PredictionStats(
            rows=len(journal),
            ok=journal.count("ok"),
            errors=journal.count("error"),
            skipped=journal.count("skipped"),
            resumed=resumed,
            batches=self.batches,
            prompt_tokens=spent.prompt_tokens,
            generated_tokens=self.generated_tokens,
            seconds=spent.seconds,
            unreadable=self.unreadable,
            tokens_per_second=self.tokens_per_second,
            batch_size=self.batch_size,
            out_of_memory=spent.out_of_memory,
            padding=self.padding,
            prefill_seconds=spent.prefill_seconds,
            decode_seconds=spent.decode_seconds,
            host_seconds=on_host if spent.slot_steps else 0.0,
            slots_in_use=spent.row_steps / spent.slot_steps if spent.slot_steps else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class PredictionPipeline:
    """What turns rows into predictions."""

    config: Config
    generator: Generator
    row_tokenizer: PromptTokenizer
    """Tokenizes prompts."""
    decoder: Decoder
    """Parses answers."""
    generation: GenerationOptions
    max_new_tokens: int
    """Limit of generated tokens per answer, and of the prompt tokens between the answers of a sequence."""
    sequence: AnswerSequence | None = None
    """The answers to a row that follow one another; None if there is one."""
    best_of: BestOf | None = None
    """Chooses among several answers to each row; None to draw one."""

    @property
    def num_samples(self) -> int:
        """Number of answers that are drawn for a row."""
        return 1 if self.best_of is None else self.best_of.num_samples

    @property
    def row_schema(self) -> RowSchema:
        """Converts a row without answers to values by feature name."""
        return row_schema(self.config, supervised=False)

    def prediction_job(
        self,
        prompts: PromptSource,
        budget: Callable[[PromptSource], BatchBudget],
        *,
        rows: PromptRows,
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> "PredictionJob":
        """Choose the engine for prompts, then their batch size, and return the job.

        Args:
            prompts: The prompts.
            budget: Returns the batch budget for the prompts, of which each sample of a row has one.
            rows: The rows of the prompts.
            process_group: The ranks that share the rows.
        """
        num_samples = self.num_samples
        asked = prompts if self.best_of is None else SampledPrompts(prompts, num_samples=num_samples)
        engine = self.generator.choose_engine(
            asked.lengths, options=self.generation, max_new_tokens=self.max_new_tokens
        )
        if num_samples > 1 and engine != "slots":
            where = "on the server" if engine == "server" else "without continuous batching"
            logger.info("a prompt is computed %s times, once for each answer of best_of: %s", num_samples, where)
        settings = GenerationSettings(
            self.generation, budget(asked), self.config.sampling_seed, process_group=process_group
        )
        job = GenerationJob(
            asked,
            settings,
            engine=engine,
            max_new_tokens=self.max_new_tokens,
            sequence=self.sequence,
            num_samples=num_samples,
        )
        chooser = None if self.best_of is None else AnswerChooser(self.best_of, rows)
        return PredictionJob(self.generator, self.decoder, job, prompts, chooser)


@dataclass(frozen=True)
class PredictionJob:
    """The answers of a call."""

    generator: Generator
    decoder: Decoder
    generation: GenerationJob
    prompts: PromptSource
    """The prompt of each row."""
    chooser: AnswerChooser | None = None
    """Chooses among the answers to a row; None if there is one."""

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that share the rows."""
        return self.generation.settings.process_group

    def stopped_by(self, stopping: Callable[[], bool]) -> "PredictionJob":
        """Return the job that starts no more rows once `stopping` returns True."""
        settings = replace(self.generation.settings, stopping=stopping)
        return replace(self, generation=replace(self.generation, settings=settings))

    def completions(
        self, *, done: npt.NDArray[np.bool_], attempts: Callable[[int], int], tally: Tally
    ) -> Iterator[list[Answer]]:
        """Yield the answers of the rows that are not `done`: first those known without the model, then batch by batch.

        In a process group, each rank yields the rows that it takes, and rank 0 also those known without the model.

        Args:
            done: Rows that are answered already, [rows].
            attempts: Returns how often a row was tried before.
            tally: Sums to add the batches to.
        """

        def number(row: int) -> int:
            return attempts(row) + 1

        errors = unanswerable(
            self.prompts,
            max_new_tokens=self.generation.max_new_tokens,
            context_length=self.generator.context_length,
            answers=self.generator.answer_context,
        )
        known: list[tuple[int, Status, str]] = [
            *((row, "skipped", reason) for row, reason in self.prompts.skipped.items()),
            *((row, "error", reason) for row, reason in errors.items()),
        ]
        left = [
            PredictionRecord(key=self._key(row), row=row, status=status, error=reason, attempt=number(row))
            for row, status, reason in known
            if not done[row] and self.process_group.rank == 0
        ]
        if left:
            yield [self._answer(record) for record in left]
        for batch in self.generator.generate(self.generation, done=np.repeat(done, self.generation.num_samples)):
            tally.add(batch)
            share = round(batch.spent.seconds * 1000 / len(batch.results), 3)
            results = batch.results if self.chooser is None else self.chooser.take(batch.results)
            if results:
                yield self._answers(results, number=number, milliseconds=share)
        if self.chooser is not None:
            self.chooser.log_unscored()

    def _key(self, row: int) -> str:
        key: bytes = self.prompts.keys[row].tobytes()
        return key.hex()

    def _answers(
        self, results: Sequence[RowResult], *, number: Callable[[int], int], milliseconds: float
    ) -> list[Answer]:
        """Return the answers of rows.

        Args:
            results: Their results.
            number: Returns the number of a row's attempt.
            milliseconds: Time of a row.
        """
        return [
            self._answer(
                record_of(result, key=self._key(result.row), attempt=number(result.row), milliseconds=milliseconds)
            )
            for result in results
        ]

    def _answer(self, record: PredictionRecord) -> Answer:
        """Return the answer of a record with its parsed values."""
        answer = answer_of(record, self.decoder)
        return Answer(replace(record, values=answer.decoded.values), answer.decoded)


def record_of(result: RowResult, *, key: str, attempt: int = 1, milliseconds: float = 0.0) -> PredictionRecord:
    """Return the record of a result.

    Args:
        result: The result of a row.
        key: The key of the row's answer, in hexadecimal.
        attempt: How often the row was tried.
        milliseconds: Time of the row.
    """
    generated = result.generated
    record = PredictionRecord(
        key=key, row=result.row, status="error", error=result.error, attempt=attempt, milliseconds=milliseconds
    )
    if generated is None:
        return record
    return replace(
        record,
        status="ok",
        error=None,
        text=generated.text,
        tokens=generated.num_tokens,
        finish_reason=generated.finish_reason,
        logprob=generated.logprob,
        scores=dict(generated.scores) if generated.scores is not None else None,
        reward=result.reward,
        samples=[dict(sample) for sample in result.samples] if result.samples is not None else None,
    )
