"""Prediction put together: prompts, engine, journal, decoder, table.

`predict_rows` keeps every answer in a journal and can be killed and started again at any time. `answer_rows` is the
same without a journal, for evaluation.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from partita.data.rows import BadRow
from partita.inference.all_rows import AllRows
from partita.inference.decode import Decoder
from partita.inference.engine import choose_engine
from partita.inference.job import Job, Tally
from partita.inference.journals import JobJournal, open_journals
from partita.inference.oom_backoff import BatchLimit, Capacity
from partita.inference.predictions import Answer, Predictions, PredictionStats
from partita.inference.prompts import EncodedPrompts, PromptEncoder, PromptRows, PromptSource
from partita.inference.record import fingerprint_of
from partita.inference.stopping import finish_what_was_begun, terminate_as_interrupt
from partita.lm.base import GenerationOptions
from partita_schema.config import Config
from partita_schema.counted import counted
from partita_schema.features import CategoryOutput, JsonOutput, OutputFeature, TextOutput
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup

if TYPE_CHECKING:
    from marshmallow import Schema

    from partita.inference.endpoint.server import EndpointClient
    from partita.inference.fleet.worker_pool import WorkerPool
    from partita.lm.base import GenerativeModel
    from partita_trainers.base import Progress

logger = logging.getLogger(__name__)

DEFAULT_NEW_TOKENS = 256
READING_IS_SHOWN = 10_000
"""Rows from which on reading them takes long enough to be shown."""
SPARE_LABEL_TOKENS = 8
"""Room around a label, for an answer such as "The label is positive."."""


class ShowProgress(Protocol):
    """Makes a progress display; a run's `progress` is one."""

    def __call__(self, total: int, description: str, *, completed: int = 0) -> "AbstractContextManager[Progress]":
        """The display, in a context."""


