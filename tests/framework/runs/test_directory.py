import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from partita.runs import directory, opening
from partita.runs.directory import RunDirectory
from partita.runs.directory_choice import ChosenRun, choose_folder, find_finished, unfinished_sibling
from partita.runs.files import strict_json
from partita.runs.manifest import read_manifest
from partita.runs.opening import open_run
from partita.runs.row_results import EARLIER
from partita.runs.settings import check_same, leaves
from partita_schema.common.checksums import sealed
from partita_schema.config import Config
from partita_schema.errors import ConfigError, DataError, LostRankError, PartitaError, ResumeError, WriteError
from partita_schema.sections.adapter import LoraAdapter
from partita_schema.sections.backend import TorchrunBackendConfig
from partita_schema.sections.data import KFoldSplit
from partita_schema.sections.simulation import EnvironmentWorldConfig, Simulation, Tasks
from partita_trainers.checkpoints.file_sums import summed

from ...json_lines import read_json_lines


def config_of(**changes: Any) -> Config:
    return Config.model_validate(
        {
            "base_model": "m",
            "input_features": [{"name": "a", "type": "text"}],
            "output_features": [{"name": "b", "type": "text"}],
            "trainer": {"type": "finetune", **changes},
        }
    )


@contextmanager
def opened(folder: Path, **changes: Any) -> Iterator[RunDirectory]:
    """Open a run with a small configuration."""
    with open_run(folder, config=config_of(**changes), text="a: 1\n", resolved="r: 1\n", origin=folder.parent) as run:
        yield run


def manifest(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text(encoding="utf8"))


