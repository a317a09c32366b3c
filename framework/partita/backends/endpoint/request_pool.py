"""Concurrent requests, on a thread with its own event loop, so that it also works in a notebook.

The calling thread submits requests and receives results; the event loop does everything in between. Leaving the
context cancels all requests and closes their connections.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic

import httpx2

from partita.backends.endpoint.redaction import Redaction, redacted_logs
from partita.backends.endpoint.request_sender import Reply, RequestFailure, RequestSender


@dataclass(frozen=True)
class EndpointRequest:
    """A request, of one row or of several."""

    row: int
    """The row, or the first one."""
    body: Mapping[str, Any]
    tokens: int
    """Upper bound of the tokens of prompt and answer, estimated."""


@dataclass(frozen=True)
class RequestOutcome(Generic[Reply]):
    """The result of a request."""

    row: int
    result: Reply | RequestFailure


class RequestPool(Generic[Reply]):
    """Sends at most `concurrency` requests at the same time. A context manager."""

    def __init__(
        self,
        sender: Callable[[httpx2.AsyncClient, Redaction], RequestSender[Reply]],
        *,
        key: str | None,
        concurrency: int,
    ) -> None:
        """Store the settings.

        Args:
            sender: Creates the sender of requests from an HTTP client and a function that removes the API key.
            key: API key, if the server needs one.
            concurrency: Maximum number of requests at a time.
        """
        self.sender, self.key, self.concurrency = sender, key, concurrency
        self._outcomes: queue.SimpleQueue[RequestOutcome[Reply] | BaseException] = queue.SimpleQueue()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="partita endpoint", daemon=True)

    def __enter__(self) -> "RequestPool[Reply]":
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(RuntimeError):  # the loop has already ended because of an internal error
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()

    def send(self, request: EndpointRequest) -> None:
        """Submit a request; it is sent as soon as another one has ended."""
        self._loop.call_soon_threadsafe(self._requests.put_nowait, request)

    def receive(self) -> list[RequestOutcome[Reply]]:
        """Return the results that have arrived; wait for at least one."""
        first = self._outcomes.get()
        if isinstance(first, BaseException):
            raise first
        return [first, *self.collect_results()]

    def collect_results(self) -> list[RequestOutcome[Reply]]:
        """Return the results that have arrived, without waiting."""
        results: list[RequestOutcome[Reply]] = []
        while not self._outcomes.empty():
            outcome = self._outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        return results

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._requests: asyncio.Queue[EndpointRequest] = asyncio.Queue()
            self._main = self._loop.create_task(self._work())
            self._started.set()
            try:
                self._loop.run_until_complete(self._main)
            except asyncio.CancelledError:
                pass
            except BaseException as error:  # an internal error, raised again in the thread that waits for results
                self._outcomes.put(error)

    async def _work(self) -> None:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        limits = httpx2.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        redaction = Redaction(self.key)
        with redacted_logs(redaction):
            await self._serve(redaction, headers, limits)

    async def _serve(self, redaction: Redaction, headers: Mapping[str, str], limits: httpx2.Limits) -> None:
        async with (
            httpx2.AsyncClient(headers=headers, limits=limits, timeout=None) as client,
            asyncio.TaskGroup() as tasks,
        ):
            sender = self.sender(client, redaction)
            for _ in range(self.concurrency):
                tasks.create_task(self._answer(sender))

    async def _answer(self, sender: RequestSender[Reply]) -> None:
        while True:
            request = await self._requests.get()
            result = await sender.send(request.body, tokens=request.tokens)
            self._outcomes.put(RequestOutcome(request.row, result))
