"""Generation with a model on a server: rows in, answers in the order of their arrival.

A row that the server rejects is an error of that row. Errors that would affect every row end the job, and the
answers received before are kept: an unreachable server, a rejected key, an unknown model, and consecutive failures.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt

from partita.backends.endpoint.completion_sender import CompletionSender
from partita.backends.endpoint.protocol import EndpointReply, Mode, request_body, written_messages
from partita.backends.endpoint.redaction import Redaction
from partita.backends.endpoint.request_pool import EndpointRequest, RequestOutcome, RequestPool
from partita.backends.endpoint.request_sender import REFUSED, RequestFailure
from partita.generation.engine import Engine
from partita.generation.prompts import Lengths
from partita.generation.requests import BatchResult, GenerationJob, GenerationSettings, RowRequests, RowResult, plan
from partita.generation.spent import Spent
from partita.lm.base import Generated, GenerationOptions
from partita.tokenizers.load import byte_tokenizer
from partita_schema.config import Config
from partita_schema.errors import DataError, ModelError, PartitaError, ServerError
from partita_schema.rules.endpoint import sends_chat
from partita_schema.sections.backend import EndpointBackendConfig

BYTES_PER_TOKEN = 4
"""Approximate value for English text; replaced by the server's count when it is reported."""
FETCHED = 64
"""Prompts fetched at a time."""
FEWEST_FAILURES = 10
"""Consecutive failed rows that end a job; more with a higher concurrency."""
RESUME_HINT = "The answers so far are saved; rerun the same command to resume"


