"""Tests of simulations on several processes: transcripts equal those of one process, also after kills."""

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita import Model

from ..json_lines import write_json_lines
from ..seeds import session_seed

pytestmark = pytest.mark.long

WORLDS = Path(__file__).parents[1] / "framework" / "simulation" / "worlds_of_tests.py"
TASKS = 60


def settings(**simulation: Any) -> dict[str, Any]:
    """Return a configuration with sampled dialogues; `simulation` overrides keys of its simulation section."""
    world = {"type": "environment", "environment": "worlds_of_tests:Echo"}
    return {
        "base_model": "base",
        "input_features": [{"name": "messages", "type": "dialogue"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": 5, "do_sample": True, "temperature": 1.0},
        "trainer": {"type": "none", "batch_size": 8},
        "simulation": {"world": world, "tasks": {"count": TASKS}, "history": ["gold", "predicted"], **simulation},
    }


def write(folder: Path, **simulation: Any) -> Path:
    (folder / "run.yaml").write_text(yaml.safe_dump(settings(**simulation)), encoding="utf8")
    return folder


@pytest.fixture(scope="module")
def straight(processes: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return folder and report of a simulation by one process."""
    folder = tmp_path_factory.mktemp("dialogues")
    shutil.copy(WORLDS, folder / "worlds_of_tests.py")
    words = ["say", "red", "green", "blue", "one", "two", "three", "ball", "box", "0", "1", "2", "3", "4", "5", "6"]
    rows = [{"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word}]} for word in words]
    write_json_lines(folder / "rows.jsonl", rows)
    made = settings() | {"data": {"source": str(folder / "rows.jsonl")}}
    made["base_model"] = processes.settings()["base_model"] | {"context_length": 96}
    del made["simulation"]
    Model(made, quiet=True).save(folder / "base")
    return folder, processes.start(1, write(folder), "simulate:out")["simulate:out"]


@pytest.fixture
def folder(straight: tuple[Path, Any], tmp_path: Path) -> Path:
    """Return a folder with the same files, without transcripts."""
    shutil.copytree(straight[0], tmp_path / "job", ignore=shutil.ignore_patterns("out", "results.json", "rank-*.json"))
    return tmp_path / "job"


def same(folder: Path, straight: tuple[Path, Any]) -> bool:
    """Return whether the transcripts equal those of one process byte for byte, and no file of a rank is left."""
    assert not list((folder / "out").glob(".*rank-*"))
    names = ("gold.jsonl", "predicted.jsonl")
    return all((folder / "out" / name).read_bytes() == (straight[0] / "out" / name).read_bytes() for name in names)


@pytest.mark.parametrize("ranks", [2, 4])
def test_dialogues_equal_those_of_one_process(
    processes: Any, straight: tuple[Path, dict[str, Any]], folder: Path, ranks: int
) -> None:
    result = processes.start(ranks, folder, "simulate:out")["simulate:out"]

    assert same(folder, straight)
    assert result == straight[1]
    results = [json.loads((folder / f"rank-{rank}.json").read_text("utf8")) for rank in range(ranks)]
    assert all(rank["report"] == result for rank in results)
    assert all(rank["meetings"] == results[0]["meetings"] for rank in results)
    assert max(results[0]["meetings"].values()) == 2, "collective calls once per history, not per dialogue or turn"


@pytest.mark.long
def test_a_job_with_killed_ranks_resumes_with_any_number_of_ranks(
    processes: Any, straight: tuple[Path, dict[str, Any]], folder: Path
) -> None:
    seed = session_seed()
    rng = random.Random(seed)
    had = 0
    for ranks in (4, 2, 1):
        rank = rng.randrange(ranks)
        lines = had + ranks + rng.randint(2, 25)
        status = processes.kill(
            ranks, folder, "simulate:out", rank=rank, pattern="out/.*.jsonl", lines=lines, delay=rng.uniform(0, 0.02)
        )
        assert status[rank] == -signal.SIGKILL, f"seed {seed}: {status}"
        assert all(status), f"seed {seed}: no rank succeeds after a kill"
        had = sum(path.read_bytes().count(b"\n") for path in (folder / "out").glob(".*.jsonl"))
    result = processes.start(2, folder, "simulate:out")["simulate:out"]

    assert same(folder, straight), f"seed {seed}"
    assert result == straight[1], f"seed {seed}"
    for history in ("gold", "predicted"):
        kept = (folder / "out" / f".{history}.jsonl").read_text("utf8").splitlines()[1:]
        keys = [json.loads(line)["dialogue"] for line in kept]
        assert len(keys) == len(set(keys)) == TASKS, f"seed {seed}: no dialogue runs twice"


def test_there_may_be_fewer_dialogues_than_ranks(
    processes: Any, straight: tuple[Path, dict[str, Any]], folder: Path
) -> None:
    processes.start(4, write(folder, tasks={"count": 2}), "simulate:out")

    for name in ("gold.jsonl", "predicted.jsonl"):
        first = (straight[0] / "out" / name).read_text("utf8").splitlines()[:2]
        assert (folder / "out" / name).read_text("utf8").splitlines() == first


def test_too_many_failures_end_all_ranks_with_the_reason(processes: Any, folder: Path) -> None:
    world = {"type": "environment", "environment": "worlds_of_tests:Closed"}
    job = processes.launch(3, write(folder, world=world), "simulate:out")
    errors = [rank.communicate()[1] for rank in job]

    assert [rank.returncode for rank in job] == [1, 1, 1]
    assert "dialogues failed, more than limits.fail_fraction: 0.1 allows; the last one: environment: OSE" in errors[0]
    assert all("rank 0 failed at the share of failures: SimulationError: " in error for error in errors[1:])
    assert "Timeout" not in "".join(errors)


def test_a_stop_request_on_one_rank_stops_all_and_finished_dialogues_are_kept(
    processes: Any, straight: tuple[Path, dict[str, Any]], folder: Path
) -> None:
    world = {"type": "environment", "environment": "worlds_of_tests:Echo", "options": {"pause": 0.2}}
    write(folder, world=world)
    job = processes.launch(2, folder, "simulate:out")
    end = time.monotonic() + 100
    while sum(path.read_bytes().count(b"\n") for path in (folder / "out").glob(".gold*.jsonl")) < 8:
        ended = [rank.communicate() for rank in job if rank.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)
    job[1].send_signal(signal.SIGTERM)
    errors = [rank.communicate()[1] for rank in job]

    assert all("KeyboardInterrupt" in error for error in errors), errors
    assert not (folder / "out" / "gold.jsonl").exists()
    processes.start(2, folder, "simulate:out")
    assert same(folder, straight), "the seconds of the environment are not part of a dialogue"
