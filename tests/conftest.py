"""Tests keep the batch sizes that they find in a folder of their own, not in the user's cache, and hear Ctrl-C."""

import os
import signal
from collections.abc import Iterator

import pytest

from .forks import Forks


@pytest.fixture(scope="session", autouse=True)
def heard_interrupts() -> None:
    """What a script runs in the background ignores Ctrl-C, and so would everything here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("PARTITA_CACHE")
    os.environ["PARTITA_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["PARTITA_CACHE"]
    else:
        os.environ["PARTITA_CACHE"] = before


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """What starts programs that need torch and transformers, without the seconds that importing them takes."""
    found = Forks(tmp_path_factory.mktemp("forks"))
    yield found
    found.end()