def test_the_manifest_records_how_a_run_ended_and_how_often_it_was_started(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    with opened(run):
        assert manifest(run)["status"] == "running"
        assert manifest(run)["starts"] == 1
    with pytest.raises(KeyboardInterrupt), opened(run):
        raise KeyboardInterrupt
    assert (manifest(run)["status"], manifest(run)["starts"]) == ("interrupted", 2)
    with pytest.raises(ZeroDivisionError), opened(run):
        _ = 1 / 0
    assert (manifest(run)["status"], manifest(run)["error"]) == ("failed", "ZeroDivisionError: division by zero")
    created = manifest(run)["created"]
    with opened(run) as last:
        assert manifest(run)["error"] is None
        last.note(status="done")
    assert (manifest(run)["status"], manifest(run)["starts"], manifest(run)["created"]) == ("done", 4, created)
    assert (run / "config.yaml").read_text() == "a: 1\n"
    assert (run / "resolved.yaml").read_text() == "r: 1\n"
    assert manifest(run)["versions"]["torch"]


@pytest.mark.parametrize("error", [LostRankError("gone"), KeyboardInterrupt()], ids=["lost rank", "interrupt"])
def test_the_end_of_a_run_is_recorded_although_a_signal_arrives_meanwhile(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = directory.write_atomically

    def signalled(path: Path, text: str) -> None:
        signal.raise_signal(signal.SIGINT)
        write(path, text)

    with ExitStack() as stack:
        stack.enter_context(pytest.raises(KeyboardInterrupt))
        stack.enter_context(opened(tmp_path))
        monkeypatch.setattr(directory, "write_atomically", signalled)
        raise error
    status = "failed" if isinstance(error, LostRankError) else "interrupted"
    assert manifest(tmp_path)["status"] == status


@pytest.mark.parametrize("left", [None, "log.jsonl", "quarantine.jsonl", "checkpoints/step-000001/model.safetensors"])
def test_a_run_that_failed_before_its_first_step_leaves_no_directory(left: str | None, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(ZeroDivisionError))
        stack.enter_context(opened(run))
        for name in ("tokenizer", "checkpoints"):
            (run / name).mkdir()
        (run / "quarantine.jsonl").touch()
        (run / "ledger.json").write_text("{}")
        if left is not None:
            (run / left).parent.mkdir(exist_ok=True)
            (run / left).write_text("something")
        _ = 1 / 0
    assert run.exists() == (left is not None)
    assert run.parent.exists() == (left is not None)


def test_an_existing_directory_of_a_failed_run_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), opened(tmp_path):
        _ = 1 / 0
    assert manifest(tmp_path)["status"] == "failed"


def trained_run(folder: Path) -> None:
    """Make a finished run of three epochs with a model, a checkpoint and a log."""
    with opened(folder, epochs=3) as run:
        run.log_step({"step": 1})
        for name in ("model", "checkpoints/step-000001"):
            (folder / name).mkdir(parents=True)
        run.note(status="done")


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_finished_run_stays_finished_if_its_next_start_trains_nothing(
    error: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trained_run(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in ("manifest.json", "config.yaml", "resolved.yaml")}

    def start() -> None:
        config = config_of(epochs=9)
        with open_run(tmp_path, config=config, text="a: 2\n", resolved="r: 2\n", origin=tmp_path):
            assert (manifest(tmp_path)["status"], (tmp_path / "config.yaml").read_text()) == ("running", "a: 2\n")
            raise error

    with pytest.raises(error):
        start()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert caplog.messages[-1] == f"the run in {tmp_path} stays finished, as it was"


def test_numbers_of_numpy_and_torch_are_recorded_and_other_values_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.log_step({"step": np.int64(1), "loss": np.float32(0.5)})
        run.report({"loss": torch.tensor(0.25)}, step=1, split="validation")
        run.note(learning_rate=np.float64(0.125))
        for method, record in (
            ("log_step", lambda: run.log_step({"step": 2, "loss": {1}})),
            ("report", lambda: run.report({"loss": {1}}, step=2, split="validation")),  # type: ignore[dict-item]
            ("note", lambda: run.note(learning_rate={1})),
        ):
            with pytest.raises(ConfigError) as caught:
                record()
            assert str(caught.value).startswith(f"trainer.target: run.{method} got {{1}} as ")
    assert read_json_lines(tmp_path / "log.jsonl") == [{"step": 1, "loss": 0.5}]
    assert manifest(tmp_path)["evaluations"] == [{"step": 1, "split": "validation", "loss": 0.25}]
    assert manifest(tmp_path)["learning_rate"] == 0.125


def on_other_data(source: str) -> Config:
    """Return the configuration of `trained_run` with other rows, with which the run may be continued."""
    config = config_of(epochs=3)
    return config.model_copy(update={"data": config.data.model_copy(update={"source": source, "resume": "fresh"})})


@pytest.mark.parametrize("status", ["done", "interrupted"])
def test_results_of_rows_stay_if_the_next_start_trains_nothing(status: str, tmp_path: Path) -> None:
    trained_run(tmp_path)
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "test.jsonl").write_text("results")
    RunDirectory(tmp_path, config=config_of()).note(status=status)
    (tmp_path / EARLIER).mkdir()  # left by a kill
    (tmp_path / EARLIER / "validation.jsonl").write_text("results of an earlier start")

    def start(config: Config) -> None:
        with open_run(tmp_path, config=config, text=None, resolved="", origin=tmp_path):
            (tmp_path / "evaluations").mkdir(exist_ok=True)
            (tmp_path / "evaluations" / "test-base.jsonl").write_text("results of the base model on the other rows")
            raise DataError("tpyo.jsonl does not exist")

    with pytest.raises(DataError):
        start(on_other_data("tpyo.jsonl"))
    assert [path.name for path in (tmp_path / "evaluations").iterdir()] == ["test.jsonl"]
    assert not (tmp_path / EARLIER).exists()


def test_results_of_other_rows_are_removed_once_the_run_is_trained_further(tmp_path: Path) -> None:
    trained_run(tmp_path)
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "test.jsonl").write_text("results")

    def start() -> None:
        with open_run(tmp_path, config=on_other_data("b.jsonl"), text=None, resolved="", origin=tmp_path) as run:
            assert [path.name for path in tmp_path.glob("*evaluations*")] == [EARLIER]
            run.log_step({"step": 2})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start()
    assert manifest(tmp_path)["status"] == "interrupted"
    assert list(tmp_path.glob("*evaluations*")) == []


