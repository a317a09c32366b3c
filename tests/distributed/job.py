"""Jobs of several ranks, each a fork of this process, which has imported the libraries once.

A line on standard input is a job, as JSON: {"ranks", "folder", "steps", "kill"}. A step is the name of a function
below, with its argument behind a colon. What the steps come to goes to FOLDER/results.json, written by rank 0
alone. `kill` is {"rank", "pattern", "lines", "delay"}: that rank is killed so many seconds after the files of the
pattern have so many lines. The answer is a line with the exit status of every rank.
"""

import itertools
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes  # noqa: F401 -- imported once for all forks
import datasets  # noqa: F401
import peft  # noqa: F401
import torch
import transformers  # noqa: F401
import yaml

import partita.model  # noqa: F401
import partita_trainers.finetune  # noqa: F401
from partita import Model, PartitaError
from partita.lm.huggingface import HuggingFaceModel

Settings = dict[str, Any]


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        pids = [fork(rank, job, port) for rank in range(job["ranks"])]
        if job.get("kill"):
            kill(pids, Path(job["folder"]), **job["kill"])
        sys.stdout.write(json.dumps([os.waitpid(pid, 0)[1] for pid in pids]) + "\n")
        sys.stdout.flush()


def fork(rank: int, job: dict[str, Any], port: int) -> int:
    """The process of a rank; one alone does not know that there could be others."""
    pid = os.fork()
    if pid:
        return pid
    if job["ranks"] > 1:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job["ranks"])}
    try:
        work(Path(job["folder"]), job["steps"])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def kill(pids: list[int], folder: Path, *, rank: int, pattern: str, lines: int, delay: float) -> None:
    """Kill a rank once the files have so many lines, unless it ends before, and end the others as a launcher does."""
    while sum(path.read_bytes().count(b"\n") for path in folder.glob(pattern)) < lines:
        if os.waitid(os.P_PID, pids[rank], os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(pids[rank], signal.SIGKILL)
    time.sleep(0.1)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)  # those that have ended wait for their parent, and mind nothing


def work(folder: Path, steps: list[str]) -> None:
    """All steps, one after the other."""
    os.chdir(folder)
    settings = yaml.safe_load(Path("run.yaml").read_text(encoding="utf8"))
    found: dict[str, Any] = {}
    for step in steps:
        name, _, argument = step.partition(":")
        found[step] = STEPS[name](settings, argument)
    if os.environ.get("RANK", "0") == "0":
        Path("results.json").write_text(json.dumps(found), encoding="utf8")


def train(settings: Settings, max_steps: str) -> dict[str, Any]:
    """Train up to a step, from wherever the run stands."""
    changed = settings | {"trainer": settings["trainer"] | {"max_steps": int(max_steps)}}
    result = Model(changed, quiet=True).train(run="run")
    return {"steps": result.steps, "metrics": result.metrics, "resumed_from": result.resumed_from}


def train_out_of_memory(settings: Settings, call: str) -> None:
    """Train until the memory of rank 1 ends in its so many-th pass; what each rank raises goes to a file."""
    rank, calls = os.environ["RANK"], itertools.count(1)
    loss = HuggingFaceModel.loss

    def failing(self: HuggingFaceModel, *given: Any) -> Any:
        if rank == "1" and next(calls) == int(call):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(self, *given)

    HuggingFaceModel.loss = failing  # type: ignore[method-assign]
    try:
        Model(settings, quiet=True).train(run="run")
    except PartitaError as error:
        Path(f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf8")
        raise


def predict(settings: Settings, name: str) -> dict[str, Any]:
    """Answer rows with what was trained."""
    model = Model.load("run", quiet=True)
    predictions = model.predict(f"{name}.jsonl", output=f"{name}.out.jsonl", batch_size=4)
    assert len(predictions) == predictions.stats.rows
    return {"rows": predictions.stats.rows, "resumed": predictions.stats.resumed}


def evaluate(settings: Settings, name: str) -> dict[str, Any]:
    """Scores of what was trained."""
    return Model.load("run", quiet=True).evaluate(f"{name}.jsonl")


def tune(settings: Settings, name: str) -> dict[str, Any]:
    """Sizes that every rank has come to."""
    sizes = Model.load("run", quiet=True, overrides=["trainer.eval_batch_size=auto"]).tune(f"{name}.jsonl", fresh=True)
    Path(f"sizes-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(sizes.records()), encoding="utf8")
    return sizes.records()


STEPS: dict[str, Callable[[Settings, str], Any]] = {
    "train": train,
    "train_out_of_memory": train_out_of_memory,
    "predict": predict,
    "evaluate": evaluate,
    "tune": tune,
}

if __name__ == "__main__":
    main()
