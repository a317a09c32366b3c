"""Imports without garbage collection.

Importing torch and transformers creates 400,000 objects that the garbage collector visits, and that stay until the
process ends.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class Frozen:
    """Who has excluded objects of this process from garbage collections."""

    by_partita = False


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector in the context."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def permanent_imports() -> Iterator[None]:
    """Pause the garbage collector in the context, and exclude all objects that exist at its end from later collections.

    For processes of partita, which keep the libraries that they import in the context until they end.
    """
    with no_garbage_collection():
        yield
        Frozen.by_partita = Frozen.by_partita or not gc.get_freeze_count()
        gc.freeze()


def others_have_frozen() -> bool:
    """Return whether the program has excluded objects from garbage collections, and not `permanent_imports`."""
    return gc.get_freeze_count() > 0 and not Frozen.by_partita
