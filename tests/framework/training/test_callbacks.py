"""Tests of callbacks through `Model.train` and the command line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita import ConfigError, Model
from partita_trainers import TrainingState

from ...json_lines import read_json_lines
from ..conftest import Command

SHORT = {"max_steps": 4, "steps_per_checkpoint": 2, "skip_all_evaluation": True, "evaluate_test": False}

CODE = '''
import json
import sys

class Journal:
    """Writes the losses to a file of the run."""

    def __init__(self, name="losses.jsonl", fails_at=None):
        self.name, self.fails_at = name, fails_at

    def on_step(self, state):
        if state.step == self.fails_at:
            raise OSError("the disk is on fire")
        with (state.run / self.name).open("a") as file:
            file.write(json.dumps({"step": state.step, "loss": state.loss}) + "\\n")

class Exits:
    def __init__(self, at=0):
        self.at = at
        if at == 0:
            sys.exit("no step")

    def on_step(self, state):
        if state.step == self.at:
            sys.exit()
'''


def file_with_journal(folder: Path, colours: Any, **options: Any) -> Path:
    """Write a configuration with a callback next to it; return the path of the configuration."""
    (folder / "journal_of_a_test.py").write_text(CODE)
    callback = {"type": "custom", "target": "journal_of_a_test:Journal", "options": options}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(colours.config(trainer=SHORT, callbacks=[callback])))
    return file


class StopAfter:
    """Stops at a step, and counts the calls."""

    def __init__(self, step: int) -> None:
        self.step, self.seen = step, list[int]()

    def on_step(self, state: TrainingState) -> None:
        self.seen.append(state.step)
        if state.step == self.step:
            state.stop("enough")


def test_a_callback_of_the_file_and_one_of_the_caller_are_called(colours: Any, tmp_path: Path) -> None:
    stop = StopAfter(3)
    model = Model(file_with_journal(tmp_path, colours, name="noted.jsonl"), quiet=True)
    result = model.train(run=tmp_path / "run", callbacks=[stop])
    losses = [{key: line[key] for key in ("step", "loss")} for line in read_json_lines(tmp_path / "run" / "log.jsonl")]
    assert read_json_lines(tmp_path / "run" / "noted.jsonl") == losses
    assert stop.seen == [1, 2, 3]
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert (result.steps, manifest["status"], manifest["stopped_early"]) == (3, "done", True)
    assert manifest["stopped_by"] == "StopAfter: enough"
    again = StopAfter(1)
    assert model.train(run=tmp_path / "run", callbacks=[again]).steps == 3
    assert again.seen == []  # the run is finished


def test_a_failing_callback_ends_the_command_with_status_1_and_the_run_resumes(
    colours: Any, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert command("train", file_with_journal(tmp_path, colours, fails_at=3), "--run", run, "-q") == 1
    error = capsys.readouterr().err
    assert error == (
        "error: the callback Journal failed in on_step at step 3 (journal_of_a_test.py, line 13): OSError: the disk is "
        "on fire; fix it, and rerun the same command to resume\n"
    )
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert "the callback Journal failed" in manifest["error"]
    assert command("train", file_with_journal(tmp_path, colours), "--run", run, "-q") == 0
    assert [line["step"] for line in read_json_lines(run / "log.jsonl")] == [1, 2, 3, 4]
    assert [line["step"] for line in read_json_lines(run / "losses.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("at", "error"),
    [
        (
            3,
            (
                "the callback Exits called sys.exit() in on_step at step 3 (journal_of_a_test.py, line 25); call "
                "state.stop() to stop the training, and rerun the same command to resume"
            ),
        ),
        (
            0,
            (
                "code of the training called sys.exit('no step') (journal_of_a_test.py, line 21); remove that call, or "
                "raise an exception, and rerun the same command to resume"
            ),
        ),
    ],
    ids=["in a step", "when it is created"],
)
def test_a_callback_that_calls_sys_exit_ends_the_command_with_status_1(
    at: int, error: str, colours: Any, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    file = file_with_journal(tmp_path, colours)
    callback = f"callbacks=[{{type: custom, target: 'journal_of_a_test:Exits', options: {{at: {at}}}}}]"

    assert command("train", file, "--run", tmp_path / "run", "-q", "--set", callback) == 1

    assert capsys.readouterr().err == f"error: {error}\n"
    if at:
        manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
        assert (manifest["status"], manifest["error"]) == ("failed", f"TrainingError: {error}")


def test_a_trainer_that_calls_no_callbacks_is_refused_with_them(colours: Any, tmp_path: Path) -> None:
    code = "class Own:\n    def __init__(self, section): pass\n    def train(self, context): raise AssertionError\n"
    (tmp_path / "own_of_a_test.py").write_text(code)
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump(colours.config(trainer={"type": "custom", "target": "own_of_a_test:Own", "batch_size": 4}))
    )
    message = (
        "callbacks: Own does not call them: let it call partita_trainers.Callbacks and say so in the class by "
        "calls_callbacks = True, or remove them"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Model(tmp_path / "run.yaml", quiet=True).train(run=tmp_path / "run", callbacks=[StopAfter(1)])
    assert not (tmp_path / "run").exists()


def test_a_run_may_be_resumed_and_used_with_other_callbacks(colours: Any, tmp_path: Path) -> None:
    model = Model(colours.config(trainer=SHORT), quiet=True)
    model.train(run=tmp_path / "run", callbacks=[StopAfter(2)])
    file = file_with_journal(tmp_path, colours)
    result = Model(file, overrides=["trainer.max_steps=5"], quiet=True).train(run=tmp_path / "run")
    assert (result.steps, result.resumed_from) == (5, 2)
    assert [line["step"] for line in read_json_lines(tmp_path / "run" / "losses.jsonl")] == [3, 4, 5]


BAG = {
    "base_model": {"type": "embedding_bag", "embedding_dim": 8, "buckets": 64},
    "input_features": [{"name": "text"}],
    "output_features": [{"name": "colour", "type": "category"}],
    "trainer": {"type": "hogwild", "workers": 1, "epochs": 4},
}


class Killed(BaseException):
    """Raised in place of a kill signal; no code under test may catch it."""


class StopInEpochTwo:
    """Asks to stop in one method, and is killed before the run has ended."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.look)

    def look(self, state: TrainingState) -> None:
        if state.epoch == 2:
            state.stop("enough")

    def on_end(self, state: TrainingState) -> None:
        raise Killed


