"""Tests keep the batch sizes that they find in a folder of their own, not in the user's cache."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("PARTITA_CACHE")
    os.environ["PARTITA_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["PARTITA_CACHE"]
    else:
        os.environ["PARTITA_CACHE"] = before
