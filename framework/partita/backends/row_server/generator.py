"""Answers of a server to the rows of a job, in requests of several rows."""

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from partita.backends.endpoint.request_pool import EndpointRequest, RequestOutcome, RequestPool
from partita.backends.endpoint.request_sender import RequestFailure
from partita.backends.endpoint.server import RESUME_HINT
from partita.backends.row_server.description import START, RowServer, why_refused
from partita.backends.row_server.sender import Records, RowFailure, RowSender
from partita.generation.engine import Engine
from partita.generation.prompts import Lengths, PromptRows
from partita.generation.requests import BatchResult, GenerationJob, RowResult
from partita.generation.spent import Spent
from partita.lm.base import GenerationOptions
from partita.serving.errors import NO_COLUMN, OTHER_MODEL
from partita_schema.cells import CellError, is_missing, plain_text
from partita_schema.common.text import describe_error
from partita_schema.config import Config
from partita_schema.errors import DataError, ModelError, PartitaError, ServerError
from partita_schema.rows import RowSchema, check_rows, row_schema
from partita_schema.sections.backend import EndpointBackendConfig

CONCURRENCY = 4
"""Number of requests that are sent at a time."""
ROWS = 64
"""Default number of rows in a request."""
RETRIES = 6
"""Retries of a request when the server is busy or fails; with growing waits, half a minute."""
BODY_SHARE = 0.9
"""Share of the largest request that rows may fill; keys and names take the rest."""
TIMEOUT_SECONDS = 3600.0
"""Maximum time of a request; the server also limits the time of an answer."""
RESPONSE_MB = 256.0


@dataclass(frozen=True)
class RowServerGenerator:
    """Generates with the model of a server; implements `Generator`."""

    server: RowServer
    config: Config
    rows: PromptRows | None = None
    """The rows of the job."""

    @property
    def context_length(self) -> None:
        """None: the server rejects prompts that are too long."""
        return

    @property
    def answer_context(self) -> None:
        """None: the server knows it."""
        return

    @property
    def tokenizer(self) -> Any:
        """None: the server has it."""
        return None

    @property
    def fingerprint(self) -> str:
        """Hash of the server's model. Answers from a server are not mixed with those of a model in this process."""
        return f"{self.server.description.fingerprint} of a server"

    def choose_engine(self, lengths: Lengths, *, options: GenerationOptions, max_new_tokens: int) -> Engine:
        """Return "server"."""
        return "server"

    def generate(self, job: GenerationJob, *, done: npt.NDArray[np.bool_]) -> Iterator[BatchResult]:
        """Yield the answers to all rows that are not `done`, [rows]; see `partita.generation.generator.Generator`."""
        assert self.rows is not None, "the job names its rows"
        left = np.flatnonzero(~done & (job.prompts.lengths > 0)).tolist()
        work = RowWork(self, self.rows, left, rows_at_once=job.settings.budget.batch_size)
        settings = EndpointBackendConfig(
            type="endpoint",
            url=self.server.url,
            timeout_seconds=TIMEOUT_SECONDS,
            max_response_mb=RESPONSE_MB,
            retries=RETRIES,
        )
        sender = partial(row_sender, settings)
        started = time.perf_counter()
        with RequestPool(sender, key=self.server.token, concurrency=CONCURRENCY) as pool:
            while work.fill(pool) or work.results:
                end: BaseException | None = None
                if work.in_flight:
                    try:
                        outcomes = pool.receive()
                    except KeyboardInterrupt as interrupt:
                        end, outcomes = interrupt, pool.collect_results()
                    failure = work.take(outcomes)
                    end = end or failure
                results, work.results = tuple(work.results), []
                if results:
                    now = time.perf_counter()
                    spent = Spent(seconds=now - started)
                    yield BatchResult(results, spent, batch_size=job.settings.budget.batch_size)
                    started = now
                if end is not None:
                    raise end


def row_sender(settings: EndpointBackendConfig, client: Any, redaction: Any) -> RowSender:
    """Return what sends requests with rows."""
    return RowSender(client, settings, redaction)