@dataclass(frozen=True)
class EndpointClient:
    """A model on a server. Prompts are held as UTF-8 bytes, one token each, because its tokenizer is unknown."""

    backend: EndpointBackendConfig
    model: str
    """Name of the model on the server."""
    mode: Mode

    @property
    def answer_context(self) -> None:
        """Return None: unknown."""

    @property
    def context_length(self) -> None:
        """None: unknown; the server rejects prompts that are too long."""
        return

    @cached_property
    def tokenizer(self) -> Any:
        """A tokenizer with one token per byte."""
        return byte_tokenizer()

    @property
    def fingerprint(self) -> str:
        """Everything known here that determines an answer."""
        extra = f" with {json.dumps(self.backend.extra_body, sort_keys=True)}" if self.backend.extra_body else ""
        return f"{self.model} ({self.mode}) at {self.backend.url}{extra}"

    def choose_engine(self, lengths: Lengths, *, options: GenerationOptions, max_new_tokens: int) -> Engine:
        """Return "server"."""
        return "server"

    def generate(self, job: GenerationJob, *, done: npt.NDArray[np.bool_]) -> Iterator[BatchResult]:
        """Generate answers for all rows that are not `done`, [rows]; see `partita.generation.generator.Generator`."""
        return self.answers(job.requests(context_length=None), job.settings, left=~done)

    def answers(
        self, work: RowRequests, settings: GenerationSettings, *, left: npt.NDArray[np.bool_]
    ) -> Iterator[BatchResult]:
        """Generate answers and yield them as they arrive; equal greedy prompts are sent once.

        On an interrupt, results that have arrived are yielded before it is raised. Everything yielded is complete.

        Args:
            work: The rows with their prompts.
            settings: How they are generated, with the options of `server_options`; the batch size of the budget is
                the number of concurrent requests.
            left: Rows to answer, [rows].

        Raises:
            ServerError: The server is unreachable, or too many consecutive rows failed.
            ModelError: The server rejects all requests.
        """
        options, concurrency, seed = settings.options, settings.budget.batch_size, settings.seed
        rows, copies = plan(work, left)
        rows.sort()  # not the longest first: prompts that are too long would all be rejected at the beginning
        classifier = ErrorClassifier(self, concurrency=concurrency)

        def sender(client: httpx2.AsyncClient, redaction: Redaction) -> CompletionSender:
            return CompletionSender(client, self.backend, redaction, self.mode, options.logprobs)

        with RequestPool(sender, key=self.key(), concurrency=concurrency) as request_pool:
            requests = self.requests(rows, work, options, seed=seed)
            in_flight = send(request_pool, islice(requests, 2 * concurrency))
            started = time.perf_counter()
            while in_flight:
                try:
                    outcomes = request_pool.receive()
                except KeyboardInterrupt:
                    collected = classifier.results(request_pool.collect_results(), copies)
                    if collected.results:
                        yield collected.batch(seconds=time.perf_counter() - started, concurrency=concurrency)
                    raise
                collected = classifier.results(outcomes, copies)
                if collected.end is None:
                    in_flight += send(request_pool, islice(requests, len(outcomes))) - len(outcomes)
                if collected.results:
                    now = time.perf_counter()
                    yield collected.batch(seconds=now - started, concurrency=concurrency)
                    started = now
                if collected.end is not None:
                    raise collected.end

    def write(self, texts: Sequence[str], settings: GenerationSettings, *, max_new_tokens: int) -> list[Generated]:
        """Generate text after each prompt, or in a chat a reply to it, in input order.

        Args:
            texts: The prompts.
            settings: How they are generated; see `answers`.
            max_new_tokens: Limit of generated tokens per prompt.

        Raises:
            DataError: A prompt is empty.
            ModelError: A prompt has no answer.
        """
        if not all(texts):
            raise DataError("a prompt is empty; write at least a character")
        prompts = list(texts)
        if self.mode == "chat":
            prompts = [written_messages([{"role": "user", "content": text}]) for text in texts]
        tokens = self.tokenizer(prompts, verbose=False)["input_ids"] if prompts else []
        work = RowRequests(
            lengths=np.array([len(ids) for ids in tokens], dtype=np.int32),
            new_tokens=np.full(len(tokens), max_new_tokens),
            fetch=lambda rows: [tokens[row] for row in rows],
            key=lambda row: row.to_bytes(8, "little"),
        )
        left = np.ones(len(tokens), dtype=np.bool_)
        completions = {
            result.row: result.generated_or_raise()
            for batch in self.answers(work, settings, left=left)
            for result in batch.results
        }
        return [completions[row] for row in range(len(tokens))]

    def requests(
        self, rows: list[int], work: RowRequests, options: GenerationOptions, *, seed: int
    ) -> Iterator[EndpointRequest]:
        """Yield the requests of rows; prompts are fetched as they are needed.

        Args:
            rows: Indices of the rows, in the order to send them.
            work: The rows with their prompts.
            options: Generation options of `server_options`.
            seed: Seed for sampling.
        """
        for start in range(0, len(rows), FETCHED):
            chunk = rows[start : start + FETCHED]
            for row, ids in zip(chunk, work.fetch(chunk), strict=True):
                most = int(work.new_tokens[row])
                body = request_body(
                    self.tokenizer.decode(ids, skip_special_tokens=False),
                    options,
                    model=self.model,
                    mode=self.mode,
                    max_new_tokens=most,
                    seed=request_seed(seed, work.key(row)),
                    extra=self.backend.extra_body,
                )
                yield EndpointRequest(row, body, tokens=len(ids) // BYTES_PER_TOKEN + most)

    def key(self) -> str | None:
        """Return the API key from the environment. Raise ModelError if the configured variable holds none."""
        name = self.backend.api_key_env
        if name is None:
            return None
        key = os.environ.get(name, "").strip()
        if not key:
            raise ModelError(f"backend.api_key_env names {name}, which is not set; run `export {name}=...` first")
        if not key.isascii() or not key.isprintable():
            raise ModelError(f"the key in {name} holds characters that no key has; set it again")
        return key


@dataclass(frozen=True)
class RowOutcomes:
    """Results of rows, and the error that ends the job, if any."""

    results: tuple[RowResult, ...]
    prompt_tokens: int
    end: PartitaError | None = None
    """The error that prevents answers to all other rows."""

    def batch(self, *, seconds: float, concurrency: int) -> BatchResult:
        """Return the results as a BatchResult."""
        spent = Spent(prompt_tokens=self.prompt_tokens, seconds=seconds)
        return BatchResult(self.results, spent, batch_size=concurrency)


class ErrorClassifier:
    """Distinguishes errors of single rows from errors that end a job."""

    def __init__(self, server: EndpointClient, *, concurrency: int) -> None:
        self.server = server
        self.max_failures = max(FEWEST_FAILURES, 2 * concurrency)
        self.answered = False
        self.failures = 0
        self.last_refusal: str | None = None

    def results(self, outcomes: Sequence[RequestOutcome[EndpointReply]], copies: dict[int, list[int]]) -> RowOutcomes:
        """Return the row results of requests, including duplicate prompts, up to the one that ends the job."""
        results: list[RowResult] = []
        prompt_tokens = 0
        end: PartitaError | None = None
        for outcome in outcomes:
            reply = outcome.result
            if isinstance(reply, EndpointReply):
                self.answered, self.failures = True, 0
                prompt_tokens += reply.prompt_tokens
            else:
                end = end or self.job_error(reply)
                if end is not None:
                    continue  # requested again when the job is resumed
            generated = reply.generated if isinstance(reply, EndpointReply) else None
            error = reply.reason if isinstance(reply, RequestFailure) else None
            for row in (outcome.row, *copies.get(outcome.row, ())):
                results.append(RowResult(row, generated, error))
        return RowOutcomes(tuple(results), prompt_tokens, end)

    def job_error(self, failure: RequestFailure) -> PartitaError | None:
        """Return the error that ends the job after this failure; None if it concerns one row only."""
        if failure.cause == "unreachable":
            return ServerError(f"{failure.reason}. Start the server, or correct backend.url. {RESUME_HINT}")
        if failure.cause == "refused" and not (failure.status == 403 and self.answered):
            return ModelError(f"{self.advice(failure)}. {RESUME_HINT}")
        if failure.cause == "server" or (not self.answered and failure.reason == self.last_refusal):
            # A rejected row says nothing about others, unless none was ever answered and all get the same message.
            self.failures += 1
        if failure.cause == "row":
            self.last_refusal = failure.reason
        if self.failures >= self.max_failures:
            return ServerError(
                f"{self.failures:,} rows have failed one after the other, the last one because: {failure.reason}. "
                f"{RESUME_HINT}, with --retry-errors also those that failed"
            )
        return None

    def advice(self, failure: RequestFailure) -> str:
        """Return what is wrong with every request, and how to fix it."""
        backend, message = self.server.backend, failure.reason.removeprefix(REFUSED)
        if failure.status in (401, 403) and backend.api_key_env is None:
            return (
                f"the server wants a key {message}; write backend.api_key_env, the name of the environment variable "
                "that holds it"
            )
        if failure.status in (401, 403):
            return f"the server does not take the key in {backend.api_key_env} {message}"
        if failure.status in (404, 405):
            other = "completion" if self.server.mode == "chat" else "chat"
            return (
                f"the server does not know {self.server.model} at {backend.url}, or takes no {self.server.mode} there "
                f"{message}; correct backend.model or backend.url, which mostly ends with /v1, or write backend.mode: "
                f"{other}"
            )
        if failure.status is not None and failure.status < 400:
            return f"{message}; write that address as backend.url"
        return message


def send(request_pool: RequestPool[Any], requests: Iterator[EndpointRequest]) -> int:
    """Submit requests and return their number."""
    number = 0
    for request in requests:
        request_pool.send(request)
        number += 1
    return number


def request_seed(seed: int, key: bytes) -> int:
    """Return the sampling seed of the request for a row: 31 bits, which every server accepts."""
    mixed = hashlib.blake2b(seed.to_bytes(16, "little", signed=True) + key, digest_size=4).digest()
    return int.from_bytes(mixed, "little") >> 1


def server_of(config: Config) -> EndpointClient:
    """Return the client for a configuration."""
    assert isinstance(config.backend, EndpointBackendConfig)
    assert isinstance(config.base_model, str)
    mode: Mode = "chat" if sends_chat(config) else "completion"
    return EndpointClient(config.backend, config.backend.model or config.base_model, mode)
