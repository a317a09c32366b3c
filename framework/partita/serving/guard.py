"""Checks of each request before the routes: token, origin, and size and time of the body."""

import asyncio
import secrets
import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from partita.serving.errors import ApiError
from partita.serving.hosts import why_foreign
from partita.serving.limits import ServerLimits
from partita.serving.metrics import ServerMetrics

API = ("/v1/", "/predict", "/tokenize", "/metrics")
"""Paths that need the token; with a page for a browser, its files do not."""
DISCARDED_BYTES = 64 * 2**20
"""Bytes above the limit that are received and discarded before a body is refused; if more are announced, none are."""


class RequestGuard:
    """Refuses requests without the token, and bodies that are too large or too slow; counts responses."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        limits: ServerLimits,
        metrics: ServerMetrics,
        public: Sequence[str],
    ) -> None:
        """Wrap an application.

        Args:
            app: The application.
            token: The token; None if none is needed.
            limits: Limits on bodies.
            metrics: Counts responses.
            public: Paths that need no token; `/` allows all paths outside of the API.
        """
        self.app, self.token, self.limits, self.metrics, self.public = app, token, limits, metrics, public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, started = 499, time.perf_counter()

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.metrics.engine.why_closed is not None:
                    # Without this header, the next request of the client might meet the end of the connection.
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        try:
            self.check_site(scope)
            self.check_token(scope)
            body = await self.read_body(scope, receive)
        except ApiError as error:
            headers = {"Connection": "close"} if error.status in (408, 413) else {}
            response = error.response()
            response.headers.update(headers)
            await response(scope, receive, counted)
        else:
            if body is not None:
                await self.app(scope, body, counted)
        finally:
            self.metrics.count(scope["path"], status, time.perf_counter() - started)

    def check_site(self, scope: Scope) -> None:
        """Raise ApiError if no token is needed and a page of another site may have sent the request."""
        if self.token is not None:
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in (b"host", b"origin")}
        try:
            reason = why_foreign(headers.get(b"host"), headers.get(b"origin"))
        except ValueError:
            reason = "the header Host or Origin is not valid"
        if reason is not None:
            raise ApiError(403, reason)

    def check_token(self, scope: Scope) -> None:
        """Raise ApiError if a request lacks the token."""
        path = scope["path"]
        if self.token is None or path in self.public or ("/" in self.public and not path.startswith(API)):
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not secrets.compare_digest(given, b"Bearer " + self.token.encode()):
            raise ApiError(401, "send the header Authorization: Bearer TOKEN with the token of this server")

    async def read_body(self, scope: Scope, receive: Receive) -> Receive | None:
        """Read the body of a request; return a function that receives it, or None if the client is gone.

        A body that is too large is received before it is refused, up to DISCARDED_BYTES more than the limit: many
        clients send the whole body before they read the response, and would see a broken connection instead.

        Raises:
            ApiError: The body is too large or arrives too slowly.
        """
        most, declared = self.limits.body_bytes, declared_bytes(scope)
        end = most + DISCARDED_BYTES
        waits = any(name == b"expect" for name, _ in scope["headers"])
        if declared > (most if waits else end):
            raise too_large(most)
        parts, size, more, is_large = list[bytes](), 0, True, declared > most
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while more and size <= end:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    is_large = is_large or size > most
                    if not is_large:
                        parts.append(part)
                    more = message.get("more_body", False)
        except TimeoutError:
            if not is_large:
                raise ApiError(408, f"the body did not arrive within {self.limits.body_seconds:g} s") from None
        if is_large:
            raise too_large(most)
        messages: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def body() -> Message:
            return messages.pop() if messages else await receive()

        return body


def declared_bytes(scope: Scope) -> int:
    """Return the announced size of the body of a request; 0 if none is announced."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return int(declared) if declared.isdigit() else 0


def too_large(most: int) -> ApiError:
    """Return the response to a body that is too large."""
    return ApiError(413, f"the body is larger than {most:,} bytes; send less at a time")
