"""Tests that saved models and runs of other authors run no code until the caller allows it."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import AfterValidator, BaseModel

from partita import ConfigError, Model, ModelError, PartitaError
from partita.backends.agent_contexts import agent_contexts
from partita.backends.context import RunContext
from partita.backends.local import LocalBackend
from partita_schema.base import check_target, check_target_or_name
from partita_schema.code import code_of, takes_target
from partita_schema.config import Config
from partita_schema.load import load_config
from partita_schema.sections.simulation import Simulation

from ..forks import COMMAND, Forks
from ..json_lines import write_json_lines

PLANTED = """
from pathlib import Path
Path({mark!r}).touch()

class Part:
    def __init__(self, *args, **options): Path({mark!r}).touch()
    def __call__(self, *args): raise RuntimeError
"""
ROWS = [{"text": "red", "colour": "red"}, {"text": "blue", "colour": "blue"}]
FILE = {
    "base_model": {"type": "scratch", "size": "nano", "tokenizer": "byte", "context_length": 64},
    "input_features": [{"name": "text", "type": "text"}],
    "output_features": [{"name": "colour", "type": "text"}],
    "generation": {"max_new_tokens": 2},
    "trainer": {"type": "none", "batch_size": 2},
}
CUSTOM = {"type": "custom", "target": "planted:Part"}
DIALOGUE = {
    "input_features": [{"name": "d", "type": "dialogue"}],
    "output_features": [{"name": "answer", "type": "text"}],
}
ENVIRONMENT = {"type": "environment", "environment": "planted:Part"}


def simulation(**section: Any) -> dict[str, Any]:
    results = {
        "world": {"type": "user_sim"},
        "tasks": {"count": 1},
        "agents": {"user": {"type": "scripted", "lines": ["a"]}},
        **section,
    }
    return DIALOGUE | {"simulation": results}


HOSTILE: dict[str, tuple[dict[str, Any], str, str]] = {
    # changes in the configuration, the method that would run the code, the name in the message
    "custom code of the model": ({"trust_remote_code": True}, "load", "trust_remote_code: true"),
    "a pickle": ({"model_parameters": {"pickled_weights": True}}, "load", "model_parameters.pickled_weights: true"),
    "a formatter": ({"data": {"formatter": "planted:Part"}}, "load", "data.formatter: planted:Part"),
    "other machines": (
        {"backend": {"type": "torchrun", "nodes": 2, "address": "there:1"}},
        "load",
        "backend.address: there:1",
    ),
    "a cluster": ({"backend": {"type": "ray", "address": "there:1"}}, "load", "backend.address: there:1"),
    "a server": (
        {"base_model": "m", "trainer": {"type": "none"}, "backend": {"type": "endpoint", "url": "http://there/v1"}},
        "load",
        "backend.url: http://there/v1",
    ),
    "a trainer": ({"trainer": CUSTOM}, "train", "trainer.target: planted:Part"),
    "a callback": (
        {"trainer": {"type": "finetune", "batch_size": 2}, "callbacks": [CUSTOM]},
        "train",
        "callbacks[0].target: planted:Part",
    ),
    "a trainer on Ray": (
        {"trainer": CUSTOM, "backend": {"type": "ray", "workers": 2}},
        "train",
        "trainer.target: planted:Part",
    ),
    "a formatter in several processes": (
        {"data": {"formatter": "planted:Part"}, "backend": {"type": "torchrun", "processes": 2}},
        "load",
        "data.formatter: planted:Part",
    ),
    "a collate": ({"data": {"collate": "planted:Part"}}, "train", "data.collate: planted:Part"),
    "a source": ({"data": {"source": CUSTOM}}, "evaluate", "data.source.target: planted:Part"),
    "test rows": ({"data": {"test": CUSTOM}}, "evaluate", "data.test.target: planted:Part"),
    "a mix": ({"data": {"mix": [{"source": CUSTOM}, {"source": "b.csv"}]}}, "evaluate", "data.mix[0].source.target:"),
    "an environment": (simulation(world=ENVIRONMENT, agents={}), "simulate", "simulation.world.environment: planted:"),
    "an environment of Gymnasium": (
        simulation(world=ENVIRONMENT | {"environment": "planted:Guess-v0", "interface": "gymnasium"}, agents={}),
        "simulate",
        "simulation.world.environment: planted:Guess-v0",
    ),
    "a world": (simulation(world=CUSTOM, agents={}), "simulate", "simulation.world.target: planted:Part"),
    "a checker": (simulation(checker={"type": "planted:Part"}), "simulate", "simulation.checker.type: planted:Part"),
    "an agent": (
        simulation(agents={"user": {"type": "scripted", "program": "planted:Part"}}),
        "simulate",
        "simulation.agents.user.program: planted:Part",
    ),
    "a file of theirs in an agent": (
        simulation(agents={"user": {"type": "model", "file": "theirs.yaml", "prompt": "Ask."}}),
        "simulate",
        "simulation.agents.user.file: theirs.yaml",
    ),
    "a rollout": (simulation(rollout="planted:Part"), "simulate", "simulation.rollout: planted:Part"),
    "transcripts": (simulation(transcripts="planted:Part"), "simulate", "simulation.transcripts: planted:Part"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Model({**FILE, "data": {"source": write_rows(tmp_path_factory.mktemp("rows"))}}, quiet=True).save(
        tmp_path_factory.mktemp("saved") / "model"
    )


def write_rows(folder: Path) -> str:
    write_json_lines(folder / "rows.jsonl", ROWS)
    return str(folder / "rows.jsonl")


@pytest.fixture
def theirs(tmp_path: Path, saved: Path) -> Iterator[Callable[[dict[str, Any]], Path]]:
    """Return a function that creates a saved model with a planted module and a changed configuration."""
    import shutil

    def make(changes: dict[str, Any]) -> Path:
        folder = tmp_path / "theirs"
        shutil.copytree(saved, folder)
        (folder / "planted.py").write_text(PLANTED.format(mark=str(tmp_path / "ran")), encoding="utf8")
        card = json.loads((folder / "partita.json").read_text(encoding="utf8"))
        del card["checksum"]
        card |= {"folder": str(folder), "config": card["config"] | changes}
        (folder / "partita.json").write_text(json.dumps(card), encoding="utf8")
        return folder

    yield make
    sys.modules.pop("planted", None)


def use(model: Model, verb: str) -> None:
    if verb == "train":
        model.train(ROWS, run="run")
    elif verb == "evaluate":
        model.evaluate()
    elif verb == "simulate":
        model.simulate("out")


@pytest.mark.parametrize("name", HOSTILE)
def test_no_foreign_code_runs_silently(
    name: str, theirs: Callable[[dict[str, Any]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes, verb, said = HOSTILE[name]
    folder, before = theirs(changes), list(sys.path)
    with pytest.raises(ConfigError) as caught:
        use(Model.load(folder, quiet=True), verb)
    assert str(caught.value).startswith(
        f"{folder / 'partita.json'}: would run code or contact addresses chosen by the author of this folder ({said}"
    )
    assert "allow them with --trust-remote-code, in Python with Model.load(folder, trust_remote_code=True)" in str(
        caught.value
    )
    assert sys.path == before
    assert not (tmp_path / "ran").exists()


def test_code_that_the_caller_names_is_not_said_to_be_of_the_folder(
    theirs: Callable[[dict[str, Any]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = theirs(simulation(world=ENVIRONMENT | {"environment": "theirs:Guess"}, agents={}))
    with pytest.raises(ConfigError) as caught:
        use(Model.load(folder, overrides=["simulation.world.environment=planted:Part"], quiet=True), "simulate")
    assert str(caught.value) == (
        "simulation.world.environment: --set names planted:Part, and classes that are not in installed packages may "
        "come from the folder of the model; look at them, then allow them with --trust-remote-code, in Python with "
        "Model.load(folder, trust_remote_code=True)"
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["a formatter", "a trainer", "a source", "a world"])
def test_code_runs_when_the_caller_allows_it(
    name: str, theirs: Callable[[dict[str, Any]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes, verb, _ = HOSTILE[name]
    model = Model.load(theirs(changes), quiet=True, trust_remote_code=True)
    with suppress(PartitaError, TypeError, AttributeError):  # Part does not work
        use(model, verb)
        model.predict(ROWS)
    assert (tmp_path / "ran").exists()


def test_a_copy_for_another_process_is_not_trusted_more(theirs: Callable[[dict[str, Any]], Path]) -> None:
    copy = RunContext.load(theirs({"trainer": CUSTOM}), quiet=True).for_other_process()
    with pytest.raises(ConfigError, match=r"trainer\.target: planted:Part"):
        LocalBackend(copy).train(ROWS, "run")


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ({"config": None}, "is not a partita manifest: config: "),
        ({"folder": 5}, "is not a partita manifest: folder: "),
        ({"labels": {"colour": 5}}, "is not a partita manifest: labels: "),
        ({"config": {"base_model": 5}}, ": base_model: "),
        ({"checksum": "0"}, "is not as it was written (its checksum differs); restore it, start a new run"),
    ],
)
def test_an_invalid_manifest_is_reported(
    theirs: Callable[[dict[str, Any]], Path], card: dict[str, Any], said: str
) -> None:
    folder = theirs({})
    path = folder / "partita.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf8")) | card), encoding="utf8")
    with pytest.raises(PartitaError) as caught:
        Model.load(folder)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_manifest_without_a_configuration_is_reported(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format_version": 1, "status": "done"}', encoding="utf8")
    with pytest.raises(PartitaError, match=r"manifest.json has no config, so its prompt and outputs are unknown"):
        Model.load(tmp_path)


def test_a_model_with_a_custom_trainer_can_predict(
    theirs: Callable[[dict[str, Any]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Model.load(theirs({"trainer": CUSTOM | {"batch_size": 2}, "data": {"source": CUSTOM}}), quiet=True)
    assert len(list(model.predict(ROWS))) == 2
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_every_command_refuses_a_folder_that_names_code(
    forks: Forks, theirs: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    folder, rows = theirs({"data": {"formatter": "planted:Part"}}), write_rows(tmp_path)
    verbs: dict[str, list[str]] = {
        "predict": ["--dataset", rows, "--output", "out.jsonl"],
        "evaluate": ["--dataset", rows],
        "tune": ["--dataset", rows],
        "simulate": [],
    }
    for verb, words in verbs.items():
        done = forks.run(COMMAND, "partita", verb, folder, *words, folder=tmp_path)
        assert done.returncode == 2, (verb, done.stderr)
        assert "(data.formatter: planted:Part); look at them" in done.stderr, verb
        assert not (tmp_path / "ran").exists(), verb
    for verb in ("train", "validate", "explain", "convert", "preview"):  # these commands take configuration files
        done = forks.run(COMMAND, "partita", verb, folder, folder=tmp_path)
        assert done.returncode in (1, 2), (verb, done.stdout)
        assert not (tmp_path / "ran").exists(), verb
    forks.run(COMMAND, "partita", "predict", folder, "--trust-remote-code", *verbs["predict"], folder=tmp_path)
    assert (tmp_path / "ran").exists()


def test_a_configuration_on_the_command_line_is_trusted(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED.format(mark=str(tmp_path / "ran")), encoding="utf8")
    file = FILE | {"data": {"source": write_rows(tmp_path), "formatter": "planted:Part"}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(file), encoding="utf8")
    forks.run(
        COMMAND, "partita", "predict", "own.yaml", "--dataset", "rows.jsonl", "--output", "o.jsonl", folder=tmp_path
    )
    assert (tmp_path / "ran").exists()


def test_a_run_used_as_an_agent_is_not_trusted_like_the_configuration(
    theirs: Callable[[dict[str, Any]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = theirs(DIALOGUE | {"data": {"formatter": None}, "trust_remote_code": True})
    own = FILE | simulation(agents={"user": {"type": "model", "run": str(folder), "prompt": "Ask."}})
    own |= {"data": {"source": write_rows(tmp_path)}}
    with pytest.raises(ConfigError, match=r"simulation.agents.user.run: .*\(trust_remote_code: true\)"):
        agent_contexts(RunContext(load_config(own), quiet=True))
    allowed = RunContext(load_config(own | {"trust_remote_code": True}), quiet=True)
    assert allowed.allows_saved_code


def test_a_foreign_embedding_model_runs_no_code(
    theirs: Callable[[dict[str, Any]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    retrieval = {"type": "semantic", "k": 1, "model_name": str(tmp_path / "theirs")}
    folder = theirs({"prompt": {"retrieval": retrieval}})
    modules = [{"idx": 0, "name": "0", "path": "", "type": "planted.Part"}]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf8")
    with pytest.raises(ModelError, match=r"prompt\.retrieval\.model_name: .* cannot be loaded: .*planted\.Part"):
        Model.load(folder, quiet=True).predict(ROWS)
    assert not (tmp_path / "ran").exists()


def test_names_from_installed_packages_are_not_code_of_the_folder() -> None:
    file = FILE | simulation(checker={"type": "exact"}, rollout="slots", world=ENVIRONMENT | {"environment": "desk"})
    file["simulation"]["agents"] = {}
    config = Config.model_validate(file)
    assert [str(code) for code in code_of(config, of="simulation")] == []


def test_every_key_that_takes_a_class_is_checked() -> None:
    """A key with a list of classes, added by a later change, would be missed."""
    seen: list[str] = []

    def visit(model: type[BaseModel], done: set[type]) -> None:
        for name, field in model.model_fields.items():
            checks = str([field.annotation, field.metadata])
            if check_target.__name__ in checks or check_target_or_name.__name__ in checks:
                assert takes_target(field.annotation, field.metadata), (model, name)
                assert "tuple" not in checks
                assert "list" not in checks, (model, name)
                seen.append(name)
            for inner in models_in(field.annotation):
                if inner not in done:
                    done.add(inner)
                    visit(inner, done)

    visit(Config, set())
    assert sorted(set(seen)) == ["collate", "formatter", "program", "rollout", "target", "transcripts", "type"]
    assert isinstance(Simulation.model_fields["rollout"].metadata[0], AfterValidator)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    from typing import get_args

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)
