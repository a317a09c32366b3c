"""The Generator protocol, and generation with a model in this process: of rows, of plain prompts, and streamed."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from partita.generation.encoded_prompts import common_beginning
from partita.generation.engine import Engine, choose_engine
from partita.generation.prompts import Lengths
from partita.generation.requests import BatchResult, GenerationJob, GenerationSettings, RowRequests, usable_lengths
from partita.generation.scheduler import Scheduler
from partita.generation.sequences import generate_in_sequence
from partita.generation.static_batches import generate_in_batches, requests_in_batches
from partita.generation.text_stream import TextStream
from partita.lm.base import (
    AnswerContext,
    Generated,
    GenerationOptions,
    GenerationRequest,
    GenerativeModel,
    request_limit,
)
from partita_schema.errors import DataError
from partita_schema.json_values import NOT_UNICODE


class Generator(Protocol):
    """Generates completions: a model in this process, on workers, or on a server."""

    @property
    def context_length(self) -> int | None:
        """Longest sequence in tokens; None if there is no limit or it is unknown."""

    @property
    def answer_context(self) -> AnswerContext | None:
        """The context of answers; None if prompt and answer share `context_length`."""

    @property
    def tokenizer(self) -> Any:
        """Tokenizes prompts."""

    @property
    def fingerprint(self) -> str:
        """Hash of the model."""

    def choose_engine(self, lengths: Lengths, *, options: GenerationOptions, max_new_tokens: int) -> Engine:
        """Return the engine for prompts of these lengths, [rows], in tokens."""

    def generate(self, job: GenerationJob, *, done: npt.NDArray[np.bool_]) -> Iterator[BatchResult]:
        """Generate answers for all rows with a prompt that are not `done`, [rows], and yield them as they finish.

        An interrupt is raised at once; everything yielded is complete.

        Raises:
            JobError: The device failed, or the workers did.
            ServerError: The server failed.
            ModelError: The server rejects all requests.
        """


class LocalGenerator:
    """Generates with a model in this process."""

    def __init__(self, lm: GenerativeModel) -> None:
        self.lm = lm

    @property
    def context_length(self) -> int | None:
        """Longest sequence in tokens; None for a reward model, whose rows may hold two answers to a prompt."""
        return request_limit(self.lm)

    @property
    def answer_context(self) -> AnswerContext | None:
        """The context of answers; None if prompt and answer share `context_length`."""
        return self.lm.answer_context

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self.lm.tokenizer

    @property
    def fingerprint(self) -> str:
        """Hash of the model's weights."""
        return self.lm.fingerprint

    def choose_engine(self, lengths: Lengths, *, options: GenerationOptions, max_new_tokens: int) -> Engine:
        """Return the engine for prompts of these lengths, [rows], in tokens."""
        return choose_engine(self.lm, lengths, options=options, max_new_tokens=max_new_tokens)

    def generate(self, job: GenerationJob, *, done: npt.NDArray[np.bool_]) -> Iterator[BatchResult]:
        """Generate answers for all rows with a prompt that are not `done`, [rows], and yield them as they finish."""
        if job.sequence is not None:
            yield from generate_in_sequence(self.lm, job, done=done)
            return
        work = job.requests(context_length=self.context_length, answers=self.answer_context)
        if job.engine == "static":
            yield from generate_in_batches(self.lm, work, job.settings, done=done)
        else:
            yield from Scheduler(self.lm, work, job.settings, rows=~done).completions()


def generate_requests(
    lm: GenerativeModel, requests: Sequence[GenerationRequest], settings: GenerationSettings
) -> list[Generated]:
    """Generate answers to all requests, and return them in input order. Raise OutOfMemory if a single one does not fit.

    Args:
        lm: The model.
        requests: The prompts.
        settings: How they are generated.
    """
    if engine_of_requests(lm, requests, settings.options) == "static":
        return requests_in_batches(lm, requests, settings)
    scheduler = scheduler_of_requests(lm, requests, settings)
    results = {result.row: result for batch in scheduler.completions() for result in batch.results}
    return [results[row].generated_or_raise() for row in range(len(requests))]


def engine_of_requests(
    lm: GenerativeModel, requests: Sequence[GenerationRequest], options: GenerationOptions
) -> Engine:
    """Return the engine for requests."""
    if not requests:
        return "static"
    lengths = np.array([len(request.input_ids) for request in requests], dtype=np.int32)
    most = max(request.max_new_tokens for request in requests)
    return choose_engine(lm, lengths, options=options, max_new_tokens=most)


def scheduler_of_requests(
    lm: GenerativeModel, requests: Sequence[GenerationRequest], settings: GenerationSettings
) -> Scheduler:
    """Return the scheduler of requests; it raises errors of single requests.

    Args:
        lm: The model.
        requests: The prompts.
        settings: How they are generated.
    """
    prompts = [list(request.input_ids) for request in requests]
    work = RowRequests(
        lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int32),
        new_tokens=np.array([request.max_new_tokens for request in requests]),
        fetch=lambda rows: [prompts[row] for row in rows],
        key=lambda row: requests[row].key,
        prefix=common_beginning(prompts),
    )
    return Scheduler(lm, work, settings, rows=np.ones(len(prompts), dtype=np.bool_), tolerant=False)


def plain_requests(
    lm: GenerativeModel, prompts: str | Sequence[str], *, max_new_tokens: int
) -> list[GenerationRequest]:
    """Return a request per prompt; `max_new_tokens` is reduced to what the context leaves.

    Raises DataError if a prompt is empty, not Unicode or fills the context.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    context = lm.context_length
    requests: list[GenerationRequest] = []
    for text in texts:
        try:
            ids = lm.tokenizer(text)["input_ids"]
        except (TypeError, UnicodeEncodeError):
            raise DataError(f"a prompt is {NOT_UNICODE}") from None
        if not ids:
            raise DataError("a prompt is empty; write at least a character")
        usable, most = usable_lengths(
            np.array([len(ids)]), max_new_tokens, context_length=context, answers=lm.answer_context
        )
        if not usable[0]:
            raise DataError(f"a prompt has {len(ids):,} tokens and the model's context is {context:,}; shorten it")
        requests.append(GenerationRequest(ids, int(most[0]), key=len(requests).to_bytes(8, "little")))
    return requests


def stream_requests(
    lm: GenerativeModel, requests: Sequence[GenerationRequest], settings: GenerationSettings
) -> Iterator[tuple[int, str]]:
    """Yield pairs of a request's index and the next piece of its answer; the pieces of a request add up to its answer.

    Without continuous batching, an answer is a single piece. Raises what `generate_requests` raises, and JobError if an
    answer that was started again, because memory ran out, begins with other tokens.

    Args:
        lm: The model.
        requests: The prompts.
        settings: How they are generated.
    """
    if engine_of_requests(lm, requests, settings.options) == "static":
        whole = requests_in_batches(lm, requests, settings)
        yield from ((index, answer.text) for index, answer in enumerate(whole) if answer.text)
        return
    scheduler = scheduler_of_requests(lm, requests, settings)
    streams = [TextStream(lm.tokenizer, stop=settings.options.stop) for _ in requests]
    for results in scheduler.steps():
        pieces = [(row, streams[row].add(ids)) for row, ids in scheduler.unfinished()]
        for result in results:
            answer = result.generated_or_raise()
            pieces.append((result.row, streams[result.row].finish(answer.ids, answer.text)))
        yield from ((row, piece) for row, piece in pieces if piece)