def test_a_finished_run_stays_as_it_was_if_its_next_start_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_run(tmp_path)
    (tmp_path / "evaluations").mkdir()
    before = (tmp_path / "manifest.json").read_bytes()

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(opening, "git_commit", full)
    with (
        pytest.raises(WriteError, match="No space left on device"),
        open_run(tmp_path, config=on_other_data("b.jsonl"), text=None, resolved="", origin=tmp_path),
    ):
        pass
    assert (tmp_path / "evaluations").is_dir()
    assert (tmp_path / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("status", ["interrupted", "running"])
def test_an_unfinished_run_keeps_its_status_if_wrong_input_ends_the_next_start(
    status: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with opened(tmp_path) as run:
        run.log_step({"step": 1})
        run.note(status=status)
    before = {name: (tmp_path / name).read_bytes() for name in ("manifest.json", "config.yaml", "resolved.yaml")}

    def start(error: Exception) -> None:
        with opened(tmp_path):
            raise error

    with pytest.raises(DataError):
        start(DataError("rows.jsonl does not exist"))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert caplog.messages[-1] == f"the run in {tmp_path} stays unfinished, as it was"
    with pytest.raises(WriteError):
        start(WriteError("no space left"))
    assert manifest(tmp_path)["status"] == "failed"


@pytest.mark.parametrize("changed", ["log.jsonl", "checkpoints/step-000002", "model"])
def test_a_finished_run_that_was_trained_further_is_failed(changed: str, tmp_path: Path) -> None:
    trained_run(tmp_path)

    def start() -> None:
        with opened(tmp_path, epochs=9) as run:
            if changed == "log.jsonl":
                run.log_step({"step": 2})
            elif changed == "model":
                (tmp_path / "model" / "config.json").touch()
            else:
                (tmp_path / changed).mkdir()
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        start()
    assert (manifest(tmp_path)["status"], manifest(tmp_path)["config"]["trainer"]["epochs"]) == ("failed", 9)


def test_a_finished_run_is_not_changed(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.note(status="done")
    before = (tmp_path / "manifest.json").read_bytes()
    with opened(tmp_path) as again:
        assert again.finished
    assert (tmp_path / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "logged"),
    [
        ({"keep_checkpoints": 9}, "trainer.keep_checkpoints: 2 -> 9"),
        ({"memory_budget": "1GB"}, "trainer.memory_budget: null -> 1GB"),
        ({"evaluate_test": False}, "trainer.evaluate_test: true -> false"),
        ({"early_stop": 2}, "trainer.early_stop: 3 -> 2"),
    ],
)
def test_a_finished_run_is_not_changed_by_a_file_that_asks_for_no_more(
    changes: dict[str, Any], logged: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, early_stop=3) as run:
        run.note(status="done", steps=24, stopped_early=True)
    before = {name: (tmp_path / name).read_bytes() for name in ("manifest.json", "config.yaml", "resolved.yaml")}
    caplog.clear()
    config = config_of(early_stop=3).model_dump(mode="json")
    config["trainer"] |= changes
    changed = Config.model_validate(config)
    with (
        caplog.at_level("INFO"),
        open_run(tmp_path, config=changed, text="a: 2\n", resolved="r: 2\n", origin=tmp_path) as again,
    ):
        assert again.finished
    assert caplog.messages == [f"run directory: {tmp_path} (finished)", f"no effect on the finished run: {logged}"]
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 9},
        {"max_steps": 99},
        {"early_stop": 4},
        {"early_stop": 0},
        {"restore_best": False},
        {"evaluate_test": True},
        {"evaluate_base": True},
    ],
    ids=str,
)
def test_a_finished_run_is_opened_again_if_the_file_asks_for_more(changes: dict[str, Any], tmp_path: Path) -> None:
    before = {"early_stop": 3, "evaluate_test": False}
    with opened(tmp_path, **before) as run:
        run.note(status="done", steps=24, stopped_early=True)
    with opened(tmp_path, **before | changes) as again:
        assert not again.finished


def test_early_stop_is_of_no_effect_on_a_run_that_it_has_not_ended(tmp_path: Path) -> None:
    with opened(tmp_path, early_stop=3) as run:
        run.note(status="done", steps=24, stopped_early=False)
    with opened(tmp_path, early_stop=4) as again:
        assert again.finished


