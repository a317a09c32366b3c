"""A server that ends after the requests that it has accepted."""

import asyncio
import ctypes
import logging
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn

from partita.serving.engine import LONGEST_STEP_SECONDS, ServingEngine

logger = logging.getLogger(__name__)

LINGER_SECONDS = 1.0
"""Time in which clients of open connections still get an answer once the server has stopped listening."""


HANDSHAKE_SECONDS = 0.2
"""Time in which handshakes that have begun end, before a socket is closed."""

# from linux/filter.h and asm-generic/socket.h; Python's socket module has no names for them
SO_ATTACH_FILTER = 26
LOAD_BYTE, JUMP_IF_ANY_BIT, RETURN = 0x30, 0x45, 0x06
TCP_FLAGS_BYTE, TCP_SYN = 13, 0x02


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
    """Accept no more connections, and answer what clients send on open ones for up to LINGER_SECONDS.

    A connection that waits to be accepted when its socket is closed is reset. So handshakes that have begun may end
    for HANDSHAKE_SECONDS, while no new ones begin, and the event loop accepts all before the socket is closed.
    """
    loop = asyncio.get_running_loop()
    drop_new_handshakes(sock)
    ended, until = loop.time() + HANDSHAKE_SECONDS, loop.time() + HANDSHAKE_SECONDS + LINGER_SECONDS
    while loop.time() < ended or (select.select([sock], [], [], 0)[0] and loop.time() < until):
        await asyncio.sleep(0.01)
    for listener in server.servers:
        listener.close()
    connections, until = server.server_state.connections, loop.time() + LINGER_SECONDS
    while connections and loop.time() < until:
        await asyncio.sleep(0.02)


def drop_new_handshakes(sock: socket.socket) -> None:
    """Let the kernel drop the first packet of new connections to a socket; on Linux only.

    A client sends it again, after one second at first, and is refused once the socket is closed.

    Source: the packet filters of Linux (Documentation/networking/filter.rst). A filter of TCP sees the TCP header
    first, whose byte 13 holds the flags.
    """
    if sys.platform != "linux":
        return
    program = [  # operation, offset if true, offset if false, operand
        (LOAD_BYTE, 0, 0, TCP_FLAGS_BYTE),
        (JUMP_IF_ANY_BIT, 0, 1, TCP_SYN),
        (RETURN, 0, 0, 0),  # drop the packet
        (RETURN, 0, 0, 0xFFFFFFFF),  # keep all of it
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    with suppress(OSError):  # kernels of some sandboxes have no filters
        sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code)))
