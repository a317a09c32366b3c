"""The address that a server listens on."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from partita_schema.errors import DataError


def check_address(host: str, port: int) -> None:
    """Raise DataError if an address is taken or not of this machine."""
    bound(host, port).close()


def bound(host: str, port: int) -> socket.socket:
    """Return a socket with an address, which does not listen. Raise DataError if it is taken or not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol given, asyncio sends each part of a stream at once (TCP_NODELAY), without waiting for an ACK.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        with readable_errors(host, port):
            sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


@contextmanager
def readable_errors(host: str, port: int) -> Iterator[None]:
    """Raise DataError if a socket cannot have an address, or cannot listen."""
    try:
        yield
    except (OSError, OverflowError, TypeError, ValueError) as error:  # ports of six digits, hosts with a null
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot listen on {host} port {port}: {reason}; write another --host or --port") from None