def test_a_finished_run_is_opened_again_for_other_data(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.note(status="done", steps=24)
    config = config_of()
    fresh = config.model_copy(update={"data": config.data.model_copy(update={"resume": "fresh"})})
    other = fresh.model_copy(update={"seed": 3})
    for now, stays in ((fresh, True), (other, False)):
        with open_run(tmp_path, config=now, text=None, resolved="", origin=tmp_path) as again:
            assert again.finished == stays


def test_a_file_from_a_dictionary_is_written_as_yaml(tmp_path: Path) -> None:
    config = config_of(epochs=2)
    with open_run(tmp_path, config=config, text=None, resolved="", origin=tmp_path):
        written = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf8"))
    assert Config.model_validate(written) == config


def log_lines(folder: Path) -> list[Any]:
    return read_json_lines(folder / "log.jsonl")


def test_log_lines_after_the_checkpoint_and_a_partial_line_are_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as run:
        run.truncate_log(0)
        assert not (tmp_path / "log.jsonl").exists()
        for step in range(1, 6):
            run.log_step({"step": step, "loss": 1 / step})
        run.report({"loss": 3.0}, step=2, split="validation")
        run.report({"loss": 2.0}, step=4, split="validation")
        with (tmp_path / "log.jsonl").open("a") as file:
            file.write('{"step": 6, "lo')
        run.truncate_log(5)
        assert [line["step"] for line in log_lines(tmp_path)] == [1, 2, 3, 4, 5]
        run.truncate_log(3)
    assert [line["step"] for line in log_lines(tmp_path)] == [1, 2, 3]
    assert manifest(tmp_path)["evaluations"] == [{"step": 2, "split": "validation", "loss": 3.0}]
    assert manifest(tmp_path)["metrics"] == {"validation": {"loss": 2.0}}


def test_only_a_different_run_is_refused_and_every_difference_is_listed(tmp_path: Path) -> None:
    with opened(tmp_path, epochs=1):
        (tmp_path / "checkpoints").mkdir()
    with opened(tmp_path, epochs=5, keep_checkpoints=9, early_stop=2):
        pass
    with pytest.raises(ResumeError) as caught, opened(tmp_path, batch_size=4, learning_rate=0.1):
        pass
    assert str(caught.value) == (
        f"{tmp_path} holds a run of another file:\n"
        "  trainer.batch_size: auto -> 4\n"
        "  trainer.learning_rate: null -> 0.1\n"
        "give this run another folder with --run"
    )
    assert manifest(tmp_path)["config"]["trainer"]["epochs"] == 5


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ({"epochs": 2}, {"epochs": 1}, "has trained 2 epochs, and trainer.epochs is 1"),
        ({"epochs": 2}, {"max_steps": 9}, "has taken 24 steps, and trainer.max_steps is 9"),
        ({"max_steps": 24}, {"max_steps": 10}, "has taken 24 steps, and trainer.max_steps is 10"),
    ],
)
def test_a_finished_run_that_is_asked_for_less_stays_finished(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], change: str
) -> None:
    with opened(tmp_path, **before) as run:
        run.note(status="done", steps=24)
    written = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(ResumeError) as refused, opened(tmp_path, **after):
        pass
    assert str(refused.value) == (
        f"the run in {tmp_path} {change}; raise it, or give this run another folder with --run"
    )
    assert (tmp_path / "manifest.json").read_bytes() == written
    with opened(tmp_path, epochs=3):
        pass


def test_a_run_that_stopped_early_may_be_asked_for_fewer_epochs(tmp_path: Path) -> None:
    with opened(tmp_path, epochs=4) as run:
        run.note(status="done", steps=24, stopped_early=True)
    with opened(tmp_path, epochs=3):
        pass
    assert manifest(tmp_path)["config"]["trainer"]["epochs"] == 3


def test_the_steps_of_all_rounds_of_self_training_are_not_compared_with_the_limit_of_one(tmp_path: Path) -> None:
    with opened(tmp_path, max_steps=8) as run:
        run.note(status="done", steps=24, rounds=[{}, {}, {}])
    with opened(tmp_path, max_steps=8):
        pass