@pytest.mark.parametrize("hook", ["on_step", "on_checkpoint"])
def test_hogwild_that_was_stopped_and_killed_before_its_end_is_not_trained_longer(
    tmp_path: Path, colours: Any, hook: str
) -> None:
    run, rows, seen = tmp_path / "run", colours.rows(64), list[tuple[str, int]]()
    with pytest.raises(Killed):
        Model(BAG, quiet=True).train(rows, run=run, callbacks=[StopInEpochTwo(hook)])

    class Diary:
        def on_start(self, state: TrainingState) -> None:
            seen.append(("start", state.step))

        def on_step(self, state: TrainingState) -> None:
            seen.append(("step", state.step))

        def on_end(self, state: TrainingState) -> None:
            seen.append(("end", state.step))

    result = Model(BAG, quiet=True).train(rows, run=run, callbacks=[Diary()])
    assert result.stopped_early
    assert seen == [("start", result.steps), ("end", result.steps)]
    assert json.loads((run / "manifest.json").read_text())["stopped_by"] == "StopInEpochTwo: enough"


def test_hogwild_calls_callbacks_after_each_epoch(tmp_path: Path, colours: Any) -> None:
    calls: list[tuple[str, int]] = []

    class Diary:
        def on_start(self, state: TrainingState) -> None:
            calls.append(("start", state.step))

        def on_step(self, state: TrainingState) -> None:
            calls.append(("step", state.step))
            if state.epoch == 2:
                state.stop()

        def on_checkpoint(self, state: TrainingState) -> None:
            assert state.checkpoint is not None
            assert state.checkpoint.is_dir()
            calls.append(("checkpoint", state.step))

        def on_end(self, state: TrainingState) -> None:
            calls.append(("end", state.step))

    result = Model(BAG, quiet=True).train(colours.rows(64), run=tmp_path / "run", callbacks=[Diary()])
    assert result.stopped_early
    per_epoch = result.steps // 2
    assert calls[0] == ("start", 0)
    assert calls[-1] == ("end", result.steps)
    assert [step for hook, step in calls if hook == "step"] == [per_epoch, 2 * per_epoch]
