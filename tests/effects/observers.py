"""Observers of a configuration: each uses it through a public method or command and returns the results by part.

The configuration itself is not part of the results, because it always differs.
"""

import hashlib
import json
import logging
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from partita import Model, PartitaError

from ..forks import COMMAND, ENVIRONMENT, Forks
from .inputs import ASKED
from .server import serving

Config = dict[str, Any]
Observation = dict[str, Any]
"""Values by part; JSON."""
Observer = Callable[[Config, Path], Observation]
"""A function that uses a configuration in a separate folder, which is the current one."""

TIMES = ("seconds", "waited_seconds", "wait_share", "tokens_per_second")
SECONDS = re.compile(r"\b[\d.,]+ s\b")
PEFT_ON_CUDA = "Failed to load the CUDA extension"
"""The start of a message of peft, which reports another cause from the second time on."""
COMMANDS: list[Callable[[], Forks]] = []
"""Functions that return what starts commands; the last is used."""
SIZES = ("rows", "origin", "device", "max_fitting")
"""The keys of a batch size that are compared; the others are measurements."""


def training(config: Config, place: Path) -> Observation:
    """Train; return the contents of the run directory."""
    from torch._dynamo.utils import counters

    run = place / "run"
    captured = counters["stats"]["unique_graphs"]
    with messages() as said, counted_passes() as passes:
        Model(config, quiet=True).train(run=run)
    manifest = json.loads((run / "manifest.json").read_text("utf8"))
    steps = lines(run / "log.jsonl")
    results: Observation = {
        "plan": [{key: step.get(key) for key in ("batch_hash", "rows", "tokens", "epoch")} for step in steps],
        "losses": [step["loss"] for step in steps],
        "rates": [step.get("learning_rate") for step in steps],
        "files": sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()),
        "saved": {path.name: tensors(path) for path in sorted((run / "model").glob("*.safetensors"))},
        "left out": lines(run / "quarantine.jsonl"),
        "log": said,
        "passes": len(passes),
        "compiled": counters["stats"]["unique_graphs"] - captured,
        "workers": manifest.get("workers"),
        "batch_sizes": {
            name: {key: size[key] for key in SIZES if key in size}
            for name, size in (manifest.get("batch_sizes") or {}).items()
        },
        **{key: manifest.get(key) for key in ("data", "evaluations", "labels", "metrics")},
        **{key: manifest.get(key) for key in ("steps", "stopped_early", "trained_parameters", "parameters")},
        **{
            key: manifest.get(key) for key in ("token_cache", "best", "best_step", "sources", "rounds", "learning_rate")
        },
    }
    results["files of rounds"] = {
        str(path.relative_to(run)): lines(path) for path in sorted(run.glob("rounds/*/log.jsonl"))
    }
    if (place / "read.txt").exists():
        results["read"] = (place / "read.txt").read_text("utf8")
    if (run / "probe.json").exists():
        results |= json.loads((run / "probe.json").read_text("utf8"))
    return cleaned(results, place)


def answers(config: Config, place: Path) -> Observation:
    """Predict a few rows."""
    with messages() as said, counted_passes() as passes:
        predictions = list(Model(config, quiet=True).predict("asked.jsonl", "answers.jsonl", fresh=True))
    return cleaned({"answers": predictions, "log": said, "passes": len(passes)}, place)


def training_in_rounds(config: Config, place: Path) -> Observation:
    """Train with self-training. The number of forward passes is removed: it depends on the batches of dialogues."""
    result = training(config, place)
    del result["passes"]
    return result


def simulating(config: Config, place: Path) -> Observation:
    """Run a simulation."""
    with messages() as said:
        report = Model(config, quiet=True).simulate(place / "had")
    transcripts = {path.name: lines(path) for path in sorted((place / "had").glob("*.jsonl"))}
    for name in [name for name in transcripts if name.startswith(".")]:  # journals
        dialogues = [line for line in transcripts[name] if "decided_by" not in line]  # that is the configuration itself
        transcripts[name] = sorted(
            dialogues, key=lambda dialogue: str(dialogue["dialogue"])
        )  # journals are in the order of completion
    noted = place / "noted.txt"
    results = {
        "files": [*transcripts, *([noted.name] if noted.exists() else [])],
        "noted": noted.read_text("utf8").splitlines() if noted.exists() else [],
        "transcripts": {
            name: [without_times(dialogue) for dialogue in dialogues] for name, dialogues in transcripts.items()
        },
        "report": report.flat(),
        "log": said,
    }
    return cleaned(results, place)


def without_times(dialogue: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in dialogue.items() if "seconds" not in key and key not in ("checksum", "world")}


