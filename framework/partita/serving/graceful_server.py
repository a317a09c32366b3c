"""A server that ends after the requests that it has accepted."""

import asyncio
import logging
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import uvicorn

from partita.serving.engine import LONGEST_STEP_SECONDS, ServingEngine

logger = logging.getLogger(__name__)

LINGER_SECONDS = 1.0
"""Time in which clients of open connections still get an answer once the server has stopped listening."""


class GracefulServer(uvicorn.Server):
    """Listens until the accepted requests are answered; new ones get status 503 meanwhile."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: ServingEngine,
        sock: socket.socket,
        *,
        finish_seconds: float,
        ready: Callable[[], None],
    ) -> None:
        """Create a server.

        Args:
            config: The configuration of uvicorn.
            engine: The engine, started.
            sock: The socket to listen on.
            finish_seconds: Time for accepted requests after a signal.
            ready: Called once requests are accepted.
        """
        super().__init__(config)
        self.engine, self.sock = engine, sock
        self.finish_seconds, self.ready = finish_seconds, ready
        self.stopping_since: float | None = None
        """When the server began to stop."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; a second signal stops at once."""
        if self.stopping_since is not None:
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT
            return
        self.engine.refuse_new()
        logger.info("stopping: new requests get status 503, and accepted ones have %g s to finish", self.finish_seconds)

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server has to exit: once the engine has ended, or a step takes too long."""
        if self.stopping_since is None and self.engine.why_closed is not None:
            self.stopping_since = time.monotonic()
            self.engine.finish_within(self.finish_seconds)
        since = self.stopping_since
        if since is not None:
            late = time.monotonic() - since > self.finish_seconds + LONGEST_STEP_SECONDS
            self.should_exit = self.should_exit or late or self.engine.has_ended
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and wait for the responses."""
        if not self.force_exit:
            await stop_listening(self, self.sock)
        await super().shutdown(sockets)


async def stop_listening(server: uvicorn.Server, sock: socket.socket) -> None:
    """Accept no more connections, and answer what clients send on open ones for up to LINGER_SECONDS."""
    loop = asyncio.get_running_loop()
    sock.listen(0)  # the queue has room for one connection
    until = loop.time() + LINGER_SECONDS
    with occupied_queue(sock) as is_occupied:
        while not is_occupied() and loop.time() < until:
            await asyncio.sleep(0.001)  # the event loop accepts the waiting connections
        for listener in server.servers:
            listener.close()
    connections, until = server.server_state.connections, loop.time() + LINGER_SECONDS
    while connections and loop.time() < until:
        await asyncio.sleep(0.02)


@contextmanager
def occupied_queue(sock: socket.socket) -> Iterator[Callable[[], bool]]:
    """Yield a function that takes the only place in a socket's queue of connections; it returns whether it did.

    A connection that waits in the queue is reset when the socket is closed. Once a connection from this process has
    the only place, no client's can enter: the kernel drops its first packet, and refuses it when it is sent again.
    """
    host, port = sock.getsockname()[:2]
    address = ({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)
    with ExitStack() as opened:

        def occupy() -> bool:
            if select.select([sock], [], [], 0)[0]:
                return False
            own = opened.enter_context(socket.socket(sock.family))
            own.setblocking(False)
            own.connect_ex(address)
            connected = select.select([], [own], [], 0.01)[1] and not own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not connected:
                own.close()
            return bool(connected)

        yield occupy