@dataclass
class RowWork:
    """The rows that are left, those that are sent, and the results that have arrived."""

    generator: RowServerGenerator
    rows: PromptRows
    left: Sequence[int]
    """Rows to send."""
    rows_at_once: int
    """Maximum number of rows of a request."""
    start: int = 0
    """Number of rows of `left` that were read."""
    smaller: deque[list[int]] = field(default_factory=deque)
    """Rows to send again, fewer at a time."""
    in_flight: dict[int, list[int]] = field(default_factory=dict)
    """Rows of the requests that were sent, by their first row."""
    results: list[RowResult] = field(default_factory=list)
    """Results that were not taken yet."""

    def __post_init__(self) -> None:
        self.wire = WireRows(self.rows, self.generator.config)
        self.max_bytes = int(BODY_SHARE * self.generator.server.description.max_body_bytes)

    def fill(self, pool: RequestPool[Records]) -> bool:
        """Send requests until enough are on their way; return whether there are any."""
        while len(self.in_flight) < 2 * CONCURRENCY and (self.smaller or self.start < len(self.left)):
            if self.smaller:
                chunk = self.smaller.popleft()
            else:
                chunk = list(self.left[self.start : self.start + self.rows_at_once])
                self.start += len(chunk)
            self.send(chunk, pool)
        return bool(self.in_flight)

    def send(self, rows: Sequence[int], pool: RequestPool[Records]) -> None:
        """Send rows in a request, or in several if they are large; a row that cannot be sent gets an error."""
        chunk: list[int] = []
        values: list[Mapping[str, Any]] = []
        size = 0
        for row, value in zip(rows, self.wire.values(rows), strict=True):
            try:
                length = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
            except (ValueError, RecursionError) as error:
                self.results.append(RowResult(row, None, f"the row cannot be sent as JSON: {describe_error(error)}"))
                continue
            if length > self.max_bytes:
                reason = f"the row has {length:,} bytes, and the server takes {self.max_bytes:,}"
                self.results.append(RowResult(row, None, f"{reason}; start it with a larger --max-body"))
                continue
            if size + length > self.max_bytes:
                self.submit(chunk, values, pool)
                chunk, values, size = [], [], 0
            chunk.append(row)
            values.append(value)
            size += length
        if chunk:
            self.submit(chunk, values, pool)

    def submit(self, rows: list[int], values: Sequence[Mapping[str, Any]], pool: RequestPool[Records]) -> None:
        """Send one request."""
        body = {
            "rows": values,
            "keys": [self.rows.sampling_key(row) for row in rows],
            "records": True,
            "fingerprint": self.generator.server.description.fingerprint,
        }
        self.in_flight[rows[0]] = rows
        pool.send(EndpointRequest(rows[0], body, tokens=0))

    def take(self, outcomes: Sequence[RequestOutcome[Records]]) -> PartitaError | None:
        """Take the outcomes of requests; return the error that ends the job, if there is one."""
        end: PartitaError | None = None
        for outcome in outcomes:
            rows, reply = self.in_flight.pop(outcome.row), outcome.result
            if not isinstance(reply, RequestFailure):
                self.results += [record.result(row) for row, record in zip(rows, reply.records, strict=True)]
            elif len(rows) > 1 and is_for_fewer(reply):
                middle = (len(rows) + 1) // 2
                self.smaller += (rows[:middle], rows[middle:])
            elif (error := self.job_error(reply)) is not None:
                end = end or error
            else:
                self.results += [RowResult(row, None, reply.reason) for row in rows]
        return end

    def job_error(self, failure: RequestFailure) -> PartitaError | None:
        """Return the error that ends the job after this failure; None if it concerns one row only."""
        server = self.generator.server
        code = failure.code if isinstance(failure, RowFailure) else ""
        if code == OTHER_MODEL:
            return ModelError(
                f"another model is served at {server.url} now; {RESUME_HINT[0].lower()}{RESUME_HINT[1:]} once the "
                "first one is served again, or start over with --fresh"
            )
        if code == NO_COLUMN:
            return DataError(failure.reason)
        if failure.cause == "unreachable":
            return ServerError(f"{failure.reason}. {START}. {RESUME_HINT}")
        if failure.cause == "refused":
            return why_refused(server.url, failure.status or 0, failure.reason, server.token)
        return ServerError(f"{server.url}: {failure.reason}. {RESUME_HINT}") if failure.cause == "server" else None


def is_for_fewer(failure: RequestFailure) -> bool:
    """Return whether rows are sent again, fewer at a time: one of them is invalid, or they are too many."""
    if isinstance(failure, RowFailure) and failure.code in (OTHER_MODEL, NO_COLUMN):
        return False
    return failure.cause == "row" or failure.status == 429


class WireRows:
    """Rows as JSON values.

    A value that JSON does not represent as it is, such as a date, is sent as the text or the dialogue that prompts show
    of it.
    """

    def __init__(self, rows: PromptRows, config: Config) -> None:
        """Choose the columns to send: all if a dialogue, a pair or a reward model may read them."""
        self.rows = rows
        self.schema: RowSchema = row_schema(config, supervised=False)
        dialogue = config.dialogue_input
        names = {feature.name: feature.source_column for feature in config.input_features}
        whole = dialogue is not None or config.scores_answers or config.generation.best_of is not None
        self.columns = None if whole else tuple(names.get(name, name) for name in config.shown_columns)
        """Columns to send; None for all."""
        self.names = {column: name for name, column in names.items()}
        """Name of the input of a column."""

    def values(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows as objects of JSON."""
        return [self.value(row) for row in self.rows.get(indices)]

    def value(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row as an object of JSON."""
        columns = [column for column in self.columns or row if column in row]
        kept = {str(column): row[column] for column in columns if is_plain(row[column])}
        if len(kept) < len(columns):
            clean = check_rows(self.schema, [row]).clean.get(0, {})
            kept |= {str(column): self.written(column, row[column], clean) for column in columns if column not in kept}
        return {str(column): kept[str(column)] for column in columns}

    def written(self, column: str, value: Any, clean: Mapping[str, Any]) -> Any:
        """Return the form in which a value that JSON does not represent is sent.

        Args:
            column: Its column.
            value: The value.
            clean: The row as values of the inputs.
        """
        if is_missing(value):
            return None
        name = self.names.get(column, column)
        if name in clean:
            return clean[name]
        try:
            return plain_text(value)
        except CellError:
            return repr(value)


def is_plain(value: Any) -> bool:
    """Return whether a value is the same after it was written as JSON and read."""
    if value is None or isinstance(value, str | bool):
        return True
    try:
        return same(json.loads(json.dumps(value, allow_nan=False)), value)
    except (TypeError, ValueError, RecursionError):
        return False


def same(first: Any, second: Any) -> bool:
    """Return whether values are equal and of the same types."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)
