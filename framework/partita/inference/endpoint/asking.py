"""One row's request, sent until there is an answer or it is known that there will be none.

Tried again: a server that is busy, overloaded or failing (408, 409, 425, 429, 5xx), one that cannot be reached or hangs
up, and one that says nothing in time. The wait doubles with each try, with some jitter so that requests which failed
together do not come back together (Brooker 2015, Exponential Backoff And Jitter), and is never shorter than the server
asks for by Retry-After, which then holds for all requests.
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx2

from partita.inference.endpoint.pace import RateLimiter
from partita.inference.endpoint.protocol import PATHS, AnswerError, EndpointReply, Mode, read_reply, told_error
from partita.inference.endpoint.receiving import MEGABYTE, Response, ResponseError, receive
from partita.inference.endpoint.redaction import Redaction
from partita.inference.prompts import described
from partita_schema.backend import EndpointBackend

logger = logging.getLogger(__name__)

BUSY = (408, 409, 425, 429)
FIRST_WAIT = 0.5
"""Seconds before a request is sent for the second time, at most."""
LONGEST_WAIT = 30.0
REFUSED = "the server refused the row "
LONGEST_ASKED_WAIT = 600.0
"""Seconds that a server may ask to wait; a row that is to wait longer is an error."""

Cause = Literal["row", "server", "unreachable", "refused"]


@dataclass(frozen=True)
class RequestFailure:
    """Why a request has no answer."""

    cause: Cause
    """row: the server takes this row not; server: it failed, or was too busy; unreachable: it is not there; refused:
    it takes no request of ours at all."""
    reason: str
    status: int | None = None
    """The status of the response, where there was one."""
    retry: bool = False
    """Whether another try may go better."""
    wait: float = 0.0
    """Seconds that the server asks to wait before it."""


class RequestError(Exception):
    """A try that failed; `failure` says how."""

    def __init__(self, failure: RequestFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass
class RequestSender:
    """Asks a server, within the file's limits. Used by the tasks of one event loop."""

    client: httpx2.AsyncClient
    backend: EndpointBackend
    mode: Mode
    pace: RateLimiter
    logprobs: bool = False
    redaction: Redaction = field(default_factory=lambda: Redaction(None))
    """Takes the key out of whatever a server says."""
    warned: set[str] = field(default_factory=set)
    """What was told once."""

    async def ask(self, body: Mapping[str, Any], *, tokens: int) -> EndpointReply | RequestFailure:
        """The answer to a request of at most so many tokens, or why there is none."""
        tries = self.backend.retries + 1
        for attempt in range(tries):
            await self.pace.turn(tokens)
            result = await self.try_once(body)
            if isinstance(result, EndpointReply):
                if result.tokens:
                    self.pace.give_back(tokens - result.tokens)
                return result
            if not result.retry:
                return result
            if result.wait > LONGEST_ASKED_WAIT:
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
            self.pace.hold(least)
        backoff = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.0)
        kind = f"{failure.cause} {failure.status}"
        if kind not in self.warned:
            self.warned.add(kind)
            logger.warning("%s; trying again in %.1f s (told once)", failure.reason, max(least, backoff))
        # Not all at the moment that the server named.
        await asyncio.sleep(max(least + random.uniform(0, FIRST_WAIT), backoff))

    async def try_once(self, body: Mapping[str, Any]) -> EndpointReply | RequestFailure:
        """One try. Whatever goes wrong with it is a Failure, and no text of the server leaves with the key in it."""
        try:
            reply = await self.exchange(body)
            text = self.redaction.answer(reply.generated.text)
        except RequestError as error:
            failure = error.failure
        except Exception as error:  # a response that nobody foresaw fails its own row, never the job
            failure = RequestFailure("server", f"the server's response cannot be read: {described(error)}")
        else:
            if text != reply.generated.text:
                self.warn_of_key()
            return replace(reply, generated=replace(reply.generated, text=text))
        return replace(failure, reason=self.redaction.message(failure.reason))

    def warn_of_key(self) -> None:
        """Say once that a server repeats the key."""
        if "key" not in self.warned:
            self.warned.add("key")
            logger.warning("the server repeats the API key in its answers; *** replaces it (logged once)")

    async def exchange(self, body: Mapping[str, Any]) -> EndpointReply:
        """The answer. Raises RequestError, its text not yet redacted, and whatever an odd response leads to."""
        seconds, url = self.backend.timeout_seconds, self.backend.url
        max_bytes = int(self.backend.max_response_mb * MEGABYTE)
        try:
            # Around all of it: the client's own timeouts begin again with each piece of a response.
            async with asyncio.timeout(seconds):
                response = await receive(self.client, url + PATHS[self.mode], body, max_bytes=max_bytes)
        except (TimeoutError, httpx2.TimeoutException):
            raise RequestError(RequestFailure("server", f"no answer within {seconds:g} s", retry=True)) from None
        except (httpx2.ConnectError, httpx2.ProxyError) as error:
            reason = deepest_reason(error) or type(error).__name__
            raise RequestError(
                RequestFailure("unreachable", f"{url} cannot be reached: {reason}", retry=True)
            ) from None
        except httpx2.RequestError as error:
            reason = f"the connection broke off: {described(error)}"
            raise RequestError(RequestFailure("server", reason, retry=True)) from None
        except ResponseError as error:
            raise RequestError(RequestFailure("row", str(error))) from None
        if response.status != 200:
            raise RequestError(refusal(response))
        try:
            return read_reply(response.body, mode=self.mode, logprobs=self.logprobs, max_tokens=most_tokens(body))
        except AnswerError as error:
            raise RequestError(RequestFailure("row", str(error))) from None


def most_tokens(body: Mapping[str, Any]) -> int | None:
    """Tokens that an answer to this request may have; None where it does not say."""
    found = [body[name] for name in ("max_tokens", "max_completion_tokens") if isinstance(body.get(name), int)]
    return max(found, default=None)


def refusal(response: Response) -> RequestFailure:
    """What a response says that is no answer."""
    status = response.status
    told, code = told_error(response.text)
    if 300 <= status < 400:
        place = response.headers.get("location", "nowhere")
        return RequestFailure("refused", f"the server sends elsewhere ({status}), to {place}", status)
    if status == 429 and code == "insufficient_quota":
        return RequestFailure("refused", f"the account has nothing left ({status}): {told}", status)
    if status in BUSY or status >= 500:
        what = "is busy" if status in BUSY else "failed"
        wait = asked_wait(response.headers.get("retry-after"))
        return RequestFailure("server", f"the server {what} ({status}): {told}", status, retry=True, wait=wait)
    if status in (401, 403, 404, 405):
        return RequestFailure("refused", f"{REFUSED}({status}): {told}", status)
    return RequestFailure("row", f"{REFUSED}({status}): {told}", status)


def deepest_reason(error: BaseException) -> str:
    """What the system said, below the layers that passed it on."""
    inner = error.__cause__ or error.__context__
    if isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[-1]
    if inner is not None:
        return deepest_reason(inner)
    if (
        isinstance(error, OSError) and error.errno is not None and error.errno > 0
    ):  # names that are not found have negative numbers
        return os.strerror(error.errno)
    return str(getattr(error, "strerror", None) or error)


def asked_wait(header: str | None) -> float:
    """Seconds that a Retry-After asks to wait, a number or a date (RFC 9110, section 10.2.3); 0 where it asks none."""
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
