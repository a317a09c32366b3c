"""Tests of modules that a configuration names: which file is imported, and what its hash covers."""

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from partita_schema.errors import ConfigError
from partita_trainers.user_modules import load_class, source_digests

MODULE = "from helper import NAME\nfrom unused.part import OTHER\n\n\nclass Theirs:\n    name = NAME\n"


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with a module `theirs`, which imports a module and a package from it; forget them afterwards."""
    write(tmp_path, theirs=MODULE, helper="from unused import part\nNAME = 'a'\n", apart="")
    (tmp_path / "unused").mkdir()
    write(tmp_path / "unused", __init__="", part="from . import inner\nOTHER = 1\n", inner="")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, **sources: str) -> None:
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source, encoding="utf8")


def forget(*names: str) -> None:
    for name in names:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def test_a_second_module_of_a_name_is_refused(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write(other, theirs="class Theirs:\n    name = 'b'\n")
    assert load_class("theirs:Theirs", folder=project).name == "a"
    with pytest.raises(ConfigError) as caught:
        load_class("theirs:Theirs", key="data.formatter", folder=other)
    assert str(caught.value) == (
        f"data.formatter: the module theirs is {other / 'theirs.py'}, and this process has imported "
        f"{project / 'theirs.py'} under that name; rename one of them, or use another process"
    )
    assert load_class("theirs:Theirs", folder=project).name == "a"


def test_a_file_with_the_name_of_an_installed_module_is_named(project: Path) -> None:
    write(project, wave="class Theirs:\n    pass\n")
    import wave

    with pytest.raises(ConfigError) as caught:
        load_class("wave:Theirs", folder=project)
    assert str(caught.value) == (
        f"trainer.target: the module wave is {wave.__file__}, because installed modules come first, and has no class "
        f"Theirs; rename {project / 'wave.py'}"
    )


def test_the_hash_covers_what_a_module_imports_from_its_folder(project: Path) -> None:
    def digests() -> list[str]:
        forget("theirs", "helper", "unused", "unused.part", "unused.inner")
        load_class("theirs:Theirs", folder=project)
        return source_digests(sys.modules["theirs"])

    first = digests()
    assert len(first) == 5, "theirs, helper, unused, unused.part and unused.inner"
    write(project / "unused", inner="VALUE = 2\n")
    second = digests()
    assert sum(old != new for old, new in zip(first, second, strict=True)) == 1
    write(project, apart="VALUE = 3\n")
    assert digests() == second


def test_the_hash_does_not_depend_on_what_has_been_imported(project: Path) -> None:
    write(project, theirs="class Theirs:\n    def use(self):\n        import apart\n")
    load_class("theirs:Theirs", folder=project)
    before = source_digests(sys.modules["theirs"])
    assert len(before) == 2
    write(project, apart="VALUE = 4\n")
    assert source_digests(sys.modules["theirs"]) != before, "it would now be imported like this"
    sys.modules["apart"] = importlib.import_module("json")  # another module of this name
    assert len(source_digests(sys.modules["theirs"])) == 2


def test_libraries_below_the_project_are_not_followed(project: Path) -> None:
    library = project / ".venv" / "lib" / "site-packages" / "numpy"
    library.mkdir(parents=True)
    write(library, __init__="import helper\n")
    write(project, theirs="import numpy\nimport torch\n\n\nclass Theirs:\n    pass\n")
    load_class("theirs:Theirs", folder=project)
    assert len(source_digests(sys.modules["theirs"])) == 1
    write(project / ".venv" / "lib" / "site-packages", installed="import numpy\n\n\nclass Theirs:\n    pass\n")
    load_class("installed:Theirs", folder=project / ".venv" / "lib" / "site-packages")
    assert len(source_digests(sys.modules["installed"])) == 1


def test_modules_that_cannot_be_followed_are_loaded(project: Path) -> None:
    tries = "try:\n    from .helper import NAME\nexcept ImportError:\n    NAME = 'alone'\n\n\n"
    write(project, theirs=f"{tries}class Theirs:\n    name = NAME\n")
    assert load_class("theirs:Theirs", folder=project).name == "alone"
    (project / "theirs.py").unlink()
    assert load_class("theirs:Theirs", folder=project).name == "alone"


def test_of_an_installed_module_only_its_own_source_is_hashed() -> None:
    import json

    assert len(source_digests(json)) == 1
    assert len(source_digests(sys.modules["partita_trainers.user_modules"])) == 1
    assert source_digests(sys) == []


def test_an_edited_module_has_the_hash_of_what_was_imported_and_is_reported_once(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_class("theirs:Theirs", folder=project)
    imported = source_digests(sys.modules["theirs"])
    write(project, helper="NAME = 'edited'\n")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert load_class("theirs:Theirs", folder=project).name == "a"
    assert source_digests(sys.modules["theirs"]) == imported
    [said] = [record.getMessage() for record in caplog.records]
    path = project / "helper.py"
    assert said == f"{path} has changed since this process imported it, and the code from before runs; restart Python"


def test_a_reloaded_module_has_the_hash_of_its_new_source(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    load_class("theirs:Theirs", folder=project)
    before = source_digests(sys.modules["theirs"])
    write(project, helper="NAME = 'a longer name'\n")
    monkeypatch.syspath_prepend(project)
    importlib.reload(sys.modules["helper"])
    importlib.reload(sys.modules["theirs"])
    assert load_class("theirs:Theirs", folder=project).name == "a longer name"
    assert sum(old != new for old, new in zip(before, source_digests(sys.modules["theirs"]), strict=True)) == 1
