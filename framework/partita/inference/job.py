"""One job of answering: what is asked, of which model and how; and the count of what it came to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from partita.inference.decode import Decoder
from partita.inference.halving import BatchLimit
from partita.inference.journal import Journal
from partita.inference.predictions import Answer, PredictionStats, answer_of
from partita.inference.prompts import PromptSource
from partita.inference.record import Record, Status
from partita.inference.static import BatchResult, RowResult, generate_rows, unanswerable
from partita.lm.base import GenerationOptions

if TYPE_CHECKING:
    from partita.lm.base import GenerativeModel


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

    def add(self, batch: BatchResult) -> None:
        """Count a batch."""
        self.batches += 1
        self.prompt_tokens += batch.prompt_tokens
        self.padded_tokens += batch.padded_tokens
        self.seconds += batch.seconds
        self.batch_size = batch.batch_size
        self.out_of_memory += batch.out_of_memory
        self.generated_tokens += sum(len(result.generated.ids) for result in batch.results if result.generated)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, 0 before the first batch."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def stats(self, journal: Journal, *, resumed: int) -> PredictionStats:
        """The sums, with what the journal holds in all."""
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
            padding=1 - self.prompt_tokens / self.padded_tokens if self.padded_tokens else 0.0,
        )


@dataclass(frozen=True)
class Job:
    """Everything that decides the answers of a call."""

    lm: "GenerativeModel"
    prompts: PromptSource
    decoder: Decoder
    options: GenerationOptions
    max_new_tokens: int
    batch_size: int
    seed: int
    limit: BatchLimit | None = None
    """Cuts the batches that `batch_size` plans; None for one of the job's own."""

    def answers(
        self, *, done: npt.NDArray[np.bool_], attempts: Callable[[int], int], tally: Tally
    ) -> Iterator[list[Answer]]:
        """Answers of the rows that are not `done` [rows]: first those known without the model, then batch by batch.

        `attempts` tells how often a row was tried before; `tally` is counted up.
        """
        known = [self._record(row, "skipped", reason) for row, reason in self.prompts.skipped.items()]
        errors = unanswerable(self.prompts, context_length=self.lm.context_length)
        known += [self._record(row, "error", reason) for row, reason in errors.items()]
        left = [record for record in known if not done[record.row]]
        if left:
            yield [self._answer(record, attempts) for record in left]
        for batch in self._batches(done):
            tally.add(batch)
            share = round(batch.seconds * 1000 / len(batch.results), 3)
            records = (replace(self._outcome(result), milliseconds=share) for result in batch.results)
            yield [self._answer(record, attempts) for record in records]

    def _batches(self, done: npt.NDArray[np.bool_]) -> Iterator[BatchResult]:
        return generate_rows(
            self.lm,
            self.prompts,
            options=self.options,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            seed=self.seed,
            done=done,
            limit=self.limit,
        )

    def _record(self, row: int, status: Status, error: str | None) -> Record:
        return Record(key=self.prompts.keys[row].tobytes().hex(), row=row, status=status, error=error)

    def _outcome(self, result: RowResult) -> Record:
        generated = result.generated
        if generated is None:
            return self._record(result.row, "error", result.error)
        return replace(
            self._record(result.row, "ok", None),
            text=generated.text,
            tokens=len(generated.ids),
            finish_reason=generated.finish_reason,
        )

    def _answer(self, record: Record, attempts: Callable[[int], int]) -> Answer:
        answer = answer_of(replace(record, attempt=attempts(record.row) + 1), self.decoder)
        return replace(answer, record=replace(answer.record, values=answer.decoded.values))