def test_rounds_of_another_file_are_not_continued_although_the_run_has_no_checkpoints_itself(tmp_path: Path) -> None:
    with opened(tmp_path, learning_rate=0.1) as run:
        run.note(rounds=[{"kept": True}])
    with pytest.raises(ResumeError) as refused, opened(tmp_path, learning_rate=0.5):
        pass
    assert str(refused.value) == (
        f"{tmp_path} holds a run of another file:\n  trainer.learning_rate: 0.1 -> 0.5\n"
        "give this run another folder with --run"
    )
    assert manifest(tmp_path)["config"]["trainer"]["learning_rate"] == 0.1
    with opened(tmp_path, learning_rate=0.1) as again:
        assert again.manifest["rounds"] == [{"kept": True}]


def test_added_and_removed_values_are_differences(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"  a\.0: 1 -> null\n  b: null -> 2\n"):
        check_same({"a": [1], "data": {"loader": {"workers": 1}}}, {"a": [], "b": 2}, folder=tmp_path)
    assert leaves({"a": {"b": [1, {"c": 2}], "d": {}}}) == {"a.b.0": 1, "a.b.1.c": 2, "a.d": {}}


def test_a_run_without_a_name_resumes_only_runs_of_the_same_configuration(tmp_path: Path) -> None:
    config = config_of(epochs=3)
    assert choose_folder("run", config=config, origin=tmp_path, base=tmp_path) == ChosenRun(tmp_path / "run")
    with opened(tmp_path / "run", epochs=3):
        pass
    assert choose_folder("run", config=config, origin=tmp_path, base=tmp_path) == ChosenRun(tmp_path / "run"), (
        "started, not done"
    )
    several = config.model_copy(update={"backend": TorchrunBackendConfig(type="torchrun", processes=2)})
    assert choose_folder("run", config=several, origin=tmp_path, base=tmp_path).folder == tmp_path / "run", (
        "other processes"
    )
    assert (
        choose_folder("run", config=config_of(batch_size=4, epochs=3), origin=tmp_path, base=tmp_path).folder
        == tmp_path / "run-2"
    )
    assert find_finished("run", config=config, origin=tmp_path, base=tmp_path) == (None, [])
    for name in ("run", "run-2", "run-3"):
        with opened(tmp_path / name, epochs=9 if name == "run-3" else 3) as run:
            run.note(status="done")
    assert choose_folder("run", config=config, origin=tmp_path, base=tmp_path) == ChosenRun(
        tmp_path / "run-4",
        f"the run in {tmp_path / 'run-3'} is finished; to train it longer on the same rows, raise trainer.epochs and "
        f"add --run {tmp_path / 'run-3'}",
    )
    with opened(tmp_path / "by_steps", max_steps=3) as run:
        run.note(status="done")
    by_steps = choose_folder("by_steps", config=config_of(max_steps=3), origin=tmp_path, base=tmp_path)
    assert by_steps.not_continued is not None
    assert "raise trainer.max_steps and" in by_steps.not_continued
    assert find_finished("run", config=config, origin=tmp_path, base=tmp_path)[0] == tmp_path / "run-2", (
        "the newest run of this configuration"
    )


def test_an_unfinished_run_is_resumed_if_only_changeable_keys_differ(tmp_path: Path) -> None:
    for name, epochs in (("run", 3), ("run-2", 4)):
        with opened(tmp_path / name, epochs=epochs):
            pass
    longer = config_of(epochs=100, keep_checkpoints=5)
    assert choose_folder("run", config=longer, origin=tmp_path, base=tmp_path) == ChosenRun(tmp_path / "run-2"), (
        "the newest"
    )
    same = config_of(epochs=3)
    assert choose_folder("run", config=same, origin=tmp_path, base=tmp_path) == ChosenRun(tmp_path / "run"), (
        "a run with the same configuration first"
    )