def resuming(config: Config, place: Path) -> Observation:
    """Train for an epoch and a half, and resume after the rows have changed."""
    rows = place / "changing.jsonl"
    rows.write_bytes((place / "rows.jsonl").read_bytes())
    Model(config | {"trainer": config["trainer"] | {"max_steps": 6}}, quiet=True).train(run=place / "run")
    rows.write_bytes((place / "more.jsonl").read_bytes())
    manifest = place / "run" / "manifest.json"
    noted = json.loads(manifest.read_text("utf8")) | {"status": "running"}
    del noted["checksum"]
    manifest.write_text(json.dumps(noted), encoding="utf8")
    return training(config | {"trainer": config["trainer"] | {"max_steps": 8}}, place)


def launching(config: Config, place: Path) -> Observation:
    """Train as a command, which may start several processes."""
    port = str(free_port())
    (place / "port.txt").write_text(port, encoding="utf8")
    ended = command(json.loads(json.dumps(config).replace("PORT", port)), place, "train", "run.yaml", "--run", "run")
    manifest = json.loads((place / "run" / "manifest.json").read_text("utf8"))
    said = [line.partition(" on ")[0] for line in ended.stderr.splitlines() if "process" in line]
    met = (place / "met.txt").read_text("utf8")
    return {"processes": said, "held": manifest.get("parameters_per_process"), "met": met}


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        port: int = result.getsockname()[1]
    return port


def explaining(config: Config, place: Path) -> Observation:
    """Explain how the processes of a training would share its steps, without starting them."""
    return {"processes": json.loads(command(config, place, "explain", "run.yaml", "--json").stdout).get("processes")}


def command(config: Config, place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a configuration in `run.yaml`. Raises PartitaError with its output if it fails."""
    (place / "run.yaml").write_text(json.dumps(config), encoding="utf8")
    environment = os.environ | ENVIRONMENT
    ended = COMMANDS[-1]().run(COMMAND, "partita", *words, folder=place, environment=environment, timeout=280)
    if ended.returncode:
        assert "Traceback" not in ended.stderr, ended.stderr
        raise PartitaError(ended.stderr)
    return ended


def loading(config: Config, place: Path) -> Observation:
    """Read the configuration."""
    return {"name": Model(config, quiet=True).name}


def asking(config: Config, place: Path) -> Observation:
    """Predict a few rows with a model on a server of this process.

    The server answers once the allowed number of concurrent requests has arrived; paced requests arrive one by one.
    """
    backend = config["backend"]
    paced = "requests_per_minute" in backend or "tokens_per_minute" in backend
    with serving(together=1 if paced else min(ASKED, backend.get("concurrency", ASKED))) as server:
        whole = json.loads(json.dumps(config).replace("URL", server.url))
        result = answers(whole, place)
    seen = {
        "bodies": sorted(server.bodies, key=json.dumps),
        "requests": len(server.bodies),
        "paths": sorted(set(server.paths)),
        "keys": sorted(set(server.keys)),
        "most_active": server.most_active,
    }
    return result | json.loads(json.dumps(seen).replace(server.url, "URL"))


@contextmanager
def counted_passes() -> Iterator[list[None]]:
    """Collect an item for each forward pass of a part of a model."""
    import torch

    passes: list[None] = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: passes.append(None))
    try:
        yield passes
    finally:
        hook.remove()


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSON Lines file without their times."""
    if not path.exists():
        return []
    results = [json.loads(line) for line in path.read_text("utf8").splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in results]


def tensors(path: Path) -> dict[str, str]:
    """Return a hash of each tensor of a file."""
    with safe_open(path, framework="np") as file:
        return {name: hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest()[:12] for name in file.keys()}  # noqa: SIM118


def cleaned(found: Observation, place: Path) -> Observation:
    """Return an observation as JSON without the folders of the test."""
    cleaned: Observation = json.loads(json.dumps(found, default=str).replace(str(place), "PLACE"))
    return cleaned


@contextmanager
def messages() -> Iterator[list[str]]:
    """Collect log messages without durations."""
    results: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = SECONDS.sub("SECONDS", record.getMessage())
            if not text.startswith(PEFT_ON_CUDA):
                results.append(text)

    handler = Collect()
    loggers = [logging.getLogger(name) for name in ("partita", "partita_trainers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield results
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def observed(observer: Observer, config: Config, place: Path) -> Observation:
    """Return the observation, or the refusal of the configuration."""
    try:
        return observer(config, place)
    except PartitaError as error:
        return cleaned({"refusal": f"{type(error).__name__}: {error}"}, place)