def predict_rows(
    *,
    lm: "GenerativeModel | EndpointClient | WorkerPool",
    rows: PromptRows,
    encoder: PromptEncoder,
    schema: "Schema",
    decoder: Decoder,
    config: Config,
    generation: GenerationOptions,
    max_new_tokens: int,
    capacity: Callable[[PromptSource], Capacity],
    seed: int,
    journal_path: Path,
    output: Path | None,
    safe_csv: bool = False,
    fingerprint: Mapping[str, str],
    bad: Sequence[BadRow] = (),
    retry_errors: bool = False,
    fresh: bool = False,
    progress: ShowProgress | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Predictions:
    """Predictions of all rows, in input order; written to `output` where one is given.

    `schema` cleans a row into values by feature name. `fingerprint` names what decides an answer, by part; a journal
    with another one is refused. Rows that the journal holds are not generated again. Rows in `bad`, which could not be
    read, are errors at their place among the others. `capacity` is asked with the prompts; its limit falls where memory
    runs out, also for the jobs that share it. The ranks of `process_group` share the rows, and each has all predictions
    in the end. Raises ResumeError, WriteError, and KeyboardInterrupt on Ctrl-C or SIGTERM once all answers so far are
    on the disk.
    """
    answers = _answers_part(generation, max_new_tokens, seed=seed)
    rows = AllRows(rows, bad)
    shown = progress if len(rows) >= READING_IS_SHOWN else None
    with _display(shown, "reading", total=len(rows)) as display:
        parts = {**fingerprint, "answers": answers}
        prompts = EncodedPrompts(
            rows,
            encoder,
            schema,
            fingerprint=fingerprint_of(parts),
            progress=display.advance,
            process_group=process_group,
            unreadable=rows.unreadable,
        )
    engine = choose_engine(lm, prompts.lengths, options=generation, max_new_tokens=max_new_tokens)
    allowed = capacity(prompts)
    job = Job(
        lm,
        prompts,
        decoder,
        generation,
        engine,
        max_new_tokens=max_new_tokens,
        batch_size=allowed.rows,
        room_tokens=allowed.room_tokens,
        seed=seed,
        limit=allowed.limit,
        process_group=process_group,
    )
    with (
        allowed.guard(),
        terminate_as_interrupt(),
        open_journals(
            journal_path,
            fingerprint=parts,
            keys=prompts.keys,
            fresh=fresh,
            retry_errors=retry_errors,
            process_group=process_group,
        ) as journals,
    ):
        stats = _fill(journals, job, progress=progress)
    _tell_unanswered(stats)
    predictions = Predictions(rows, journal_path, config=config, decoder=decoder, stats=stats)
    if output is not None:
        process_group.run_on_rank_zero(lambda: predictions.write(output, safe_csv=safe_csv), "the file of predictions")
        predictions.path = output
    return predictions


def _tell_unanswered(stats: PredictionStats) -> None:
    """Say how many rows have no answer, and where their reasons stand."""
    if stats.errors or stats.skipped:
        logger.warning(
            "without an answer: %s of %s (%s, %s skipped); the column error holds the reasons",
            f"{stats.errors + stats.skipped:,}",
            counted(stats.rows, "row"),
            counted(stats.errors, "error"),
            f"{stats.skipped:,}",
        )


def _answers_part(generation: GenerationOptions, max_new_tokens: int, *, seed: int) -> str:
    """How long answers are, and where they are sampled, from which seed."""
    return f"max_new_tokens {max_new_tokens}" + (f", seed {seed}" if generation.samples else "")


def _fill(journals: JobJournal, job: Job, *, progress: ShowProgress | None) -> PredictionStats:
    """Append the answers that the journal lacks. Raises KeyboardInterrupt where that was stopped before the end."""
    done, process_group, journal = journals.before, job.process_group, journals.own
    resumed, tally = int(done.sum()), Tally()
    total, answered = len(done), process_group.shared_counter("answered rows")
    shown, started = resumed, time.perf_counter()
    if resumed:
        logger.info("resumed %s of %s", f"{resumed:,}", f"{total:,}")
    with (
        finish_what_was_begun(job.engine) as stopping,
        _display(progress, "predicting", total=total, completed=resumed) as display,
    ):
        job = replace(job, stopping=stopping)
        for answers in job.completions(done=done, attempts=journals.attempts, tally=tally):
            journal.append([answer.record for answer in answers])
            tally.unreadable += sum(answer.record.status == "ok" and bool(answer.decoded.errors) for answer in answers)
            now = resumed + answered(len(answers)) + len(answers)
            display.advance(now - shown, **tally.shown)
            shown = now
        if stopping() and resumed + answered(0) < total:
            raise KeyboardInterrupt
        journals.join()
        tally = Tally.together(process_group.all_gather_object(tally, "the sums of the answers"))
        if total > shown:
            display.advance(total - shown, **tally.shown)
    seconds = time.perf_counter() - started
    return process_group.run_on_rank_zero(
        lambda: tally.stats(journal, resumed=resumed, seconds=seconds), "the sums of the job"
    )


def generate_for_rows(
    *,
    lm: "GenerativeModel | EndpointClient | WorkerPool",
    rows: PromptRows,
    encoder: PromptEncoder,
    schema: "Schema",
    decoder: Decoder,
    generation: GenerationOptions,
    max_new_tokens: int,
    batch_size: int,
    seed: int,
    progress: ShowProgress | None = None,
    description: str = "predicting",
    limit: BatchLimit | None = None,
    process_group: ProcessGroup = SINGLE_PROCESS,
) -> Iterator[Answer]:
    """Each row's answer once, in the order they are made; nothing is written. `limit` is as in `predict_rows`.

    Rows that could not be answered are among them, with an error and without values. Of a process group, each rank has
    those of some rows.
    """
    prompts = EncodedPrompts(rows, encoder, schema, process_group=process_group)
    engine = choose_engine(lm, prompts.lengths, options=generation, max_new_tokens=max_new_tokens)
    job = Job(
        lm,
        prompts,
        decoder,
        generation,
        engine,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        seed=seed,
        limit=limit,
        process_group=process_group,
    )
    tally, answered, shown = Tally(), process_group.shared_counter("answered rows"), 0
    with _display(progress, description, total=len(rows)) as display:
        for answers in job.completions(done=np.zeros(len(rows), dtype=np.bool_), attempts=lambda row: 0, tally=tally):
            yield from answers
            now = answered(len(answers)) + len(answers)
            display.advance(now - shown, **tally.shown)
            shown = now
        process_group.all_gather_object(None, "the end of the answers")
        if len(rows) > shown:
            display.advance(len(rows) - shown, **tally.shown)


class _HiddenProgress:
    def advance(self, amount: int = 1, **shown: Any) -> None:
        """Shows nothing."""


def _display(
    progress: ShowProgress | None, description: str, *, total: int, completed: int = 0
) -> "AbstractContextManager[Progress]":
    return nullcontext(_HiddenProgress()) if progress is None else progress(total, description, completed=completed)


def default_new_tokens(
    config: Config, *, tokenizer: Any, labels: Mapping[str, Sequence[str]], otherwise: int = DEFAULT_NEW_TOKENS
) -> int:
    """Tokens that an answer may have.

    generation.max_new_tokens where the file has it. Else what the outputs need together: decoder.max_new_tokens, else
    preprocessing.max_sequence_length, else for a category its longest label and a little, else `otherwise`; and with
    several outputs the tokens of the JSON object around them.
    """
    if config.generation.max_new_tokens is not None:
        return config.generation.max_new_tokens

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    features = config.output_features
    found = [_feature_tokens(feature, labels=labels.get(feature.name, ()), count=count) for feature in features]
    needed = sum(otherwise if tokens is None else tokens for tokens in found)
    around = sum(count(f'"{feature.name}": "", ') for feature in features) + count("{}") if len(features) > 1 else 0
    return needed + around


def _feature_tokens(feature: OutputFeature, *, labels: Sequence[str], count: Callable[[str], int]) -> int | None:
    """Tokens that an output needs; None where it does not say."""
    if isinstance(feature, TextOutput | JsonOutput) and feature.decoder.max_new_tokens is not None:
        return feature.decoder.max_new_tokens
    if feature.preprocessing.max_sequence_length is not None:
        return feature.preprocessing.max_sequence_length
    if isinstance(feature, CategoryOutput):
        rules = (feature.decoder.match or {}).values()
        sought = [*(feature.labels or labels), *(rule.value for rule in rules if rule.type != "regex")]
        if sought:
            return max(map(count, sought)) + SPARE_LABEL_TOKENS
    return None
