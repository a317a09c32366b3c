"""One prediction job: its inputs, and the statistics of its batches."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

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
from partita.lm.base import GenerationOptions
from partita.outputs.decode import Decoder
from partita_schema.config import Config
from partita_schema.rows import RowSchema, row_schema
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

logger = logging.getLogger(__name__)


@dataclass
class Tally:
    """Sums over the batches of a call."""

    batches: int = 0
    prompt_tokens: int = 0
    padded_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    unreadable: int = 0
    batch_size: int = 0
    out_of_memory: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    slot_steps: int = 0
    row_steps: int = 0

    def add(self, batch: BatchResult) -> None:
        """Add the counts of a batch."""
        self.batches += 1
        self.prompt_tokens += batch.prompt_tokens
        self.padded_tokens += batch.padded_tokens
        self.seconds += batch.seconds
        self.batch_size = batch.batch_size
        self.out_of_memory += batch.out_of_memory
        self.prefill_seconds += batch.prefill_seconds
        self.decode_seconds += batch.decode_seconds
        self.slot_steps += batch.slot_steps
        self.row_steps += batch.row_steps
        self.generated_tokens += sum(result.generated.num_tokens for result in batch.results if result.generated)

    @classmethod
    def together(cls, tallies: "Sequence[Tally]") -> "Tally":
        """Merge the sums of all ranks. The ranks ran at the same time, so their seconds are averaged."""
        sums = {field.name: sum(getattr(tally, field.name) for tally in tallies) for field in fields(cls)}
        for name in ("seconds", "prefill_seconds", "decode_seconds"):
            sums[name] /= len(tallies)
        return cls(**sums)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second; 0 before the first batch."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def display_values(self) -> dict[str, float | str]:
        """The values that a progress display shows in addition to the rows."""
        shown: dict[str, float | str] = {}
        if self.generated_tokens:
            shown["tokens_per_second"] = self.tokens_per_second
        if self.slot_steps:
            shown["slots"] = f"{self.row_steps / self.slot_steps:.0%} of {self.batch_size:,}"
        if self.padded_tokens:
            shown["padding"] = f"{self.padding:.0%}"
        if self.seconds:
            shown["prompt_tokens_per_second"] = self.prompt_tokens / self.seconds
        return shown

    @property
    def padding(self) -> float:
        """Share of padding in the tokens processed."""
        return 1 - self.prompt_tokens / self.padded_tokens if self.padded_tokens else 0.0

    def stats(self, journal: Journal, *, resumed: int, seconds: float) -> PredictionStats:
        """Return the statistics of the job, with the totals of the journal; `seconds` is the time of the whole job."""
        return PredictionStats(
            rows=len(journal),
            ok=journal.count("ok"),
            errors=journal.count("error"),
            skipped=journal.count("skipped"),
            resumed=resumed,
            batches=self.batches,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            seconds=self.seconds,
            unreadable=self.unreadable,
            tokens_per_second=self.tokens_per_second,
            batch_size=self.batch_size,
            out_of_memory=self.out_of_memory,
            padding=self.padding,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            host_seconds=max(0.0, seconds - self.prefill_seconds - self.decode_seconds) if self.slot_steps else 0.0,
            slots_in_use=self.row_steps / self.slot_steps if self.slot_steps else 0.0,
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
            share = round(batch.seconds * 1000 / len(batch.results), 3)
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
