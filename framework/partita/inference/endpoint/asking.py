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
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx2

from partita.inference.endpoint.pace import Pace
from partita.inference.endpoint.protocol import PATHS, AnswerError, Mode, Reply, read_reply, shortened, told_error
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
class Failure:
    """Why a request has no answer."""

    cause: Cause
    """row: the server takes this row not; server: it failed, or was too busy; unreachable: it is not there; refused:
    it takes no request of ours at all."""
    reason: str
    status: int | None = None
    """The status of the response, where there was one."""


class RetryableError(Exception):
    """A try that failed and may go better the next time."""

    def __init__(self, failure: Failure, *, wait: float = 0.0) -> None:
        super().__init__(failure.reason)
        self.failure, self.wait = failure, wait


class FinalError(Exception):
    """A try that would fail each time."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass
class Asker:
    """Asks a server, within the file's limits. Used by the tasks of one event loop."""

    client: httpx2.AsyncClient
    backend: EndpointBackend
    mode: Mode
    pace: Pace
    logprobs: bool = False
    secret: str | None = None
    """The key, which no message shows."""
    warned: set[str] = field(default_factory=set)
    """What was told once."""

    async def ask(self, body: Mapping[str, Any], *, tokens: int) -> Reply | Failure:
        """The answer to a request of at most so many tokens, or why there is none."""
        for attempt in range(self.backend.retries + 1):
            await self.pace.turn(tokens)
            try:
                reply = await self.try_once(body)
            except FinalError as error:
                return error.failure
            except RetryableError as error:
                failure, wait = error.failure, error.wait
            else:
                if reply.tokens:
                    self.pace.give_back(tokens - reply.tokens)
                return reply
            if wait > LONGEST_ASKED_WAIT:
                return Failure(failure.cause, f"{failure.reason}; it asks to wait {wait:,.0f} s", failure.status)
            if attempt == self.backend.retries:
                break
            await self.wait(attempt, failure, least=wait)
        tries = self.backend.retries + 1
        times = f" ({tries:,} tries)" if tries > 1 else ""
        return Failure(failure.cause, failure.reason + times, failure.status)

    async def wait(self, attempt: int, failure: Failure, *, least: float) -> None:
        """Wait before the next try."""
        if least:
            self.pace.hold(least)
        backoff = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1.0)
        kind = f"{failure.cause} {failure.status}"
        if kind not in self.warned:
            self.warned.add(kind)
            logger.warning("%s; trying again in %.1f s (told once)", failure.reason, max(least, backoff))
        # Not all at the moment that the server named.
        await asyncio.sleep(max(least + random.uniform(0, FIRST_WAIT), backoff))

    async def try_once(self, body: Mapping[str, Any]) -> Reply:
        """The answer. Raises RetryableError and FinalError."""
        seconds = self.backend.timeout_seconds
        url = self.backend.url
        try:
            # Around all of it: the client's own timeouts begin anew with each piece of a response.
            async with asyncio.timeout(seconds):
                response = await self.client.post(url + PATHS[self.mode], json=body)
        except (TimeoutError, httpx2.TimeoutException):
            raise RetryableError(Failure("server", f"no answer within {seconds:g} s")) from None
        except (httpx2.ConnectError, httpx2.ProxyError) as error:
            told = deepest_reason(error) or type(error).__name__
            raise RetryableError(Failure("unreachable", f"{url} cannot be reached: {told}")) from None
        except httpx2.RequestError as error:
            told = f"{type(error).__name__}: {shortened(error)}"
            raise RetryableError(Failure("server", f"the connection broke off: {told}")) from None
        if response.status_code == 200:
            return self.read(response)
        raise self.refusal(response)

    def read(self, response: httpx2.Response) -> Reply:
        try:
            return read_reply(response.json(), mode=self.mode, logprobs=self.logprobs)
        except AnswerError as error:
            raise FinalError(Failure("row", str(error))) from None
        except ValueError:
            shown = shortened(response.text)
            raise FinalError(Failure("row", f"the server's response is no JSON: {shown}")) from None

    def refusal(self, response: httpx2.Response) -> RetryableError | FinalError:
        """What a response says that is no answer."""
        status = response.status_code
        try:
            told, code = told_error(response.json(), response.text)
        except ValueError:
            told, code = told_error(None, response.text)
        told = self.without_secret(told)
        if 300 <= status < 400:
            place = response.headers.get("location", "nowhere")
            return FinalError(Failure("refused", f"the server sends elsewhere ({status}), to {place}", status))
        if status == 429 and code == "insufficient_quota":
            return FinalError(Failure("refused", f"the account has nothing left ({status}): {told}", status))
        if status in BUSY or status >= 500:
            what = "is busy" if status in BUSY else "failed"
            wait = asked_wait(response.headers.get("retry-after"))
            return RetryableError(Failure("server", f"the server {what} ({status}): {told}", status), wait=wait)
        if status in (401, 403, 404, 405):
            return FinalError(Failure("refused", f"{REFUSED}({status}): {told}", status))
        return FinalError(Failure("row", f"{REFUSED}({status}): {told}", status))

    def without_secret(self, message: str) -> str:
        return message.replace(self.secret, "***") if self.secret else message


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
    return shortened(getattr(error, "strerror", None) or error)


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
    except ValueError:
        return 0.0
