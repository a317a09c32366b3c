"""From a configuration to its backend."""

from partita.backends.base import Backend
from partita.backends.context import RunContext
from partita.backends.endpoint.backend import EndpointBackend
from partita.backends.local import LocalBackend
from partita.backends.ray.backend import RayBackend

BACKENDS: dict[str, type[Backend]] = {
    "local": LocalBackend,
    "torchrun": LocalBackend,  # in each process that torchrun started
    "ray": RayBackend,
    "endpoint": EndpointBackend,
}
"""Backends by backend.type."""


def open_backend(context: RunContext) -> Backend:
    """Return the backend of a configuration; it loads nothing until a verb needs it."""
    return BACKENDS[context.config.backend.type](context)
