"""Tests of simulations: results independent of the batch, resuming after a kill, and metrics."""

import json
import random
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from partita import ConfigError, DataError, Model, ModelError, PartitaError, ResumeError
from partita.data.episode import Episode, from_line
from partita.lm.decoding.row import NOT_NUMBERS
from partita.lm.huggingface import HuggingFaceModel
from partita.simulation.report import SimulationReport, outcomes_of

from ...forks import COMMAND, Forks
from ...json_lines import read_json_lines, write_json_lines
from ...properties import ends
from .talks import file_of, random_messages, save_model
from .test_environment_server import lives

WORLDS = Path(__file__).with_name("worlds_of_tests.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, dialogues to replay, and environments."""
    folder = tmp_path_factory.mktemp("simulation")
    shutil.copy(WORLDS, folder / "worlds_of_tests.py")
    rng = random.Random(0)
    write_json_lines(folder / "rows.jsonl", [{"messages": random_messages(rng, 6)} for _ in range(30)])
    save_model(settings(folder), folder)
    return folder


def settings(folder: Path, **simulation: Any) -> dict[str, Any]:
    """Return a configuration; `simulation` overrides keys of its simulation section."""
    world = {"type": "environment", "environment": "worlds_of_tests:Echo"}
    return file_of(folder, **{"world": world, "tasks": {"count": 60}, **simulation})


def simulated(folder: Path, output: Path, *, batch_size: int | None = None, **simulation: Any) -> Any:
    """Run a simulation that writes transcripts into `output`; return its report."""
    (folder / "run.yaml").write_text(json.dumps(settings(folder, **simulation)), encoding="utf8")
    return Model(folder / "run.yaml", quiet=True).simulate(output, batch_size=batch_size)


def transcripts(output: Path, history: str = "predicted") -> list[dict[str, Any]]:
    return read_json_lines(output / f"{history}.jsonl")


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the transcripts and the report of sampled dialogues, with batch size 8."""
    output = tmp_path_factory.mktemp("straight")
    return output, simulated(folder, output)


@pytest.mark.parametrize("batch_size", ends([1, 7, 64]))
def test_dialogues_do_not_depend_on_the_batch_size(
    folder: Path, straight: tuple[Path, Any], tmp_path: Path, batch_size: int
) -> None:
    report = simulated(folder, tmp_path, batch_size=batch_size)

    assert (tmp_path / "predicted.jsonl").read_bytes() == (straight[0] / "predicted.jsonl").read_bytes()
    assert report.histories == straight[1].histories


@pytest.mark.parametrize("seed", [1, 2])
def test_dialogues_do_not_depend_on_the_order_of_their_start(
    folder: Path, straight: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    started: list[str] = []

    def shuffled(dialogues: list[Episode], section: Any) -> list[Episode]:
        result = random.Random(seed).sample(dialogues, len(dialogues))
        started.extend(dialogue.key for dialogue in result)
        return result

    monkeypatch.setattr("partita.simulation.run.start_order", shuffled)
    simulated(folder, tmp_path, batch_size=7)

    assert started != [line["dialogue"] for line in transcripts(tmp_path)]
    assert (tmp_path / "predicted.jsonl").read_bytes() == (straight[0] / "predicted.jsonl").read_bytes()


def test_each_task_has_one_dialogue(straight: tuple[Path, Any]) -> None:
    lines = transcripts(straight[0])

    assert [line["dialogue"] for line in lines] == [f"task-{number}" for number in range(60)]
    assert len({line["seed"] for line in lines}) == 60
    assert len({json.dumps(line["messages"]) for line in lines}) == 60
    assert {line["status"] for line in lines} == {"done"}
    turns = [sum("tokens" in message for message in line["messages"]) for line in lines]
    assert set(turns) == {2, 3, 4}
    outcomes = straight[1].histories["predicted"]
    assert outcomes.dialogues == 60
    assert outcomes.statuses == {"done": 60}
    assert outcomes.turns == sum(turns) / 60
    assert outcomes.means["reward"].mean == sum(line["reward"] for line in lines) / 60
    assert outcomes.means["length"].n == 60


def test_a_failed_dialogue_does_not_affect_the_others(folder: Path, straight: tuple[Path, Any], tmp_path: Path) -> None:
    world = {"type": "environment", "environment": "worlds_of_tests:Echo", "options": {"misbehaves": True}}
    report = simulated(folder, tmp_path, world=world, limits={"step_seconds": 3.0})

    before, after = transcripts(straight[0]), transcripts(tmp_path)
    bad = {
        3: "environment: OSError: the desk is closed (worlds_of_tests.py, line 41)",
        43: "environment: step gave 'what?'; give (messages, reward, terminated, truncated, info)",
        23: "timeout: no answer within 3 s (limits.step_seconds)",
    }
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        if number not in bad:
            assert one == other
            continue
        assert (other["status"], other["reason"], other["reward"]) == ("failed", bad[number], None)
    outcomes = report.histories["predicted"]
    assert outcomes.statuses == {"done": 57, "failed: environment": 2, "failed: timeout": 1}
    reward = outcomes.means["reward"]
    assert (reward.n, reward.n_with_failures) == (57, 60)
    assert reward.with_failures == pytest.approx(reward.mean * 57 / 60)


@pytest.mark.long
def test_environment_processes_that_die_or_hang_do_not_affect_other_dialogues(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    world = {
        "type": "environment",
        "environment": "worlds_of_tests:Deadly",
        "options": {"misbehaves": True, "pids": str(tmp_path / "pids")},
    }
    tasks = {"count": 160}
    simulated(folder, tmp_path / "threads", tasks=tasks)
    simulated(
        folder, tmp_path / "own", tasks=tasks, world=world | {"isolation": "process"}, limits={"step_seconds": 5.0}
    )

    before, after = transcripts(tmp_path / "threads"), transcripts(tmp_path / "own")
    bad = {
        3: "environment: OSError: the desk is closed (worlds_of_tests.py, line 41)",
        23: "timeout: no answer within 5 s (limits.step_seconds)",
        43: "environment: step gave 'what?'; give (messages, reward, terminated, truncated, info)",
        63: "environment: its process ended with exit code 3",
        83: "environment: its process was ended by SIGSEGV",
        103: "environment: SystemExit: 4 (worlds_of_tests.py, line 144)",
        123: "timeout: no answer within 5 s (limits.step_seconds)",
    }
    assert [line for line in before if int(line["task"][5:]) not in bad] == [
        line for line in after if int(line["task"][5:]) not in bad
    ], "an environment that hangs when closed has already ended its dialogue"
    assert {number: after[number]["reason"] for number in bad} == bad
    processes = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert len(processes) == 162, "one for the check, one per dialogue, and one started by a dialogue"
    assert not any(map(lives, processes))


def test_dialogues_do_not_depend_on_the_process_of_environments(
    folder: Path, straight: tuple[Path, Any], tmp_path: Path
) -> None:
    shutil.copytree(straight[0], tmp_path / "begun")
    (tmp_path / "begun" / "predicted.jsonl").unlink()
    growing = tmp_path / "begun" / ".predicted.jsonl"
    growing.write_bytes(b"".join(growing.read_bytes().splitlines(keepends=True)[:31]))
    world = {"type": "environment", "environment": "worlds_of_tests:Echo", "isolation": "process"}
    simulated(folder, tmp_path / "begun", world=world)

    assert (tmp_path / "begun" / "predicted.jsonl").read_bytes() == (straight[0] / "predicted.jsonl").read_bytes()


def test_an_environment_that_hangs_when_it_closes_blocks_nothing(
    folder: Path, straight: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = {"type": "environment", "environment": "worlds_of_tests:Clinging"}
    simulated(folder, tmp_path, world=world, limits={"step_seconds": 2.0})

    assert (tmp_path / "predicted.jsonl").read_bytes() == (straight[0] / "predicted.jsonl").read_bytes()
    assert "60 environments have not closed within 2 s (limits.step_seconds)" in caplog.text


@pytest.mark.parametrize(
    ("name", "isolation"), [("Unclosable", "thread"), ("Stuck", "thread"), ("Unclosable", "process")]
)
def test_an_environment_needs_no_close_and_its_own_error_is_the_reason(
    folder: Path, tmp_path: Path, name: str, isolation: str
) -> None:
    world = {"type": "environment", "environment": f"worlds_of_tests:{name}", "isolation": isolation}
    simulated(folder, tmp_path, world=world, tasks={"count": 4})

    assert [(line["status"], line["reason"]) for line in transcripts(tmp_path)] == [
        ("done", None),
        ("failed", "environment: OSError: the desk is closed (worlds_of_tests.py, line 71)"),
        ("failed", "environment: CancelledError: the call was cancelled (worlds_of_tests.py, line 76)"),
        ("failed", "environment: KeyboardInterrupt (worlds_of_tests.py, line 78)"),
    ]


def test_rewards_that_add_up_to_1_are_a_success(folder: Path, tmp_path: Path) -> None:
    world = {"type": "environment", "environment": "worlds_of_tests:Generous"}
    report = simulated(folder, tmp_path, world=world, tasks={"count": 1}, max_dialogue_tokens=96, max_turns=10)

    assert transcripts(tmp_path)[0]["reward"] == sum([0.1] * 10) != 1
    assert report.histories["predicted"].means["success"].mean == 1.0
    almost = Episode("a", "a", {}, 1, reward=0.9999, status="done")
    assert almost.succeeded is False


def test_answers_that_were_cut_are_counted_also_when_resumed(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        caplog.clear()
        simulated(folder, tmp_path, tasks={"count": 10})
        lines = transcripts(tmp_path)
        answers = [len(message["tokens"]) for line in lines for message in line["messages"] if "tokens" in message]
        assert 0 < answers.count(5) < len(answers)
        assert [len(line["messages"][index]["tokens"]) for line in lines for index in line.get("cut", ())] == (
            [5] * answers.count(5)
        )
        warned = f"{answers.count(5)} of {len(answers)} answers ended at the limit of 5 tokens"
        assert f"predicted history: {warned} (generation.max_new_tokens)" in caplog.messages


def test_too_many_failures_end_a_simulation_with_the_reason(folder: Path, tmp_path: Path) -> None:
    world = {"type": "environment", "environment": "worlds_of_tests:Echo", "options": {"misbehaves": True}}
    limits = {"step_seconds": 3.0, "fail_fraction": 0.01}

    with pytest.raises(PartitaError, match=r"dialogues failed, more than limits.fail_fraction: 0.01 allows; the last"):
        simulated(folder, tmp_path, world=world, limits=limits)
    kept = (tmp_path / ".predicted.jsonl").read_bytes().count(b"\n") - 1
    assert kept >= 20
    again = simulated(folder, tmp_path, world=world, limits={"step_seconds": 3.0})
    assert again.histories["predicted"].dialogues == 60


def test_an_answer_that_fails_in_a_static_batch_fails_only_its_dialogue(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = HuggingFaceModel.generate

    def fails_once(self: HuggingFaceModel, requests: Any, options: Any, *, seed: int) -> Any:
        if any(request.key.startswith(b"task-2\0") for request in requests):
            raise ModelError(NOT_NUMBERS)
        return generate(self, requests, options, seed=seed)

    monkeypatch.setattr(HuggingFaceModel, "generate", fails_once)
    limits = {"fail_fraction": 1.0}
    file = settings(folder, tasks={"count": 4}, limits=limits)
    file["generation"]["slots"] = False
    (folder / "run.yaml").write_text(json.dumps(file), encoding="utf8")
    Model(folder / "run.yaml", quiet=True).simulate(tmp_path, batch_size=4)

    reasons = {line["dialogue"]: line["reason"] for line in transcripts(tmp_path)}
    assert reasons.pop("task-2") == "model: ModelError: the model's scores are NaN"
    assert reasons == dict.fromkeys(("task-0", "task-1", "task-3"))


FLAKY = """
from pathlib import Path
class Flaky:
    def reset(self, *, seed, task):
        if task["number"] % 2 and Path(__file__).with_name("down").exists():
            raise OSError("the network is down")
        return "say more", {}
    def step(self, action):
        return "", 1.0, True, False, {}
"""


@pytest.mark.parametrize("count", [40, 20])  # of 20, all have ended when the simulation stops
def test_failed_dialogues_are_run_again_when_a_simulation_is_resumed(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    (folder / "flaky.py").write_text(FLAKY, encoding="utf8")
    (folder / "down").touch()
    world = {"type": "environment", "environment": "flaky:Flaky"}
    changes: dict[str, Any] = {"world": world, "tasks": {"count": count}}
    with pytest.raises(PartitaError, match="the same command runs the others and the failed ones"):
        simulated(folder, tmp_path, **changes)
    (folder / "down").unlink()
    caplog.set_level("INFO")
    again = simulated(folder, tmp_path, **changes)
    assert again.histories["predicted"].statuses == {"done": count}
    assert [line["status"] for line in transcripts(tmp_path)] == ["done"] * count
    assert any(
        re.search(rf"of {count} dialogues already finished; \d+ failed ones run again", text)
        for text in caplog.messages
    )


KILLED = """
import sys
from partita import Model
Model("run.yaml", quiet=True).simulate(sys.argv[1])
"""


def test_an_interrupt_of_the_user_ends_a_simulation_with_its_dialogues_saved(
    folder: Path, tmp_path: Path, forks: Forks
) -> None:
    world = {"type": "environment", "environment": "worlds_of_tests:Echo", "options": {"pause": 0.1}}
    (folder / "run.yaml").write_text(json.dumps(settings(folder, world=world, tasks={"count": 600})), encoding="utf8")
    process = forks.start(COMMAND, "partita", "simulate", "run.yaml", "--output", tmp_path, folder=folder)
    growing, end = tmp_path / ".predicted.jsonl", time.monotonic() + 60
    while (growing.read_bytes().count(b"\n") if growing.exists() else 0) < 3 and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)

    assert process.wait() == 130
    assert "of 600 dialogues saved" in process.communicate()[1]
    lines = read_json_lines(growing)[1:]
    assert 2 <= len(lines) < 600
    assert {line["status"] for line in lines} == {"done"}


@pytest.mark.long
def test_a_killed_simulation_resumes(folder: Path, straight: tuple[Path, Any], tmp_path: Path, forks: Forks) -> None:
    (folder / "run.yaml").write_text(json.dumps(settings(folder)), encoding="utf8")
    growing, rng = tmp_path / ".predicted.jsonl", random.Random()
    for wanted in (5, 25, 45):
        program = forks.start(KILLED, "simulate", tmp_path, folder=folder)
        end = time.monotonic() + 60
        while (growing.read_bytes().count(b"\n") if growing.exists() else 0) < wanted and program.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        program.send_signal(signal.SIGKILL)
        program.wait()
    had = growing.read_bytes().count(b"\n") - 1
    assert had > 0
    assert not forks.run(KILLED, "simulate", tmp_path, folder=folder).returncode

    assert (tmp_path / "predicted.jsonl").read_bytes() == (straight[0] / "predicted.jsonl").read_bytes()
    keys = [json.loads(line)["dialogue"] for line in growing.read_text("utf8").splitlines()[1:]]
    assert len(keys) == len(set(keys)) == 60, "no dialogue runs twice"


def test_a_simulation_is_not_resumed_with_another_configuration(folder: Path, straight: tuple[Path, Any]) -> None:
    (folder / "other.yaml").write_text(json.dumps(settings(folder) | {"seed": 7}), encoding="utf8")

    with pytest.raises(ResumeError) as caught:
        Model(folder / "other.yaml", quiet=True).simulate(straight[0])
    assert str(caught.value) == (
        f"{straight[0]} holds dialogues with other settings:\n"
        f"  simulation.seed: {settings(folder).get('seed', 42)} -> 7\n"
        "write --fresh to start again, or --output for another folder"
    )


def test_replayed_dialogues_show_correct_answers_or_those_of_the_model(folder: Path, tmp_path: Path) -> None:
    report = simulated(
        folder,
        tmp_path,
        world={"type": "replay"},
        tasks={"source": "rows.jsonl"},
        history=["gold", "predicted"],
        max_turns=2,
    )
    gold, own = transcripts(tmp_path, "gold"), transcripts(tmp_path)

    assert len(gold) == len(own) == 30
    first = [line["messages"][1]["content"] for line in gold]
    assert first == [line["messages"][1]["content"] for line in own], "there are no earlier messages"
    assert any(message["content"] != message["gold"] for line in gold for message in line["messages"][1:2])
    second = [[line["messages"][3]["content"] for line in lines] for lines in (gold, own)]
    assert second[0] != second[1]
    assert {line["status"] for line in gold} == {"truncated"}
    assert set(report.histories["gold"].by_turn) == {1, 2}
    assert report.histories["gold"].by_turn[1] == report.histories["predicted"].by_turn[1]


def test_any_of_several_right_answers_of_a_replayed_dialogue_is_right(folder: Path, tmp_path: Path) -> None:
    world = {"world": {"type": "replay"}, "tasks": {"source": str(tmp_path / "rows.jsonl")}, "history": ["gold"]}
    rows = read_json_lines(folder / "rows.jsonl")[:8]
    write_json_lines(tmp_path / "rows.jsonl", rows)
    simulated(folder, tmp_path / "one", **world)
    first = transcripts(tmp_path / "one", "gold")
    for row, line in list(zip(rows, first, strict=True))[:4]:
        for message, said in zip(row["messages"], line["messages"], strict=True):
            if message["role"] == "assistant":
                message["labels"] = [message["content"], "other", said["content"]]
    write_json_lines(tmp_path / "rows.jsonl", rows)

    report = simulated(folder, tmp_path / "several", **world)

    second = transcripts(tmp_path / "several", "gold")
    assert [[message["content"] for message in line["messages"]] for line in first] == [
        [message["content"] for message in line["messages"]] for line in second
    ], "the first answer is shown"
    assert all(one["other_golds"][0] == "other" for line in second[:4] for one in line["messages"] if "gold" in one)
    assert not any("other_golds" in message for line in second[4:] for message in line["messages"])
    assert [from_line(line).succeeded for line in second] == [True] * 4 + [False] * 4
    assert report.histories["gold"].means["exact_turns"].mean == 0.5
    assert report.histories["gold"].means["success"].mean == 0.5


def test_a_rejected_answer_keeps_its_right_answers_for_the_next_one(folder: Path, tmp_path: Path) -> None:
    [row, *_] = read_json_lines(folder / "rows.jsonl")
    row["messages"][-1]["labels"] = [row["messages"][-1]["content"], "other"]
    write_json_lines(tmp_path / "rows.jsonl", [row])
    checker = {"type": "exact", "rounds": 1, "options": {"feedback": "no"}}
    tasks = {"source": str(tmp_path / "rows.jsonl")}
    simulated(folder, tmp_path / "run", checker=checker, world={"type": "replay"}, tasks=tasks)

    [line] = transcripts(tmp_path / "run")
    rejected, _, again = line["messages"][-3:]
    assert rejected["gold"] == again["gold"] == row["messages"][-1]["content"]
    assert rejected["other_golds"] == again["other_golds"] == ["other"]


def test_a_checker_can_continue_a_dialogue_with_feedback(folder: Path, tmp_path: Path) -> None:
    checker = {"type": "worlds_of_tests:Short", "rounds": 2}
    report = simulated(folder, tmp_path, checker=checker)
    lines = transcripts(tmp_path)

    assert {line["rounds"] for line in lines} == {0, 1, 2}
    for line in lines:
        last = line["messages"][-1]
        assert line["ok"] == (len(last["content"]) % 2 == 0)
        assert line["target"] == "two"
        assert sum(message["content"] == "once more" for message in line["messages"]) == line["rounds"]
        assert line["ok"] or line["rounds"] == 2
    outcomes = report.histories["predicted"]
    assert outcomes.means["success"].mean == sum(line["ok"] for line in lines) / 60


def test_built_in_checkers_are_found_by_name(folder: Path, tmp_path: Path) -> None:
    checker = {"type": "exact", "rounds": 1, "options": {"feedback": "no"}}
    report = simulated(folder, tmp_path, checker=checker, world={"type": "replay"}, tasks={"source": "rows.jsonl"})
    rows = read_json_lines(folder / "rows.jsonl")

    for line, row in zip(transcripts(tmp_path), rows, strict=True):
        right, last = row["messages"][-1]["content"], line["messages"][-1]
        assert line["target"] == last["gold"] == right
        assert line["ok"] == (last["content"].strip() == right)
        assert line["rounds"] == (line["messages"][-2]["content"] == "no")
    success = report.histories["predicted"].means["success"]
    assert (success.mean, success.n) == (0.0, 30), "an untrained model"


def test_a_gold_dialogue_continues_after_a_check_without_a_right_answer(folder: Path, tmp_path: Path) -> None:
    checker = {"type": "regex", "rounds": 1, "options": {"pattern": "^never$", "feedback": "no"}}
    world = {"type": "environment", "environment": "worlds_of_tests:Repeat"}
    simulated(folder, tmp_path, checker=checker, world=world, tasks={"count": 3}, history=["gold"])

    for line in transcripts(tmp_path, "gold"):
        rejected, feedback, again = line["messages"][-3:]
        assert (line["status"], line["rounds"], feedback["content"]) == ("done", 1, "no")
        assert rejected["gold"] == again["gold"]


def test_repeats_have_different_seeds_and_give_pass_rates(folder: Path, tmp_path: Path) -> None:
    checker = {"type": "worlds_of_tests:Short"}
    report = simulated(folder, tmp_path, checker=checker, tasks={"count": 20}, repeats=3)
    lines = transcripts(tmp_path)

    assert [line["dialogue"] for line in lines[:3]] == ["task-0#1", "task-0#2", "task-0#3"]
    oks = [[line["ok"] for line in lines[3 * task : 3 * task + 3]] for task in range(20)]
    outcomes = report.histories["predicted"]
    assert outcomes.pass_at_k == sum(map(any, oks)) / 20
    assert outcomes.pass_hat_k == sum(map(all, oks)) / 20
    assert 0 < outcomes.pass_hat_k < outcomes.pass_at_k < 1


def test_dialogues_that_are_too_long_are_truncated(folder: Path, tmp_path: Path) -> None:
    world = {"type": "environment", "environment": "worlds_of_tests:Endless"}
    simulated(folder, tmp_path / "turns", world=world, tasks={"count": 10}, max_turns=3)
    simulated(folder, tmp_path / "tokens", world=world, tasks={"count": 10}, max_dialogue_tokens=24)

    assert {(line["status"], line["reason"]) for line in transcripts(tmp_path / "turns")} == {("truncated", "turns")}
    lines = transcripts(tmp_path / "tokens")
    assert {(line["status"], line["reason"]) for line in lines} == {("truncated", "tokens")}
    assert all(any("tokens" in message for message in line["messages"]) for line in lines)


def test_answers_of_the_model_are_not_tokenized_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from partita.simulation.turns import TurnEncoder

    prompts: dict[str, list[list[int]]] = {}
    encode = TurnEncoder.encode

    def watched(self: TurnEncoder, dialogue: Any, before: Any, **options: Any) -> Any:
        result = encode(self, dialogue, before, **options)
        prompts.setdefault(dialogue.key, []).append(result.input_ids)
        return result

    monkeypatch.setattr(TurnEncoder, "encode", watched)
    simulated(folder, tmp_path, tasks={"count": 20})

    for line in transcripts(tmp_path):
        replies = [message["tokens"] for message in line["messages"] if "tokens" in message]
        shown = prompts[line["dialogue"]]
        assert len(shown) == len(replies)
        for before, reply, after in zip(shown, replies, shown[1:], strict=False):
            assert after[: len(before) + len(reply)] == before + reply


def test_greedy_answers_equal_those_of_predict(folder: Path, tmp_path: Path) -> None:
    changed = settings(folder, world={"type": "replay"}, tasks={"source": "rows.jsonl"}, history="gold", max_turns=1)
    changed["generation"] = {"max_new_tokens": 5}
    (folder / "greedy.yaml").write_text(json.dumps(changed), encoding="utf8")
    model = Model(folder / "greedy.yaml", quiet=True)
    model.simulate(tmp_path)
    lines = transcripts(tmp_path, "gold")

    results = [row["answer_raw"] for row in model.predict([{"messages": line["messages"][:1]} for line in lines])]
    assert results == [line["messages"][1]["content"] for line in lines]


def test_tasks_with_tool_calls_are_refused_by_their_row(folder: Path, tmp_path: Path) -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    (folder / "called.jsonl").write_text(json.dumps({"messages": said}), encoding="utf8")

    with pytest.raises(DataError) as error:
        simulated(folder, tmp_path, world={"type": "replay"}, tasks={"source": "called.jsonl"})

    assert str(error.value) == (
        "tasks: called.jsonl:1: tools, tool calls and reasoning are not read in a simulation; write data.dialogue: "
        "{ignore_keys: [tools, tool_calls, reasoning_content]}"
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"world": {"type": "environment", "environment": "worlds_of_tests:Nobody"}}, "simulation.world.environment: "),
        (
            {"world": {"type": "environment", "environment": "worlds_of_tests:Echo", "options": {"size": 3}}},
            "simulation.world.options: Echo cannot be created with {'size': 3}: TypeError: ",
        ),
        (
            {
                "world": {
                    "type": "environment",
                    "environment": "worlds_of_tests:Echo",
                    "options": {"size": 3},
                    "isolation": "process",
                }
            },
            "simulation.world.options: Echo cannot be created with {'size': 3}: TypeError: ",
        ),
        (
            {"checker": {"type": "regex", "options": {"pattern": "("}}},
            "simulation.checker.options: Regex cannot be created with {'pattern': '('}: ",
        ),
        ({"checker": {"type": "exakt"}}, "simulation.checker.type: no checker is named exakt; did you mean exact?"),
        ({"max_dialogue_tokens": 5}, "simulation.max_dialogue_tokens: 5 tokens leave no room for a prompt and an "),
        ({"world": {"type": "replay"}, "tasks": {}}, "simulation.tasks: replay needs dialogues; write tasks: {source"),
    ],
)
def test_impossible_simulations_are_reported(folder: Path, tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        simulated(folder, tmp_path, **changes)
    assert str(error.value).startswith(text), str(error.value)


def test_a_missing_simulation_section_is_reported_with_what_to_write(folder: Path) -> None:
    changed = settings(folder)
    del changed["simulation"]
    with pytest.raises(
        ConfigError, match=r"simulation: the file does not describe a simulation; write simulation: \{world"
    ):
        Model(changed, quiet=True).simulate()


def test_failures_are_excluded_or_count_as_0() -> None:
    good, bad = Episode("a", "a", {}, 1, reward=0.5, status="done"), Episode("b", "b", {}, 1, reward=0.7)
    bad.end("failed", "environment: OSError: no")
    outcomes = outcomes_of([good, bad], repeats=1)

    assert bad.reward is None
    assert (outcomes.means["reward"].mean, outcomes.means["reward"].with_failures) == (0.5, 0.25)
    assert outcomes.statuses == {"done": 1, "failed: environment": 1}
    assert outcomes.failed == 1
    assert not SimulationReport(
        {"gold": outcomes, "predicted": replace(outcomes, statuses={"failed": 2})}, ""
    ).all_failed
    assert not SimulationReport({"gold": replace(outcomes, dialogues=0, statuses={})}, "").all_failed
    assert outcomes.pass_at_k is None


def test_truncated_dialogues_did_not_succeed_if_the_reward_comes_at_the_end() -> None:
    done = Episode("a#1", "a", {}, 1, reward=1.0, status="done")
    cut = Episode("a#2", "a", {}, 1, status="truncated", reason="turns")
    outcomes = outcomes_of([done, cut], repeats=2)

    assert outcomes.means["success"].mean == 0.5
    assert (outcomes.means["reward"].mean, outcomes.means["reward"].n) == (1.0, 1)
    assert (outcomes.pass_at_k, outcomes.pass_hat_k) == (1.0, 0.0)
    assert "success" not in outcomes_of([cut, cut], repeats=2).means, "nothing judges"
    unknown = Episode("b", "b", {}, 1, status="done")
    assert outcomes_of([done, unknown], repeats=1).means["success"].n == 1, "only limits count as no success"


def test_the_command_prints_a_table_or_json(folder: Path, tmp_path: Path, forks: Forks) -> None:
    (folder / "run.yaml").write_text(json.dumps(settings(folder, tasks={"count": 10})), encoding="utf8")
    words = ("partita", "simulate", "run.yaml", "--output", tmp_path)
    table = forks.run(COMMAND, *words, folder=folder)
    process = forks.run(COMMAND, *words, "--json", "--quiet", folder=folder)

    assert table.returncode == 0, table.stderr
    assert "dialogues by history" in table.stdout
    assert "predicted" in table.stdout
    assert f"transcripts in {tmp_path}" in table.stdout
    assert "task-9" in (tmp_path / "index.html").read_text("utf8")
    result = json.loads(process.stdout)
    assert re.fullmatch(r"predicted history: \d+ of \d+ answers ended at the limit of 5 tokens .*\n", process.stderr)
    assert result["histories"]["predicted"]["dialogues"] == 10
    assert result["folder"] == str(tmp_path)


def test_a_simulation_in_which_all_dialogues_fail_ends_with_1_and_warns(
    folder: Path, tmp_path: Path, forks: Forks
) -> None:
    world = {"type": "environment", "environment": "worlds_of_tests:Closed"}
    (folder / "run.yaml").write_text(json.dumps(settings(folder, world=world, tasks={"count": 3})), encoding="utf8")
    process = forks.run(
        COMMAND, "partita", "simulate", "run.yaml", "--output", tmp_path, "--quiet", "--json", folder=folder
    )
    assert process.returncode == 1
    assert "predicted history: 3 of 3 dialogues failed: environment" in process.stderr
    assert "failed: environment: OSError: the desk is closed (worlds_of_tests.py, line 106)" in process.stderr
    assert json.loads(process.stdout)["histories"]["predicted"]["statuses"] == {"failed: environment": 3}


def test_the_environment_gets_the_answers_of_the_model_also_with_gold_history(folder: Path, tmp_path: Path) -> None:
    simulated(folder, tmp_path, tasks={"count": 20}, history="gold")

    for line in transcripts(tmp_path, "gold"):
        said = [message for message in line["messages"] if "tokens" in message]
        assert line["reward"] == sum(message["content"].strip() == message["gold"] for message in said)