def test_runs_of_the_same_file_in_another_folder_are_not_used_unless_that_folder_is_gone(tmp_path: Path) -> None:
    config, here, there = config_of(), tmp_path / "here", tmp_path / "there"
    place: dict[str, Any] = {"config": config, "origin": here, "base": tmp_path / "runs"}
    here.mkdir()
    there.mkdir()

    def run_of_the_other_folder(status: str) -> None:
        with open_run(tmp_path / "runs" / "run", config=config, text="a: 1\n", resolved="r: 1\n", origin=there) as run:
            run.note(status=status)

    run_of_the_other_folder("running")
    assert choose_folder("run", **place) == ChosenRun(tmp_path / "runs" / "run-2")
    assert unfinished_sibling("run", **place, file="run.yaml", used=tmp_path, with_changes=True) is None
    run_of_the_other_folder("done")
    assert choose_folder("run", **place) == ChosenRun(tmp_path / "runs" / "run-2")
    assert find_finished("run", **place) == (None, [f"folder of the configuration: {there} -> {here}"])
    there.rename(tmp_path / "moved")
    assert find_finished("run", **place)[0] == tmp_path / "runs" / "run"


def test_an_unfinished_run_that_is_not_used_is_named_with_the_command_that_continues_it(tmp_path: Path) -> None:
    config, other = config_of(epochs=3), config_of(batch_size=4, epochs=3)

    def note(config: Config, *, used: str, file: str | None = "my.yaml", with_changes: bool = False) -> str | None:
        return unfinished_sibling(
            "run",
            config=config,
            origin=tmp_path,
            base=tmp_path,
            file=file,
            used=tmp_path / used,
            with_changes=with_changes,
        )

    assert note(config, used="run") is None
    with opened(tmp_path / "run", epochs=3) as run:
        pass
    folder = tmp_path / "run"
    unfinished = f"the unfinished run in {folder} is not continued"
    assert note(config, used="run") is None
    assert note(config, used="mine") == f"{unfinished}; to continue it: partita train my.yaml --run {folder}"
    assert note(other, used="mine") is None
    assert note(other, used="run-2", with_changes=True) == (
        f"{unfinished}, because other keys changed: trainer.batch_size: auto -> 4; to continue it, undo that: "
        f"partita train my.yaml --run {folder}"
    )
    assert note(config, used="mine", file=None) == f'{unfinished}; to continue it: train(run="{folder}")'
    many = config_of(batch_size=4, epochs=3, optimizer={"type": "sgd"}, learning_rate=0.1, mixed_precision="bf16")
    many = many.model_copy(update={"adapter": LoraAdapter(type="lora"), "seed": 3})
    changed = note(many, used="run-2", with_changes=True)
    assert changed is not None
    assert changed.partition("changed: ")[2].partition("; to continue")[0].split("; ") == [
        "adapter.type: null -> lora",
        "trainer.optimizer.type: adamw -> sgd",
        "seed: 42 -> 3",
        "trainer.batch_size: auto -> 4",
        "trainer.learning_rate: null -> 0.1",
        "and 1 more",
    ]
    run.note(status="done")
    assert note(config, used="mine") is None


def test_a_folder_with_runs_in_it_is_not_used_for_another_run(tmp_path: Path) -> None:
    with opened(tmp_path / "run" / "fold-1"):
        pass
    assert choose_folder("run", config=config_of(), origin=tmp_path, base=tmp_path) == ChosenRun(tmp_path / "run-2")
    message = f"run holds runs, such as {tmp_path}/run/fold-1; name another folder, such as --run {tmp_path}/run/NAME"
    with pytest.raises(ResumeError) as refused, opened(tmp_path / "run"):
        pass
    assert str(refused.value).endswith(message)
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name != ".lock"] == ["fold-1"]


DAMAGED = {
    "[]": "is not a JSON object; restore it, or start a new run",
    '{"format_version": 2, "status": "done"}': "was written by a newer partita (format 2); update partita to read it",
}


@pytest.mark.parametrize(("text", "reason"), DAMAGED.items(), ids=["damaged", "newer"])
@pytest.mark.parametrize("damaged", ["run", "run/fold-2"])
def test_a_run_whose_manifest_cannot_be_read_is_passed_over(
    damaged: str, text: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / damaged).mkdir(parents=True)
    (tmp_path / damaged / "manifest.json").write_text(text, encoding="utf8")
    config = config_of()
    if damaged != "run":
        split = KFoldSplit(type="kfold", folds=2)
        config = config.model_copy(update={"data": config.data.model_copy(update={"split": split})})
    place: dict[str, Any] = {"config": config, "origin": tmp_path, "base": tmp_path}
    note = unfinished_sibling("run", **place, file="run.yaml", used=tmp_path / "mine", with_changes=True)
    assert (note, caplog.messages) == (None, []), "a run that is named does not depend on it"
    assert choose_folder("run", **place) == ChosenRun(tmp_path / "run-2")
    assert caplog.messages == [
        f"the run in {tmp_path / 'run'} is not used: {tmp_path / damaged / 'manifest.json'} {reason}"
    ]


