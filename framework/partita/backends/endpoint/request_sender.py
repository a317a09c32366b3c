"""Send one row's request at the server's pace, and retry it until it succeeds or fails for good.

Retried are busy, overloaded and failing servers (408, 409, 425, 429, 5xx), failed connections, and timeouts. The
wait doubles with each try, with jitter so that requests which failed together are not retried together (Brooker
2015, Exponential Backoff And Jitter), and is never shorter than a Retry-After of the server, which holds for all
requests.
"""

import asyncio
import logging
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any, Generic, Literal, TypeVar

import httpx2

from partita.backends.endpoint.protocol import AnswerError, InterruptedAnswerError, error_message
from partita.backends.endpoint.receiving import MEGABYTE, Response, ResponseError, receive
from partita.backends.endpoint.redaction import Redaction
from partita_schema.common.text import describe_error
from partita_schema.sections.backend import EndpointBackendConfig

logger = logging.getLogger(__name__)

Reply = TypeVar("Reply")

MINUTE = 60.0


class RateLimiter:
    """Spaces requests so that no minute exceeds the limits. Used by the tasks of one event loop.

    The length of an answer is unknown before it arrives: a request reserves the most tokens that it may use, and
    releases the rest.
    """

    def __init__(
        self,
        *,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds_per_request = MINUTE / requests_per_minute if requests_per_minute else 0.0
        self.seconds_per_token = MINUTE / tokens_per_minute if tokens_per_minute else 0.0
        self.clock = clock
        self.turns = asyncio.Lock()
        self.released = asyncio.Event()
        """Set when tokens are released, so that the request whose turn is next computes its wait again."""
        self.next_by_requests = self.next_by_tokens = self.paused_until = clock()

    async def turn(self, tokens: int) -> None:
        """Wait until a request of at most `tokens` tokens may be sent."""
        async with self.turns:
            while (seconds := self.seconds_to_wait()) > 0:
                self.released.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self.released.wait()
            now = self.clock()
            self.next_by_requests = now + self.seconds_per_request
            self.next_by_tokens = max(self.next_by_tokens, now) + tokens * self.seconds_per_token

    def seconds_to_wait(self) -> float:
        """Return the seconds until a request may be sent."""
        return max(self.next_by_requests, self.next_by_tokens, self.paused_until) - self.clock()

    def give_back(self, tokens: int) -> None:
        """Release reserved tokens that a request did not use; a negative number reserves more."""
        self.next_by_tokens -= tokens * self.seconds_per_token
        self.released.set()

    def pause(self, seconds: float) -> None:
        """Send no request for this many seconds."""
        self.paused_until = max(self.paused_until, self.clock() + seconds)


BUSY = (408, 409, 425, 429)
FIRST_WAIT = 0.5
"""Upper bound of the wait before the second try, in seconds."""
MAX_BACKOFF = 30.0
REFUSED = "the server refused the row "
MAX_RETRY_AFTER = 600.0
"""Longest Retry-After in seconds that is honoured; a row that must wait longer is an error."""

Cause = Literal["row", "server", "unreachable", "refused"]


@dataclass(frozen=True)
class RequestFailure:
    """A failed request and its cause."""

    cause: Cause
    """The kind of failure.

    row: the server rejects this row; server: it failed or was too busy; unreachable: no connection; refused: it rejects
    all requests of this client.
    """
    reason: str
    status: int | None = None
    """Status of the response, if there was one."""
    retry: bool = False
    """Whether to retry the request."""
    wait: float = 0.0
    """Seconds that the server asks to wait before the next try."""

    @property
    def may_have_used_tokens(self) -> bool:
        """Whether the server may have answered: it was reached, and did not respond with an error."""
        return self.status is None and self.cause != "unreachable"


class RequestError(Exception):
    """A failed try, described by `failure`."""

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass
class RequestSender(ABC, Generic[Reply]):
    """Sends requests to a server within the configured limits. Used by the tasks of one event loop."""

    client: httpx2.AsyncClient
    backend: EndpointBackendConfig
    redaction: Redaction
    """Removes the API key from the server's texts."""
    rate_limiter: RateLimiter = field(init=False)
    warned: set[str] = field(default_factory=set, init=False)
    """Kinds of warnings that were logged already."""

    def __post_init__(self) -> None:
        self.rate_limiter = RateLimiter(
            requests_per_minute=self.backend.requests_per_minute, tokens_per_minute=self.backend.tokens_per_minute
        )

    @property
    @abstractmethod
    def path(self) -> str:
        """Path of the API after the server's address."""

    @abstractmethod
    def read(self, response: Response, body: Mapping[str, Any]) -> Reply:
        """Return the reply to a request. Raise AnswerError if the response, of status 200, holds none.

        Args:
            response: The response.
            body: The body of the request.
        """

    @abstractmethod
    def num_tokens(self, reply: Reply) -> int:
        """Return the tokens that a request used; 0 if it is unknown."""

    def redacted(self, reply: Reply) -> Reply:
        """Return the reply without the API key."""
        return reply

    def failure(self, response: Response, body: Mapping[str, Any]) -> RequestFailure:
        """Return the failure described by a response without an answer.

        Args:
            response: The response.
            body: The body of the request.
        """
        return refusal(response)

    async def send(self, body: Mapping[str, Any], *, tokens: int) -> Reply | RequestFailure:
        """Return the answer to a request of at most `tokens` tokens, or why there is none."""
        tries = self.backend.retries + 1
        for attempt in range(tries):
            await self.rate_limiter.turn(tokens)
            result = await self.try_once(body)
            if not isinstance(result, RequestFailure):
                used = self.num_tokens(result)
                if used:
                    self.rate_limiter.give_back(tokens - used)
                return result
            if not result.may_have_used_tokens:
                self.rate_limiter.give_back(tokens)
            if not result.retry:
                return result
            if result.wait > MAX_RETRY_AFTER:
                return replace(result, reason=f"{result.reason}; it asks to wait {result.wait:,.6g} s")
            if attempt + 1 == tries:
                times = f" ({tries:,} tries)" if tries > 1 else ""
                return replace(result, reason=result.reason + times)
            await self.wait(attempt, result)
        raise AssertionError("the last try returns")

    async def wait(self, attempt: int, failure: RequestFailure) -> None:
        """Wait before the next try."""
        least = failure.wait
        if least:
            self.rate_limiter.pause(least)
        backoff = min(MAX_BACKOFF, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.0)
        kind = f"{failure.cause} {failure.status}"
        if kind not in self.warned:
            self.warned.add(kind)
            logger.warning("%s; retrying in %.1f s (logged once)", failure.reason, max(least, backoff))
        # Jitter, so that not all requests are sent at the moment that the server named.
        await asyncio.sleep(max(least + random.uniform(0, FIRST_WAIT), backoff))

    async def try_once(self, body: Mapping[str, Any]) -> Reply | RequestFailure:
        """Try once. Any error is returned as a failure, and the key is removed from all texts of the server."""
        try:
            return self.redacted(await self.request(body))
        except RequestError as error:
            failure = error.failure
        except Exception as error:  # an unexpected response fails its own row, not the job
            failure = RequestFailure("server", f"the server's response cannot be read: {describe_error(error)}")
        return replace(failure, reason=self.redaction.message(failure.reason))

    async def request(self, body: Mapping[str, Any]) -> Reply:
        """Send the request and return the answer.

        Raises RequestError with a text that is not redacted yet, or any error caused by a malformed response.
        """
        seconds, url = self.backend.timeout_seconds, self.backend.url
        max_bytes = int(self.backend.max_response_mb * MEGABYTE)
        try:
            # Around the whole exchange: the client's own timeouts restart with each chunk of a response.
            async with asyncio.timeout(seconds):
                response = await receive(self.client, url + self.path, body, max_bytes=max_bytes)
        except (TimeoutError, httpx2.TimeoutException):
            raise RequestError(RequestFailure("server", f"no answer within {seconds:g} s", retry=True)) from None
        except (httpx2.ConnectError, httpx2.ProxyError) as error:
            reason = deepest_reason(error) or type(error).__name__
            raise RequestError(
                RequestFailure("unreachable", f"{url} cannot be reached: {reason}", retry=True)
            ) from None
        except httpx2.RequestError as error:
            reason = f"the connection broke off: {describe_error(error)}"
            raise RequestError(RequestFailure("server", reason, retry=True)) from None
        except ResponseError as error:
            raise RequestError(RequestFailure("row", str(error))) from None
        if response.status != 200:
            raise RequestError(self.failure(response, body))
        try:
            return self.read(response, body)
        except InterruptedAnswerError as error:
            raise RequestError(RequestFailure("server", str(error), retry=True)) from None
        except AnswerError as error:
            raise RequestError(RequestFailure("row", str(error))) from None


def refusal(response: Response) -> RequestFailure:
    """Return the failure described by a response without an answer."""
    status = response.status
    message, code = error_message(response.text)
    if 300 <= status < 400:
        location = response.headers.get("location", "nowhere")
        return RequestFailure("refused", f"the server sends elsewhere ({status}), to {location}", status)
    if status == 402 or (status == 429 and code == "insufficient_quota"):
        return RequestFailure("refused", f"the account has nothing left ({status}): {message}", status)
    if status in BUSY or status >= 500:
        what = "is busy" if status in BUSY else "failed"
        wait = retry_after_seconds(response.headers.get("retry-after"))
        return RequestFailure("server", f"the server {what} ({status}): {message}", status, retry=True, wait=wait)
    if status in (401, 403, 404, 405):
        return RequestFailure("refused", f"{REFUSED}({status}): {message}", status)
    return RequestFailure("row", f"{REFUSED}({status}): {message}", status)


def deepest_reason(error: BaseException) -> str:
    """Return the innermost reason of a chain of exceptions."""
    inner = error.__cause__ or error.__context__
    if isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[-1]
    if inner is not None:
        return deepest_reason(inner)
    if (
        isinstance(error, OSError) and error.errno is not None and error.errno > 0
    ):  # unresolved names have negative numbers
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error)


def retry_after_seconds(header: str | None) -> float:
    """Return the seconds of a Retry-After header, a number or a date (RFC 9110, section 10.2.3); 0 without one."""
    if header is None:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
