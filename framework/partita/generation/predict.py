"""Prediction: prompts, engine, journal, decoder and output table.

`predict_rows` saves every answer in a journal and can be killed and resumed at any time. `generate_for_rows` does
the same without a journal, for evaluation. Ctrl-C, and SIGTERM from a scheduler that reclaims the machine, finish what
has begun.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np

from partita.data.rows import BadRow
from partita.generation.all_rows import AllRows
from partita.generation.encoded_prompts import EncodedPrompts
from partita.generation.job import PredictionJob, PredictionPipeline, Tally
from partita.generation.journals import JobJournal, open_journals
from partita.generation.oom_backoff import BatchBudget
from partita.generation.predictions import Answer, Predictions, PredictionStats
from partita.generation.prompts import PromptRows, PromptSource
from partita.generation.record import fingerprint_of
from partita.runs.progress import READING_IS_SHOWN, NoProgress, ShowProgress
from partita_schema.common.text import counted
from partita_trainers.interrupt import interruption, never
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

if TYPE_CHECKING:
    from partita_trainers.base import Progress

logger = logging.getLogger(__name__)

FINISH_SECONDS = 20
"""Time for started rows to finish: schedulers usually kill a job 30 s after asking it to stop."""


@contextmanager
def finish_started_rows(engine: str, *, finish_seconds: float = FINISH_SECONDS) -> Iterator[Callable[[], bool]]:
    """Let started rows finish after Ctrl-C or SIGTERM; yield a function that returns whether one was received.

    KeyboardInterrupt is raised by a second signal, by the yielded function after `finish_seconds`, and at once with
    a server, whose answers may take long.
    """
    if engine == "server":
        yield never
        return
    with interruption(f"finishing the rows in progress, for {finish_seconds:g} s at most") as interrupt:

        def stopping() -> bool:
            if interrupt.requested and time.monotonic() - interrupt.since > finish_seconds:
                raise KeyboardInterrupt
            return interrupt.requested

        yield stopping


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM in this context, as on Ctrl-C. Has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True, kw_only=True)
class PredictionFiles:
    """Files of a prediction job."""

    journal: Path
    """Rows recorded here are not generated again."""
    fingerprint: Mapping[str, str]
    """What determines an answer, by name; a journal with another fingerprint is refused."""
    output: Path | None = None
    """File to write."""
    safe_csv: bool = False
    """Whether to escape text of a .csv that a spreadsheet would run as a formula."""
    retry_errors: bool = False
    """Whether to generate rows again that ended in an error."""
    fresh: bool = False
    """Whether to discard existing records."""


def predict_rows(
    pipeline: PredictionPipeline,
    rows: PromptRows,
    files: PredictionFiles,
    *,
    budget: Callable[[PromptSource], BatchBudget],
    bad: Sequence[BadRow] = (),
    progress: ShowProgress | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Predictions:
    """Predict all rows, and return the predictions in input order.

    The ranks of `process_group` share the rows, and each returns all predictions.

    Args:
        pipeline: The model, and what turns rows into prompts and answers into values.
        rows: The readable rows.
        files: The journal and the output.
        budget: Returns the batch budget for the prompts; it is lowered when memory runs out.
        bad: Unreadable rows; they become errors at their index in the source.
        progress: Opens a progress display.
        process_group: The ranks that share the rows.

    Raises:
        ResumeError: The journal belongs to another job, or is in use.
        WriteError: The journal or the output cannot be written.
        KeyboardInterrupt: On Ctrl-C or SIGTERM, after all answers so far are on disk.
    """
    fingerprint = {**files.fingerprint, "answers": _answers_input(pipeline)}
    rows = AllRows(rows, bad)
    prompts = _encode_prompts(
        pipeline, rows, fingerprint=fingerprint_of(fingerprint), progress=progress, process_group=process_group
    )
    _warn_of_cut(prompts)
    job = pipeline.prediction_job(prompts, budget, rows=rows, process_group=process_group)
    with (
        job.generation.settings.budget.guard(),
        terminate_as_interrupt(),
        open_journals(
            files.journal,
            fingerprint=fingerprint,
            keys=prompts.keys,
            fresh=files.fresh,
            retry_errors=files.retry_errors,
            process_group=process_group,
        ) as journals,
    ):
        stats = _fill(journals, job, progress=progress)
    _warn_of_unanswered(stats)
    predictions = Predictions(
        rows, files.journal, keys=prompts.keys, config=pipeline.config, decoder=pipeline.decoder, stats=stats
    )
    output = files.output
    if output is not None:
        process_group.run_on_rank_zero(
            lambda: predictions.write(output, safe_csv=files.safe_csv), "the file of predictions"
        )
        predictions.path = output
    return predictions


def _encode_prompts(
    pipeline: PredictionPipeline,
    rows: AllRows,
    *,
    fingerprint: str,
    progress: ShowProgress | None,
    process_group: ProcessGroup,
) -> EncodedPrompts:
    """Tokenize the prompts of all rows, with a progress display if there are many.

    Args:
        pipeline: What turns rows into prompts.
        rows: Readable and unreadable rows.
        fingerprint: Hash of what determines an answer.
        progress: Opens a progress display.
        process_group: The ranks that share the rows.
    """
    shown = progress if len(rows) >= READING_IS_SHOWN else None
    with _display(shown, "reading", total=len(rows)) as display:
        return EncodedPrompts(
            rows,
            pipeline.row_tokenizer,
            pipeline.row_schema,
            fingerprint=fingerprint,
            progress=display.advance,
            process_group=process_group,
            unreadable=rows.unreadable,
        )


def _warn_of_cut(prompts: EncodedPrompts) -> None:
    """Log how many rows are longer than the limits, and how many of their tokens the model does not read."""
    cut, lost = int((prompts.cut_tokens > 0).sum()), int(prompts.cut_tokens.sum())
    if cut:
        logger.warning("%s cut to the length limit, %s not read", counted(cut, "row"), counted(lost, "token"))


def _warn_of_unanswered(stats: PredictionStats) -> None:
    """Log how many rows have no answer, and where the reasons are."""
    if stats.errors or stats.skipped:
        logger.warning(
            "without an answer: %s of %s (%s, %s skipped); the column error holds the reasons",
            f"{stats.errors + stats.skipped:,}",
            counted(stats.rows, "row"),
            counted(stats.errors, "error"),
            f"{stats.skipped:,}",
        )


def _answers_input(pipeline: PredictionPipeline) -> str:
    """Return the input of the fingerprint for the length of answers, the seed of sampled ones, and the reward model."""
    texts = [f"max_new_tokens {pipeline.max_new_tokens}"]
    texts += [f"seed {pipeline.config.sampling_seed}"] if pipeline.generation.do_sample else []
    texts += [f"reward {pipeline.best_of.reward.fingerprint}"] if pipeline.best_of is not None else []
    return ", ".join(texts)


def _fill(journals: JobJournal, job: PredictionJob, *, progress: ShowProgress | None) -> PredictionStats:
    """Generate the answers missing in the journal. Raise KeyboardInterrupt if stopped before the end."""
    done, process_group, journal = journals.before, job.process_group, journals.own
    resumed, tally = int(done.sum()), Tally()
    total, answered = len(done), process_group.shared_counter("answered rows")
    shown, started = resumed, time.perf_counter()
    if resumed:
        logger.info("resumed %s of %s from %s", f"{resumed:,}", f"{total:,}", journals.path)
    with (
        finish_started_rows(job.generation.engine) as stopping,
        _display(progress, "predicting", total=total, completed=resumed) as display,
    ):
        job = job.stopped_by(stopping)
        for answers in job.completions(done=done, attempts=journals.attempts, tally=tally):
            journal.append([answer.record for answer in answers])
            tally.unreadable += sum(answer.record.status == "ok" and bool(answer.decoded.errors) for answer in answers)
            now = resumed + answered(len(answers)) + len(answers)
            display.advance(now - shown, **tally.display_values)
            shown = now
        if stopping() and resumed + answered(0) < total:
            raise KeyboardInterrupt
        journals.join()
        tally = Tally.together(process_group.all_gather_object(tally, "the sums of the answers"))
        if total > shown:
            display.advance(total - shown, **tally.display_values)
    seconds = time.perf_counter() - started
    return process_group.run_on_rank_zero(
        lambda: tally.stats(journal, resumed=resumed, seconds=seconds), "the sums of the job"
    )


def generate_for_rows(
    pipeline: PredictionPipeline,
    rows: PromptRows,
    *,
    budget: BatchBudget,
    progress: ShowProgress | None = None,
    description: str = "predicting",
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Iterator[Answer]:
    """Generate an answer for each row, and yield the answers in the order of completion; nothing is written.

    Rows without an answer are included, with an error and without values. In a process group, each rank yields the
    answers of some rows.

    Args:
        pipeline: The model, and what turns rows into prompts and answers into values.
        rows: The rows.
        budget: The batch budget; lowered when memory runs out.
        progress: Opens a progress display.
        description: Text of the progress display.
        process_group: The ranks that share the rows.
    """
    prompts = EncodedPrompts(rows, pipeline.row_tokenizer, pipeline.row_schema, process_group=process_group)
    job = pipeline.prediction_job(prompts, lambda prompts: budget, rows=rows, process_group=process_group)
    tally, answered, shown = Tally(), process_group.shared_counter("answered rows"), 0
    with _display(progress, description, total=len(rows)) as display:
        for answers in job.completions(done=np.zeros(len(rows), dtype=np.bool_), attempts=lambda row: 0, tally=tally):
            yield from answers
            now = answered(len(answers)) + len(answers)
            display.advance(now - shown, **tally.display_values)
            shown = now
        process_group.all_gather_object(None, "the end of the answers")
        if len(rows) > shown:
            display.advance(len(rows) - shown, **tally.display_values)


def _display(
    progress: ShowProgress | None, description: str, *, total: int, completed: int = 0
) -> "AbstractContextManager[Progress]":
    return nullcontext(NoProgress()) if progress is None else progress(total, description, completed=completed)