def test_a_finished_run_is_used_only_if_none_that_cannot_be_read_is_newer(tmp_path: Path) -> None:
    place: dict[str, Any] = {"config": config_of(), "origin": tmp_path, "base": tmp_path}
    for name in ("run", "run-2", "run-3"):
        with opened(tmp_path / name) as run:
            run.note(status="done")
    (tmp_path / "run" / "manifest.json").write_text("{torn", encoding="utf8")
    assert find_finished("run", **place) == (tmp_path / "run-3", [])
    (tmp_path / "run-3" / "manifest.json").write_text("{torn", encoding="utf8")
    with pytest.raises(PartitaError, match=r"run-3/manifest\.json is not JSON .*; restore it, or start a new run$"):
        find_finished("run", **place)


def test_commands_that_continue_a_run_are_quoted_for_a_shell(tmp_path: Path) -> None:
    with opened(tmp_path / "my run"):
        pass
    note = unfinished_sibling(
        "my run", config=config_of(), origin=tmp_path, base=tmp_path, file="my.yaml", used=tmp_path / "b"
    )
    assert str(note).endswith(f"to continue it: partita train my.yaml --run '{tmp_path}/my run'")


def test_the_first_log_line_has_the_directory_and_how_the_run_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    with caplog.at_level("INFO"):
        with opened(run):
            pass
        with opened(run):
            (run / "checkpoints" / "step-000001").mkdir(parents=True)
        with opened(run) as directory:
            directory.note(status="done")
        with opened(run):
            pass
    assert caplog.messages == [
        f"run directory: {run} (new)",
        f"run directory: {run} (started again: it has no checkpoint yet)",
        f"run directory: {run} (continued)",
        f"run directory: {run} (finished)",
    ]


def test_keys_that_do_not_affect_training_do_not_change_the_run(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as run:
        pass
    world = EnvironmentWorldConfig(type="environment", environment="guest:Guest")
    asking = config_of().model_copy(update={"simulation": Simulation(world=world, tasks=Tasks(count=3))})
    assert choose_folder("run", config=asking, origin=tmp_path, base=tmp_path).folder == tmp_path / "run"
    check_same(run.manifest["config"], asking.model_dump(mode="json"), folder=tmp_path)
    run.note(status="done")
    assert find_finished("run", config=asking, origin=tmp_path, base=tmp_path)[0] == tmp_path / "run"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"format_version": 2, "status": "done"}',
            "was written by a newer partita (format 2); update partita to read it",
        ),
        ("{torn", "is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); restore"),
        ("[]", "is not a JSON object; restore it, or start a new run"),
        ("[" * 100_000, "is not JSON (nested too deeply); restore it, or start a new run"),
        (
            '{"format_version": 1, "status": "done", "checksum": "00"}',
            "is not as it was written (its checksum differs); restore it, start a new run, or remove its key checksum",
        ),
        (
            '{"status": "finished"}',
            'is not a partita manifest: format_version: ["Missing data for required field."]; status: ["Must',
        ),
    ],
)
def test_a_manifest_that_cannot_be_read_is_reported(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text, encoding="utf8")
    with pytest.raises(PartitaError) as caught:
        read_manifest(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'manifest.json'} {message}")


def test_keys_of_later_versions_stay_in_the_manifest(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(sealed(manifest(tmp_path) | {"added_later": {"x": [1]}})), encoding="utf8")
    with opened(tmp_path):
        pass
    assert manifest(tmp_path)["added_later"] == {"x": [1]}


def test_a_value_that_cannot_be_written_does_not_stay_in_the_manifest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="many"), opened(tmp_path) as run:
        run.note(steps="many")
    assert manifest(tmp_path)["status"] == "failed"
    assert "many" in manifest(tmp_path)["error"]


