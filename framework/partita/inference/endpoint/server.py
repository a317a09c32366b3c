"""A model on a server, as the framework asks it: rows in, answers as they come.

A row that the server refuses is that row's error. What would befall every row ends the job, with what was answered so
far kept: a server that is not there, a key that is not taken, a model that it does not know, and failures in a row.
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

import numpy as np
import numpy.typing as npt

from partita.inference.endpoint.asking import REFUSED, RequestFailure
from partita.inference.endpoint.exchange import Exchange, Question, QuestionResult
from partita.inference.endpoint.protocol import EndpointReply, Mode, request_body, written_messages
from partita.inference.results import BatchResult, RowResult
from partita.inference.scheduler import RowRequests, plan
from partita.lm.base import Generated, GenerationOptions
from partita.lm.tokenizers import byte_tokenizer
from partita_schema.backend import EndpointBackend
from partita_schema.config import Config
from partita_schema.endpoint_rules import sends_chat
from partita_schema.errors import DataError, ModelError, PartitaError, ServerError

BYTES_PER_TOKEN = 4
"""Of English text, about; the server's count takes its place once it is told."""
FETCHED = 64
"""Prompts that are made at a time."""
FEWEST_FAILURES = 10
"""Rows that fail one after the other before a job ends; more where more are asked at the same time."""
KEPT = "Answers up to here are kept; start the same command again to go on"


