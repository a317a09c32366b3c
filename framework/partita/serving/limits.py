"""Limits of a server: the command, `Model.serve` and the server take their defaults from here."""

from dataclasses import dataclass

MAX_WAITING = 1024
"""Maximum number of requests that wait for a slot; more are refused."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What a client may ask for, and how long a stopping server answers."""

    body_bytes: int = 4 * 2**20
    """Maximum size of a request."""
    body_seconds: float = 30.0
    """Maximum time for a request to arrive."""
    answer_seconds: float = 600.0
    """Maximum time of an answer, with the time that it waits."""
    finish_seconds: float = 20.0
    """Time for accepted requests after SIGTERM: service managers usually kill a process 30 s after it."""
