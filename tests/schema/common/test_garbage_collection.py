"""Imports without garbage collection: it is paused, resumed, and does not visit the imported objects again."""

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from partita_schema.common.garbage_collection import (
    Frozen,
    no_garbage_collection,
    others_have_frozen,
    permanent_imports,
)
from partita_schema.common.lazy import lazy_exports


@pytest.fixture(autouse=True)
def no_frozen_objects(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unfreeze what tests before this one have frozen."""
    monkeypatch.setattr(Frozen, "by_partita", False)
    gc.unfreeze()
    yield
    gc.freeze()


def test_the_collector_is_paused_in_the_context_only() -> None:
    with no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_paused_collector_stays_paused() -> None:
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_imported_objects_are_excluded_from_later_collections() -> None:
    with permanent_imports():
        assert not gc.isenabled()
        made = [[]]  # type: ignore[var-annotated]
    assert gc.isenabled()
    assert gc.get_freeze_count() > 10_000
    assert not any(one is made for one in gc.get_objects())
    assert not others_have_frozen()


def test_a_failed_import_resumes_the_collector() -> None:
    with pytest.raises(ModuleNotFoundError), permanent_imports():
        importlib.import_module("no_such_module_of_partita")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_objects_that_the_program_has_frozen_are_known() -> None:
    assert not others_have_frozen()
    gc.freeze()
    with permanent_imports():
        pass
    assert others_have_frozen()


def test_a_public_name_is_imported_without_collections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heavy_of_partita.py").write_text("import gc\nENABLED = gc.isenabled()\n", encoding="utf8")
    monkeypatch.syspath_prepend(tmp_path)
    get_attribute, _ = lazy_exports(__name__, {"heavy_of_partita": ("ENABLED",)})
    try:
        assert get_attribute("ENABLED") is False
    finally:
        sys.modules.pop("heavy_of_partita", None)
        globals().pop("ENABLED", None)
    assert gc.isenabled()
