"""The libraries that generate.py compares with on a CPU: their environments, settings and runs."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import Limit, Row, one_thread, peer_environment

SCRIPT = Path(__file__).parent / "generate_peers.py"
KEPT = "PARTITA_PEERS"
"""Environment variable with a folder in which the environments are kept for later runs."""
ENVIRONMENTS: dict[str, tuple[list[str], list[str]]] = {
    "ctranslate2": (["ctranslate2==4.8.5"], ["transformers", "tokenizers"]),
    "openvino": (["optimum-intel[openvino]==2.2.0", "openvino-genai==2026.4.1.0"], []),
    "llama.cpp": (["xllamacpp==2026.10.11549", "gguf==0.19.0", "safetensors"], ["tokenizers"]),
    "onnxruntime": (["onnxruntime-genai==0.18.0", "onnx", "onnx-ir"], ["transformers", "tokenizers"]),
}
"""Packages of each environment, and those in our versions; optimum-intel needs an earlier transformers."""


@dataclass(frozen=True)
class Contender:
    """A library with a number format, and the settings of which the fastest counts."""

    who: str
    engine: str
    """Key of ENVIRONMENTS, or transformers for our environment."""
    precision: str
    exact: bool
    """Whether all its numbers are fp32; it counts as exact if all its answers are ours, too."""
    settings: Mapping[str, Sequence[Row]]
    """For each model."""


def both(*settings: Row, small: Sequence[Row] = ()) -> dict[str, Sequence[Row]]:
    """Return settings to try with tiny, and those for small: by default the first one."""
    return {"tiny": settings, "small": small or settings[:1]}


TOKENS = both({"tokens": 2048}, {"tokens": 4096})
ROWS = both({"rows": 128, "tokens": 512}, {"rows": 64, "tokens": 2048})
SLOTS = both({"slots": 32}, {"slots": 64})
CONTENDERS = (
    Contender("CTranslate2 fp32", "ctranslate2", "float32", True, TOKENS),
    Contender("CTranslate2 int8", "ctranslate2", "int8", False, TOKENS),
    Contender("CTranslate2 int8_bfloat16", "ctranslate2", "int8_bfloat16", False, TOKENS),
    Contender("OpenVINO GenAI fp32", "openvino", "fp32", True, ROWS),
    Contender("OpenVINO GenAI int8", "openvino", "int8", False, ROWS),
    Contender("llama.cpp f32", "llama.cpp", "f32", True, SLOTS),
    Contender("llama.cpp q8_0", "llama.cpp", "q8_0", False, SLOTS),
    Contender("onnxruntime-genai fp32", "onnxruntime", "fp32", True, both({"rows": 32}, {"rows": 16})),
    Contender("transformers generate_batch", "transformers", "fp32", True, both({"pages": 64, "tokens": 512})),
)


class Peers:
    """Runs the contenders on a model and a work, each run in a new process with one thread."""

    def __init__(self, folder: Path, model: str, work: str, prompts: Sequence[str], *, new_tokens: int) -> None:
        self.folder = folder
        self.model = model
        self.work = work
        self.prompts = list(prompts)
        self.new_tokens = new_tokens
        self.reasons: dict[str, str] = {}
        """Why a contender is skipped."""

    def prepare(self, contender: Contender) -> None:
        """Create its environment and convert the model, or write down why it is skipped."""
        _, reason = self.programs(contender.engine)
        if not reason and contender.engine in ENVIRONMENTS:
            reason = self.start(contender, {}, convert=True).get("error", "")
        if reason:
            self.reasons[contender.who] = reason

    def programs(self, engine: str) -> tuple[Path, str]:
        """Return the programs of the environment of an engine, which is created at first, and a reason why not."""
        if engine not in ENVIRONMENTS:
            return Path(sys.executable).parent, ""
        home = Path(os.environ.get(KEPT, self.folder)) / engine
        programs = home / "environment" / "bin"
        if not programs.exists():
            home.mkdir(parents=True, exist_ok=True)
            packages, same = ENVIRONMENTS[engine]
            _, reason = peer_environment(home, *packages, same=same)
            if reason:
                return programs, reason
            if engine == "openvino":  # its torchvision is built for CUDA, and transformers fails to import with it
                subprocess.run([programs / "pip", "uninstall", "--quiet", "--yes", "torchvision"], check=False)
        return programs, ""

    def start(self, contender: Contender, settings: Row, *, convert: bool = False) -> Row:
        """Run the script of the peers; return its result, or its error."""
        job = self.folder / "job.json"
        content = {
            "engine": contender.engine,
            "precision": contender.precision,
            "model": str(self.folder / self.model),
            "converted": str(self.folder / f"{self.model}-{contender.engine}-{contender.precision}"),
            "work": self.work,
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            "context": 640,
            "settings": settings,
            "convert": convert,
        }
        job.write_text(json.dumps(content), encoding="utf8")
        words = [self.programs(contender.engine)[0] / "python", SCRIPT, job]
        offline = one_thread() | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(words, env=offline, capture_output=True, text=True, check=False)
        if done.returncode:  # a peer may fail in any way
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            return {"error": lines[-1][-300:].replace("|", "/")}
        return dict(json.loads(done.stdout.splitlines()[-1]))


def compare_contenders(
    peers: Peers, own: Mapping[str, Callable[[], Row]], *, rounds: int, one_setting: bool = False
) -> tuple[list[Row], list[Limit]]:
    """Run ours and the contenders in turn; return the rows of the table and the limits.

    Args:
        peers: Runs the contenders.
        own: Configurations of partita; the first is in fp32, and its answers are compared with all others.
        rounds: Rounds; all settings run in the first, and the fastest setting in the others.
        one_setting: Whether only the first setting is tried.
    """
    runs: dict[str, list[Row]] = {}
    for contender in CONTENDERS:
        peers.prepare(contender)
    for number in range(rounds):
        for who, answer in own.items():
            runs.setdefault(who, []).append(said(who, answer()))
        for contender in CONTENDERS:
            if contender.who in peers.reasons:
                continue
            found = runs.setdefault(contender.who, [])
            settings = contender.settings[peers.model][: 1 if one_setting else None]
            if number:
                settings = [found[0]["setting"]]
            tried = [peers.start(contender, one) | {"setting": one} for one in settings]
            for run in tried:
                said(contender.who, run)
            worked = [run for run in tried if "error" not in run]
            if worked:
                found.append(min(worked, key=lambda run: run["cpu"]))
            else:
                peers.reasons[contender.who] = tried[-1]["error"]
    return table(peers, runs), limits_of(peers, runs)


def said(who: str, run: Row) -> Row:
    print(who, {key: value for key, value in run.items() if key != "texts"}, flush=True)
    return run


def table(peers: Peers, runs: Mapping[str, list[Row]]) -> list[Row]:
    """Return a row for each contender: medians, and the ratio to ours in the same round."""
    ours = next(iter(runs.values()))
    rows: list[Row] = []
    for who, found in runs.items():
        row: Row = {"model": peers.model, "work": peers.work, "rows": len(peers.prompts), "who": who}
        if who in peers.reasons or not found:
            continue
        seconds = statistics.median(run["cpu"] for run in found)
        row |= {
            "CPU s": round(seconds, 2),
            "tokens/CPU s": round(found[0]["tokens"] / seconds, 1),
            "CPU s over ours": round(ratio(found, ours), 2),
            "equal answers": equal(found, ours),
            "peak MB": max(run["peak"] for run in found),
            "runs": [round(run["cpu"], 2) for run in found],
            "setting": ", ".join(f"{value} {key}" for key, value in found[0].get("setting", {}).items()),
        }
        rows.append(row)
    for who, reason in peers.reasons.items():
        rows.append({"model": peers.model, "work": peers.work, "who": who, "skipped": reason})
    return rows


def ratio(found: Sequence[Row], ours: Sequence[Row]) -> float:
    """Return the median of the ratios of CPU seconds in the same round."""
    return statistics.median(run["cpu"] / own["cpu"] for run, own in zip(found, ours, strict=True))


def equal(found: Sequence[Row], ours: Sequence[Row]) -> int:
    """Return the fewest rows of a run that have the text of our first run."""
    return min(sum(a == b for a, b in zip(run["texts"], ours[0]["texts"], strict=True)) for run in found)


OUR_INT8, OUR_INT8_FASTEST = "partita int8", "partita int8, dtype: fastest"
INT8 = {
    "CTranslate2 int8": OUR_INT8,
    "CTranslate2 int8_bfloat16": OUR_INT8_FASTEST,
    "llama.cpp q8_0": OUR_INT8,
}
"""Contenders in int8, and which of ours has to be ahead of them."""
LEAST = {("tiny", "rows"): 1.0, ("tiny", "shared"): 1.3, ("small", "rows"): 1.5, ("small", "shared"): 1.5}
"""Required ratio to the fastest exact contender."""


def limits_of(peers: Peers, runs: Mapping[str, list[Row]]) -> list[Limit]:
    """Return the limits: the ratio to the fastest exact contender, and that there is one."""
    ours = next(iter(runs.values()))
    fp32 = [one.who for one in CONTENDERS if one.exact and one.who not in peers.reasons]
    exact = {who: ratio(runs[who], ours) for who in fp32 if equal(runs[who], ours) == len(peers.prompts)}
    name = f"{peers.model}, {peers.work}"
    limits = [Limit(f"{name}: fp32 contenders with the same answers", len(exact), 1, "min")]
    if exact:
        best = min(exact.values())
        limits.append(Limit(f"{name}: over the fastest of them", round(best, 3), LEAST[peers.model, peers.work], "min"))
    for who, our in INT8.items():
        if who in runs and who not in peers.reasons:
            what = f"{name}: {our.removeprefix('partita ')} over {who}"
            limits.append(Limit(what, round(ratio(runs[who], runs[our]), 3), 1.0, "min"))
    return limits
