"""Connections of the server: time limits on the head of a request, and an end that loses no request."""

import asyncio
import select
import socket
from typing import Any

import h11
from uvicorn import Server
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0
"""Time for the head of a request, from its first byte on, or from the start of the connection."""
LINGER_SECONDS = 1.0
"""Time in which clients of open connections still get an answer once the server has stopped listening."""


class Connection(H11Protocol):
    """A connection that is closed if the head of a request does not arrive in time."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start to wait for the first request."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Read data; wait on if a head is not complete."""
        super().data_received(data)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        """Start the timer if a head is awaited, and stop it otherwise."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_waiting()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


async def stop_listening(server: Server, sock: socket.socket) -> None:
    """Accept no more connections, and answer what clients send on open ones for up to LINGER_SECONDS.

    Connections that wait to be accepted would be reset when the socket is closed: further ones are held off first.
    """
    loop = asyncio.get_running_loop()
    sock.listen(0)
    await asyncio.sleep(0.05)
    until = loop.time() + LINGER_SECONDS
    while select.select([sock], [], [], 0)[0] and loop.time() < until:  # clients may go on connecting
        await asyncio.sleep(0)  # the loop accepts them
    for listener in server.servers:
        listener.close()
    connections, until = server.server_state.connections, loop.time() + LINGER_SECONDS
    while connections and loop.time() < until:
        await asyncio.sleep(0.02)
