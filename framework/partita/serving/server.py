"""Runs the HTTP application until SIGTERM or Ctrl-C."""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from partita.serving.address import bound, readable_errors
from partita.serving.engine import ServingEngine
from partita.serving.hosts import is_loopback
from partita.serving.limits import ServerLimits
from partita_schema.errors import PartitaError

logger = logging.getLogger(__name__)

TOKEN = "PARTITA_TOKEN"
"""Environment variable with the token of a server."""
KEEP_ALIVE_SECONDS = 30
MAX_HEADER_BYTES = 64 * 1024
INSTALL = 'partita serve needs further packages: pip install "partita[serve]"'


def token_for(host: str, *, wanted: bool) -> str | None:
    """Return the token of a server: that of PARTITA_TOKEN, else for another address than loopback a new one.

    Args:
        host: The address to listen on.
        wanted: Whether a token is needed on loopback too.

    Raises:
        PartitaError: PARTITA_TOKEN is not fit for a header, or too short.
    """
    token = os.environ.get(TOKEN, "")
    if token:
        if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
            raise PartitaError(f"{TOKEN} must have at least 16 letters, digits or signs of ASCII, without spaces")
        return token
    return secrets.token_urlsafe(32) if wanted or not is_loopback(host) else None


def run_server(
    app: Any, engine: ServingEngine, sock: socket.socket, *, finish_seconds: float, ready: Callable[[], None]
) -> None:
    """Serve requests until SIGTERM, Ctrl-C or `engine.refuse_new`; then answer the accepted ones, and refuse new ones.

    Args:
        app: The ASGI application.
        engine: The engine, started.
        sock: The socket to listen on.
        finish_seconds: Time for accepted requests.
        ready: Called once requests are accepted.

    Raises:
        PartitaError: The engine failed.
    """
    import uvicorn

    from partita.serving.connections import Connection
    from partita.serving.graceful_server import GracefulServer

    config = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        server_header=False,
    )
    server = GracefulServer(config, engine, sock, finish_seconds=finish_seconds, ready=ready)
    asyncio.run(server.serve(sockets=[sock]))
    if engine.failure is not None:
        raise PartitaError(f"the server has stopped because the engine failed: {engine.failure}")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How a server is reached, and what its clients may ask for."""

    host: str = "127.0.0.1"
    port: int = 8000
    """Port; 0 for a free one."""
    name: str
    """Name of the model for clients."""
    ui: bool = False
    """Whether to serve a page for a browser."""
    needs_token: bool = False
    """Whether clients on this machine need the token too."""
    limits: ServerLimits = field(default_factory=ServerLimits)


def serve(engine: Callable[[], ServingEngine], options: ServeOptions, *, say: Callable[[str], None]) -> None:
    """Serve a model until SIGTERM or Ctrl-C.

    Args:
        engine: Loads the model, and returns the engine, not started. Called once the address is known to be free.
        options: How the server is reached.
        say: Receives lines for the person who starts the server: the address, and a new token.

    Raises:
        DataError: The address cannot be listened on.
        PartitaError: The engine failed, or packages are missing.
    """
    try:
        import uvicorn  # noqa: F401 -- needed once the model is loaded, which takes long

        from partita.serving.app import ServerState, make_app
    except ImportError as error:
        raise PartitaError(f"{INSTALL} ({error})") from None
    token = token_for(options.host, wanted=options.needs_token)
    with bound(options.host, options.port) as sock:
        port = sock.getsockname()[1]
        host = f"[{options.host}]" if ":" in options.host else options.host

        def ready() -> None:
            say(f"{options.name} is served at http://{host}:{port}")
            if token is not None and not os.environ.get(TOKEN):
                say(f"token: {token}")

        with engine() as started:
            with readable_errors(options.host, port):
                sock.listen()  # another program may have begun to listen while the model was loaded
            if options.ui and started.prompts.why_none is not None:
                say(f"the page at / cannot chat: {started.prompts.why_none}")
            state = ServerState(started, options.name, int(time.time()), token, options.limits, ui=options.ui)
            run_server(make_app(state), started, sock, finish_seconds=options.limits.finish_seconds, ready=ready)
