"""Fixtures of all tests: a separate cache of batch sizes, a working Ctrl-C, and a restored log."""

import gc
import logging
import os
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from partita_schema.common.garbage_collection import no_garbage_collection

from .costs import Costs, add_options, imported_libraries
from .forks import Forks
from .properties import register_profiles
from .seeds import VARIABLE, session_seed, set_session_seed

register_profiles()

NOBODY = 65534
"""Number of the user nobody."""
FROZEN = set[str]()
"""Libraries whose objects are excluded from garbage collection."""
LOGGERS = ("partita", "partita_trainers", "partita_schema", "partita.file", "transformers", "datasets")


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_report_header() -> str:
    return f"seed of random kills: set {VARIABLE}={session_seed()} to repeat them"


def pytest_configure(config: pytest.Config) -> None:
    set_session_seed()
    config.pluginmanager.register(Costs(config))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect no garbage while tests are imported, which takes an eighth of that time and finds none."""
    with no_garbage_collection():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark hypothesis tests, which `make test-long` runs with more examples."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Exclude the objects of newly imported libraries from garbage collection, which visits all objects.

    Every training collects garbage at its end, and so does the clean-up after an out-of-memory error. If all libraries
    are imported, that takes longer than a small training.
    """
    if imported_libraries() - FROZEN:
        FROZEN.update(imported_libraries())
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def heard_interrupts() -> None:
    """Restore the handler of Ctrl-C, which a background job of a shell script ignores."""
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


@pytest.fixture(autouse=True)
def same_log() -> Iterator[None]:
    """Restore the loggers after each test; commands and ranks change handlers and levels of their process."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def without_root() -> Iterator[Path]:
    """Become the user nobody if this is root, to whom permissions do not apply; return a folder of that user."""
    with tempfile.TemporaryDirectory() as folder:
        user = os.geteuid()
        if user == 0:
            os.chown(folder, NOBODY, -1)
            os.seteuid(NOBODY)
        try:
            yield Path(folder)
        finally:
            os.seteuid(user)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Return an object that starts programs without the seconds for importing torch and transformers."""
    result = Forks(tmp_path_factory.mktemp("forks"))
    result.run("", folder=result.folder)  # waits for the imports, so that the first test is not charged for them
    yield result
    result.end()


Forced = Callable[[Path], int | list[str] | None]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Forced:
    """Return a function: the size of a file, or the names in a folder, at its last fsync; None without one."""
    fsync, result = os.fsync, dict[int, int | list[str]]()

    def note(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        result[status.st_ino] = sorted(os.listdir(descriptor)) if stat.S_ISDIR(status.st_mode) else status.st_size

    monkeypatch.setattr(os, "fsync", note)
    return lambda path: result.get(path.stat().st_ino)