@pytest.mark.parametrize("record", [{"loss": 0.5}, {"step": None}, {"step": "three"}], ids=str)
def test_a_logged_record_without_a_step_is_a_mistake_of_the_trainer(record: dict[str, Any], tmp_path: Path) -> None:
    message = (
        f"trainer.target: run.log_step got a record without a whole number as step: {record}; "
        'write one, such as {"step": 1, "loss": 0.5}'
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"), opened(tmp_path / "r") as run:
        run.log_step(record)
    assert not (tmp_path / "r" / "log.jsonl").exists()


def test_nan_and_infinity_are_written_as_null(tmp_path: Path) -> None:
    value = {"a": [float("nan"), (float("inf"), 1.5)], "b": {"c": -float("inf")}, "d": "NaN", "e": True}
    assert json.loads(strict_json(value)) == {"a": [None, [None, 1.5]], "b": {"c": None}, "d": "NaN", "e": True}
    with opened(tmp_path) as run:
        run.log_step({"step": 1, "loss": float("nan")})
        run.report({"mae": float("inf")}, step=1, split="test")
    assert log_lines(tmp_path) == [{"step": 1, "loss": None}]
    assert manifest(tmp_path)["metrics"] == {"test": {"mae": None}}
    with opened(tmp_path) as again:
        assert again.manifest["metrics"] == {"test": {"mae": None}}, "such a run is resumed"


def test_a_folder_that_cannot_be_created_is_reported() -> None:
    with (
        pytest.raises(
            WriteError, match=r"^the folder /proc/x cannot be created: No such file or directory; name another"
        ),
        opened(Path("/proc/x")),
    ):
        pass


def test_a_folder_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = rf"the folder {tmp_path}/file cannot be created: File exists; name another one"
    with pytest.raises(WriteError, match=message), opened(tmp_path / "file"):
        pass
    with (
        pytest.raises(WriteError, match="cannot be created: Not a directory; name another one"),
        opened(tmp_path / "file/run"),
    ):
        pass


def test_unreadable_files_elsewhere_are_not_reported_as_errors_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match=r"rows\.csv"), opened(tmp_path / "run"):
        raise PermissionError(13, "Permission denied", "/elsewhere/rows.csv")
    with pytest.raises(WriteError, match="No space left on device"), opened(tmp_path / "run"):
        raise OSError(28, "No space left on device")


def test_changes_since_the_run_started_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, epochs=3):
        (tmp_path / "checkpoints").mkdir()
    with caplog.at_level("INFO"), opened(tmp_path, epochs=5):
        pass
    assert caplog.messages[1:] == ["changed since the run began: trainer.epochs: 3 -> 5"]


def finished_run(folder: Path, *, checkpoint: bool) -> Path:
    with opened(folder) as run, summed(folder / "model"):
        (folder / "model" / "weights").write_text("right")
        run.note(status="done", model="model")
    if checkpoint:
        (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "model" / "weights").write_text("wrong")
    return folder / "model"


def test_a_finished_run_with_a_damaged_result_resumes_from_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = finished_run(tmp_path, checkpoint=True)
    with opened(tmp_path) as run:
        assert not run.finished
    assert not model.exists()
    assert (tmp_path / "damaged-model" / "weights").read_text() == "wrong"
    assert f"{model / 'weights'} is not as it was written (its checksum differs); it is kept as" in caplog.text


def test_a_finished_run_with_a_damaged_result_and_no_checkpoint_is_refused_and_unchanged(tmp_path: Path) -> None:
    model = finished_run(tmp_path, checkpoint=False)
    with (
        pytest.raises(ResumeError, match="and the run has no checkpoint to write it from; restore it"),
        opened(tmp_path),
    ):
        pass
    assert (model / "weights").read_text() == "wrong"
    assert manifest(tmp_path)["status"] == "done"


def test_damaged_log_lines_are_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as run:
        for step in (1, 2, 3, 4):
            run.log_step({"step": step})
        path = tmp_path / "log.jsonl"
        path.write_bytes(path.read_bytes().replace(b'{"step": 2}', b'{"stfp": 2}') + b'{"st')
        run.truncate_log(3)
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'
    assert f"{path}: 1 damaged line left out" in caplog.text