@dataclass(frozen=True)
class EndpointClient:
    """A model on a server. Prompts are held as bytes of UTF-8, one token each: its own tokens are not known here."""

    backend: EndpointBackend
    model: str
    """Its name on the server."""
    mode: Mode

    @property
    def context_length(self) -> None:
        """Not known: the server refuses what is too long."""
        return

    @cached_property
    def tokenizer(self) -> Any:
        """One token a byte."""
        return byte_tokenizer()

    @property
    def fingerprint(self) -> str:
        """What decides an answer, as far as it can be told here."""
        extra = f" with {json.dumps(self.backend.extra_body, sort_keys=True)}" if self.backend.extra_body else ""
        return f"{self.model} ({self.mode}) at {self.backend.url}{extra}"

    def answers(
        self,
        work: RowRequests,
        options: GenerationOptions,
        *,
        concurrency: int,
        seed: int,
        left: npt.NDArray[np.bool_],
    ) -> Iterator[BatchResult]:
        """Answers of the rows that are `left` [rows], as they come; equal greedy prompts are asked once.

        An interrupt is passed on once the answers that have come are handed on. Raises ServerError and ModelError
        where no row can be answered any more: what was handed on before is complete.
        """
        rows, copies = plan(work, left)
        rows.sort()  # not the longest first: those that are too long would all be refused at the beginning
        judge = Judge(self, concurrency=concurrency)
        with Exchange(
            self.backend,
            mode=self.mode,
            key=self.key(),
            concurrency=concurrency,
            logprobs=options.logprobs,
        ) as exchange:
            questions = self.questions(rows, work, options, seed=seed)
            on_the_way = send(exchange, islice(questions, 2 * concurrency))
            started = time.perf_counter()
            while on_the_way:
                try:
                    outcomes = exchange.receive()
                except KeyboardInterrupt:
                    found = judge.results(exchange.arrived(), copies)
                    if found.results:
                        yield found.batch(seconds=time.perf_counter() - started, concurrency=concurrency)
                    raise
                found = judge.results(outcomes, copies)
                if found.end is None:
                    on_the_way += send(exchange, islice(questions, len(outcomes))) - len(outcomes)
                if found.results:
                    now = time.perf_counter()
                    yield found.batch(seconds=now - started, concurrency=concurrency)
                    started = now
                if found.end is not None:
                    raise found.end

    def write(
        self,
        texts: Sequence[str],
        options: GenerationOptions,
        *,
        max_new_tokens: int,
        concurrency: int,
        seed: int,
    ) -> list[Generated]:
        """What the model writes after each text, or in a chat in reply to it, in their order.

        Raises DataError for an empty text, and ModelError where one has no answer.
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
        found = {
            result.row: generated_or_raise(result)
            for batch in self.answers(work, options, concurrency=concurrency, seed=seed, left=left)
            for result in batch.results
        }
        return [found[row] for row in range(len(tokens))]

    def questions(
        self, rows: list[int], work: RowRequests, options: GenerationOptions, *, seed: int
    ) -> Iterator[Question]:
        """The requests of rows; prompts are made as they are needed."""
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
                    seed=row_seed(seed, work.key(row)),
                    extra=self.backend.extra_body,
                )
                yield Question(row, body, tokens=len(ids) // BYTES_PER_TOKEN + most)

    def key(self) -> str | None:
        """The key in the environment. Raises ModelError where the variable that the file names holds none."""
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
class Found:
    """Results of rows, and why the job ends with them."""

    results: tuple[RowResult, ...]
    prompt_tokens: int
    end: PartitaError | None = None
    """Why no other row can be answered."""

    def batch(self, *, seconds: float, concurrency: int) -> BatchResult:
        """The results as every engine hands them on."""
        return BatchResult(self.results, self.prompt_tokens, padded_tokens=0, seconds=seconds, batch_size=concurrency)


class Judge:
    """Tells errors of rows from what ends a job."""

    def __init__(self, server: EndpointClient, *, concurrency: int) -> None:
        self.server = server
        self.most_failures = max(FEWEST_FAILURES, 2 * concurrency)
        self.answered = False
        self.failures = 0
        self.last_refusal: str | None = None

    def results(self, outcomes: Sequence[QuestionResult], copies: dict[int, list[int]]) -> Found:
        """Results of outcomes, those of rows with the same prompt among them, up to one that ends the job."""
        results: list[RowResult] = []
        prompt_tokens = 0
        end: PartitaError | None = None
        for outcome in outcomes:
            told = outcome.result
            if isinstance(told, EndpointReply):
                self.answered, self.failures = True, 0
                prompt_tokens += told.prompt_tokens
            else:
                end = end or self.end_of_all(told)
                if end is not None:
                    continue  # asked again by the next start
            generated = told.generated if isinstance(told, EndpointReply) else None
            error = told.reason if isinstance(told, RequestFailure) else None
            for row in (outcome.row, *copies.get(outcome.row, ())):
                results.append(RowResult(row, generated, error))
        return Found(tuple(results), prompt_tokens, end)

    def end_of_all(self, failure: RequestFailure) -> PartitaError | None:
        """Why the job ends with this failure; None where it is the row's alone."""
        if failure.cause == "unreachable":
            return ServerError(f"{failure.reason}. Start the server, or correct backend.url. {KEPT}")
        if failure.cause == "refused" and not (failure.status == 403 and self.answered):
            return ModelError(f"{self.advice(failure)}. {KEPT}")
        if failure.cause == "server" or (not self.answered and failure.reason == self.last_refusal):
            # A row that is refused says nothing of others, unless none was ever answered and all are told the same.
            self.failures += 1
        if failure.cause == "row":
            self.last_refusal = failure.reason
        if self.failures >= self.most_failures:
            return ServerError(
                f"{self.failures:,} rows have failed one after the other, the last one so: {failure.reason}. {KEPT}, "
                "with --retry-errors also those that failed"
            )
        return None

    def advice(self, failure: RequestFailure) -> str:
        """What is wrong for every request, and what to do."""
        backend, told = self.server.backend, failure.reason.removeprefix(REFUSED)
        if failure.status in (401, 403) and backend.api_key_env is None:
            return (
                f"the server wants a key {told}; write backend.api_key_env, the name of the environment variable that "
                "holds it"
            )
        if failure.status in (401, 403):
            return f"the server does not take the key in {backend.api_key_env} {told}"
        if failure.status in (404, 405):
            other = "completion" if self.server.mode == "chat" else "chat"
            return (
                f"the server does not know {self.server.model} at {backend.url}, or takes no {self.server.mode} there "
                f"{told}; correct backend.model or backend.url, which mostly ends with /v1, or write backend.mode: "
                f"{other}"
            )
        if failure.status is not None and failure.status < 400:
            return f"{told}; write that address as backend.url"
        return told


def send(exchange: Exchange, questions: Iterator[Question]) -> int:
    """Hand requests in; their number."""
    number = 0
    for question in questions:
        exchange.send(question)
        number += 1
    return number


def row_seed(seed: int, key: bytes) -> int:
    """Seed of a row's sampling: 31 bits, which every server takes."""
    mixed = hashlib.blake2b(seed.to_bytes(16, "little", signed=True) + key, digest_size=4).digest()
    return int.from_bytes(mixed, "little") >> 1


def server_of(config: Config) -> EndpointClient:
    """The server of a file."""
    assert isinstance(config.backend, EndpointBackend)
    assert isinstance(config.base_model, str)
    mode: Mode = "chat" if sends_chat(config) else "completion"
    return EndpointClient(config.backend, config.backend.model or config.base_model, mode)


def generated_or_raise(result: RowResult) -> Generated:
    """The answer. Raises ModelError where there is none."""
    if result.generated is None:
        raise ModelError(result.error or "no answer")
    return result.generated
