"""Tests of self-training: results of rounds, resuming after a kill, and dropping bad rounds."""

import gc
import json
import random
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from partita import ConfigError, Model, PartitaError, ResumeError
from partita.lm.huggingface import HuggingFaceModel
from partita.pipeline.build import build_pipeline

from ... import self_training
from ...forks import COMMAND, Forks
from ...json_lines import read_json_lines
from ...seeds import session_seed


def settings(**changes: Any) -> dict[str, Any]:
    """Return a configuration with rounds of 40 dialogues and 6 steps."""
    scratch = {
        "type": "scratch",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "context_length": 96,
        "tokenizer": "word",
        "vocab_size": 64,
    }
    return self_training.settings(
        base_model=scratch,
        generation={"do_sample": True},
        trainer={"max_steps": 8, "batch_size": 8, "learning_rate": 0.01},
        **{"tasks": {"count": 40}, **changes},
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into a folder with rows and programs; return it."""
    self_training.fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(run: str, **changes: Any) -> Any:
    """Train; return the result."""
    Path("run.yaml").write_text(yaml.safe_dump(settings(**changes)), encoding="utf8")
    return Model("run.yaml", quiet=True).train(run=run)


def manifest(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "manifest.json").read_text("utf8"))
    return result


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


@pytest.mark.long
def test_each_round_starts_with_the_weights_of_the_previous_one(folder: Path) -> None:
    result = train("run")

    run = folder / "run"
    assert [same(weights(run), weights(run / "rounds" / str(number))) for number in (0, 1, 2)] == [False, False, True]
    noted = manifest(run)
    assert noted["status"] == "done"
    assert result.steps == noted["steps"] == 8 + 6 + 6
    assert result.metrics == noted["metrics"] == manifest(run / "rounds" / "2")["metrics"]
    assert [round_["kept"] for round_ in noted["rounds"]] == [True, True]
    assert [round_["dialogues"]["dialogues.n"] for round_ in noted["rounds"]] == [40, 40]
    assert [actual["dialogues.n"] for actual in result.dialogues] == [40, 40, 40]
    assert Model("run.yaml", quiet=True).train(run="run") == replace(result, resumed_from=None)
    # The first losses of a round are close to the last ones of the previous round, not to those of a new model.
    losses = [
        [json.loads(line)["loss"] for line in (place / "log.jsonl").read_text("utf8").splitlines()]
        for place in (run, run / "rounds" / "1", run / "rounds" / "2")
    ]
    assert [len(actual) for actual in losses] == [8, 6, 6]
    assert max(losses[1][0], losses[2][0]) < losses[0][0]


@pytest.mark.long
def test_rows_of_a_round_are_a_mix_of_data_and_dialogues(folder: Path) -> None:
    train("run", mix=0.25, keep_rounds=1, target="every_agent_turn")

    first, second = (manifest(folder / "run" / "rounds" / number)["config"]["data"]["mix"] for number in "12")
    assert [(part["name"], part["weight"]) for part in first] == [("rows", 0.75), ("round-1", 0.25)]
    assert [(part["name"], part["weight"]) for part in second] == [("rows", 0.75), ("round-2", 0.25)]
    assert second[1]["source"] == {
        "type": "simulation",
        "path": "run/rounds/2/transcripts/predicted.jsonl",
        "select": "corrected",
        "target": "every_agent_turn",
    }
    used = manifest(folder / "run" / "rounds" / "1")["sources"]
    assert set(used) == {"rows", "round-1"}
    lines = (folder / "run" / "rounds" / "1" / "transcripts" / "predicted.jsonl").read_text("utf8").splitlines()
    others = (folder / "run" / "rounds" / "2" / "transcripts" / "predicted.jsonl").read_text("utf8").splitlines()
    seeds = [{json.loads(line)["seed"] for line in result} for result in (lines, others)]
    assert not seeds[0] & seeds[1]
    kept = [number for number, one in enumerate(manifest(folder / "run")["rounds"], start=1) if one["kept"]]
    results = [folder / "run" / part / "evaluations" / "validation.jsonl" for part in ("", f"rounds/{kept[-1]}")]
    assert results[0].read_bytes() == results[1].read_bytes()


@pytest.mark.long
def test_a_round_that_lowers_the_success_rate_is_dropped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = settings(rounds=3, learning_rate=1000.0, select="all")
    file["trainer"]["max_steps"] = 60
    Path("run.yaml").write_text(yaml.safe_dump(file), encoding="utf8")
    Model("run.yaml", quiet=True).train(run="run")

    run = folder / "run"
    noted = manifest(run)
    assert [round_["kept"] for round_ in noted["rounds"]] == [False]
    assert not (run / "rounds" / "0").exists()
    assert not same(weights(run), weights(run / "rounds" / "1"))
    assert noted["metrics"] == noted["before_rounds"]["metrics"]
    assert "round 1 lowered the success rate to 0.0" in caplog.text


@pytest.mark.long
def test_rounds_stop_without_training_rows(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    file = settings(select="corrected")
    file["simulation"]["world"]["options"] = {"content": True}
    Path("run.yaml").write_text(yaml.safe_dump(file), encoding="utf8")

    model = Model("run.yaml", quiet=True)
    model.train(run="run")

    assert manifest(folder / "run")["rounds"] == []
    assert manifest(folder / "run")["status"] == "done"
    assert "round 1 produced no training rows; stopping: predicted.jsonl: no dialogue can be trained on" in (
        caplog.text
    )
    assert model.simulate("somewhere").histories["predicted"].means["success"].mean == 1.0


@pytest.mark.long
def test_more_rounds_continue_after_trained_ones(folder: Path) -> None:
    train("run", rounds=1)
    first = weights(folder / "run")
    train("run", rounds=2)

    assert same(first, weights(folder / "run" / "rounds" / "1"))
    assert same(weights(folder / "run"), weights(folder / "run" / "rounds" / "2"))
    with pytest.raises(Exception, match=r"simulation.self_training.mix: 0.4 -> 0.5"):
        train("run", rounds=2, mix=0.5)
    advice = "or give this run another folder with --run"
    with pytest.raises(ResumeError) as caught:
        train("run", rounds=1)
    assert str(caught.value) == (
        "the run in run has 2 rounds of self-training, and simulation.self_training.rounds is 1; raise it, " + advice
    )
    with pytest.raises(ResumeError) as caught:
        Model("run.yaml", overrides=["simulation.self_training.rounds=2", "trainer.max_steps=9"], quiet=True).train(
            run="run"
        )
    assert str(caught.value) == (
        "the run in run has trained rounds after trainer.max_steps: 8, which cannot change to 9; undo that, " + advice
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"world": {"type": "environment", "environment": "worlds_of_tests:Repaet"}},
            "module worlds_of_tests has no class Repaet; did you mean Repeat?",
        ),
        ({"checker": {"type": "exakt"}}, "no checker is named exakt; did you mean exact?"),
        ({"self_training": {"tasks": {"source": "nobody.jsonl"}}}, "nobody.jsonl does not exist in "),
        (
            {"self_training": {"rounds": 1000, "keep_rounds": 1000, "tasks": {"count": 1}}},
            "round 1000 cannot be trained, because of its data.mix: got 1,001 sources",
        ),
        (
            {
                "world": {"type": "user_sim", "first": "say red"},
                "agents": {"user": {"type": "model", "run": "runs/nobody"}},
            },
            "nobody is neither a run directory nor a saved model",
        ),
    ],
)
def test_missing_inputs_of_rounds_are_reported_before_training(
    folder: Path, changes: dict[str, Any], text: str
) -> None:
    file = settings()
    file["simulation"] |= changes
    Path("run.yaml").write_text(yaml.safe_dump(file), encoding="utf8")

    with pytest.raises(PartitaError, match=re.escape(text)):
        Model("run.yaml", quiet=True).train(run="run")
    assert not (folder / "run").exists()


@pytest.mark.long
def test_a_model_is_trained_on_self_play(folder: Path) -> None:
    file = settings(rounds=1, select="all")
    file["base_model"] = {key: value for key, value in file["base_model"].items() if key != "vocab_size"}
    file["base_model"]["tokenizer"] = "byte"  # a word tokenizer may not know words that a model combines
    file["simulation"] |= {
        "world": {"type": "self_play", "first": "say red"},
        "checker": {"type": "worlds_of_tests:Short"},
        "max_turns": 2,
    }
    Path("run.yaml").write_text(yaml.safe_dump(file), encoding="utf8")

    result = Model("run.yaml", quiet=True).train(run="run")

    assert [actual["dialogues.n"] for actual in result.dialogues] == [40, 40]
    assert not same(weights(folder / "run"), weights(folder / "run" / "rounds" / "0"))


@pytest.mark.long
def test_at_most_one_model_is_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def alive() -> list[HuggingFaceModel]:
        return [result for result in gc.get_objects() if type(result) is HuggingFaceModel]

    loaded: list[int] = []

    def counted(*given: Any, **named: Any) -> Any:
        loaded.append(len(alive()))
        return build_pipeline(*given, **named)

    monkeypatch.setattr("partita.training.self_training.build_pipeline", counted)
    gc.collect()
    before = alive()  # of other tests, which must not be freed now
    train("run")

    assert loaded == [len(before)] * 5, "three simulations and two trainings start without a model in memory"


def test_rows_passed_as_an_argument_are_refused(folder: Path) -> None:
    Path("run.yaml").write_text(yaml.safe_dump(settings()), encoding="utf8")

    with pytest.raises(ConfigError, match=r"rounds are mixed with the rows of data.source; write them there"):
        Model("run.yaml", quiet=True).train("rows.jsonl", run="run")


@pytest.mark.long
def test_a_job_killed_at_any_moment_gives_the_same_result(folder: Path, forks: Forks) -> None:
    seed = session_seed()
    rng = random.Random(seed)
    train("straight")
    for _ in range(6):
        program = forks.start(COMMAND, "partita", "train", "run.yaml", "--run", "killed", "--quiet", folder=folder)
        end = time.monotonic() + rng.uniform(0.5, 6.0)
        while time.monotonic() < end and program.poll() is None:
            time.sleep(0.01)
        program.send_signal(signal.SIGKILL)
        program.communicate()
    done = forks.run(COMMAND, "partita", "train", "run.yaml", "--run", "killed", "--quiet", folder=folder)

    assert done.returncode == 0, done.stderr
    straight, killed = folder / "straight", folder / "killed"
    assert same(weights(straight), weights(killed)), f"seed {seed}"
    for number in "123":
        name = f"rounds/{number}/transcripts/predicted.jsonl"
        assert (straight / name).read_bytes() == (killed / name).read_bytes(), f"seed {seed}"
    for number in "12":
        one, other = (read_json_lines(run / "rounds" / number / "log.jsonl") for run in (straight, killed))
        assert [line | {"seconds": 0} for line in one] == [line | {"seconds": 0} for line in other], f"seed {seed}"
    assert manifest(straight)["metrics"] == manifest(killed)["metrics"]
