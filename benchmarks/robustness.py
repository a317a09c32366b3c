"""Damaged and hostile input: a correct result or an error message, never a traceback or a silently wrong result."""

import gc
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from fixtures import steps_of, write_rows
from harness import ROOT, Limit, Result, main, one_thread
from processes import fork, import_all, kill_when, run_fork

from partita.data.formats.base import FileOptions
from partita.data.formats.csv import read_cells

DAMAGE_SEED = 17


HOSTILE_SEED = 4
PART = 100
"""Mutations per process, so that progress is visible."""
SECONDS_A_ROW = 0.0003
"""CPU seconds allowed for encoding, answering, recording and writing a valid row."""
BROKEN_QUOTES = {"shifted": 'x","y"\n"', "never closed": '"x\n', "closed too late": '"x\ny"z\n', "escaped": '"""\n'}
"""Lines that are repeated in the CSV files."""
MEGABYTES = (0.25, 0.5, 1.0)
COLOURS = ("red", "blue", "green")
STEPS = 9
NEWEST = "run-begun/checkpoints/step-000006"
"""The checkpoint after which the run is killed."""
NAMED = ("damaged", "falls back", "is kept as", "torn")
"""Words in log messages about a fallback."""


# Damaged files


def damage(folder: Path, quick: bool) -> Result:
    """500 random damages of saved files, each read by a command: the result is correct, or the error is reported.

    A bit is flipped, or a file is truncated or its tail is zeroed, at a random position of a checkpoint, a journal, a
    manifest or a saved model of a tiny run. Then the command that reads it is started in a process forked after the
    imports. Its result is compared byte for byte with that of the same command on undamaged files.
    """
    damages = 40 if quick else 500
    import_all()
    gc.freeze()  # a garbage collection in a fork would copy all objects
    case, material = folder / "case", folder / "material"
    case.mkdir()
    make_material(case)
    case.rename(material)  # every case uses the path of the material, so that no path differs
    rows = damaged_often(material, case, damages)
    counted = Counter[str]()
    for row in rows:
        counted.update({key: value for key, value in row.items() if isinstance(value, int)})
    limits = [
        Limit("damages", counted["damages"], damages, "min"),
        Limit("silently wrong results", counted["silently wrong"], 0, "max"),
        Limit("tracebacks", counted["traceback"], 0, "max"),
        Limit("other ends, such as a signal or no word", counted["other"], 0, "max"),
    ]
    return rows, limits


@dataclass(frozen=True)
class Target:
    """Files that are damaged, and the command that reads them."""

    kind: str
    files: str
    """A glob in the folder of the material."""
    command: tuple[str, ...]
    result: str
    """The file or run written by the command, for comparison."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    said: str


def make_material(folder: Path) -> None:
    """Create a killed run, a finished one, a saved model, half a prediction and half a simulation."""
    rng = random.Random(DAMAGE_SEED)
    rows = []
    for _ in range(48):
        colour, number = rng.choice(COLOURS), rng.randint(1, 4)
        rows.append({"text": f"{number} {colour} balls", "colour": colour})
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "asked.jsonl", rows[:16])
    for name, changes in (("run", {}), ("lora", {"adapter": {"type": "lora", "r": 2}})):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(configuration() | changes), encoding="utf8")
        must(folder, "train", f"{name}.yaml", "--run", f"{name}-finished")
    kill_training(folder)
    run_fork(partial(save, folder))
    for name in ("whole", "half"):
        must(folder, "predict", "run-finished", "--dataset", "asked.jsonl", "--output", f"{name}.jsonl")
    (folder / "half.jsonl").unlink()
    keep_half(*folder.glob("run-finished/journal/half-*.jsonl"))
    write_rows(folder / "talks.jsonl", [{"talk": [{"role": "user", "content": "hello"}]}])
    (folder / "talk.yaml").write_text(yaml.safe_dump(talking()), encoding="utf8")
    must(folder, "simulate", "talk.yaml", "--output", "talks")
    keep_half(folder / "talks" / ".predicted.jsonl")


def keep_half(journal: Path) -> None:
    """Remove the second half of a journal."""
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]))


def configuration() -> dict[str, Any]:
    """Return the config of a tiny model that learns to extract a colour."""
    return {
        "base_model": {
            "type": "scratch",
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "context_length": 32,
            "tokenizer": "word",
            "vocab_size": 64,
        },
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "colour", "type": "category", "decoder": {"labels": list(COLOURS)}}],
        "generation": {"max_new_tokens": 4},
        "data": {"source": "rows.jsonl", "split": {"type": "random", "probabilities": [0.8, 0.1, 0.1]}},
        "trainer": {
            "type": "finetune",
            "max_steps": STEPS,
            "batch_size": 8,
            "eval_batch_size": 8,
            "learning_rate": 0.01,
            "steps_per_checkpoint": 2,
            "steps_per_evaluation": 4,
            "keep_checkpoints": 3,
        },
    }


def talking() -> dict[str, Any]:
    """Return the config of a model that talks to scripted lines."""
    user = {"type": "scripted", "lines": ["hello {number}", "bye"]}
    return {
        "base_model": {"type": "scratch", "size": "nano", "tokenizer": "byte", "context_length": 64},
        "input_features": [{"name": "talk", "type": "dialogue"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": 4},
        "data": {"source": "talks.jsonl"},
        "trainer": {"type": "none", "batch_size": 4},
        "simulation": {"world": {"type": "user_sim"}, "agents": {"user": user}, "tasks": {"count": 8}},
    }


def kill_training(folder: Path) -> None:
    """Train again, and kill the process when there are several checkpoints."""
    pid = start(folder, ("train", "run.yaml", "--run", "run-begun"), folder / "said")
    if not kill_when(pid, (folder / NEWEST).exists):
        sys.exit(f"the training ended before it could be killed: {(folder / 'said').read_text()}")


def save(folder: Path) -> None:
    """Save the finished model in a new folder, as `Model.save` does."""
    os.chdir(folder)
    from partita.model import Model

    Model.load("run-finished", quiet=True).save("saved")


def targets() -> list[Target]:
    """Return each kind of file with the command that reads it."""
    ask = ("--dataset", "asked.jsonl", "--output")
    return [
        Target("checkpoint", "run-begun/checkpoints/*/*", ("train", "run.yaml", "--run", "run-begun"), "run-begun"),
        Target("checkpoint", f"{NEWEST}/*", ("train", "run.yaml", "--run", "run-begun"), "run-begun"),
        Target("manifest", "run-begun/manifest.json", ("train", "run.yaml", "--run", "run-begun"), "run-begun"),
        Target("manifest", "run-finished/manifest.json", ("predict", "run-finished", *ask, "new.jsonl"), "new.jsonl"),
        Target("manifest", "saved/partita.json", ("predict", "saved", *ask, "new.jsonl"), "new.jsonl"),
        Target("journal", "run-finished/journal/half-*", ("predict", "run-finished", *ask, "half.jsonl"), "half.jsonl"),
        Target("transcripts", "talks/.pred*", ("simulate", "talk.yaml", "--output", "talks"), "talks/predicted.jsonl"),
        Target("saved model", "run-finished/model/*", ("predict", "run-finished", *ask, "new.jsonl"), "new.jsonl"),
        Target("saved model", "lora-finished/model/**/*", ("predict", "lora-finished", *ask, "new.jsonl"), "new.jsonl"),
        Target("saved model", "saved/*", ("predict", "saved", *ask, "new.jsonl"), "new.jsonl"),
        Target("saved model", "run-finished/model/*", ("train", "run.yaml", "--run", "run-finished"), "run-finished"),
    ]


def result_of(path: Path) -> Any:
    """Return the bytes of a file, or the weights, the log without times and the metrics of a run."""
    if path.is_file():
        return path.read_bytes()
    manifest = json.loads((path / "manifest.json").read_bytes())
    kept = {name: manifest[name] for name in ("status", "steps", "metrics", "best", "best_step")}
    return (path / "model" / "model.safetensors").read_bytes(), steps_of(path), kept


def damaged_often(material: Path, case: Path, count: int) -> list[dict[str, Any]]:
    """Damage files; return a row for each kind with the outcomes."""
    found = {target.kind: Counter[str]() for target in targets()}
    chosen = targets()
    right = {}
    for target in chosen:
        restore(material, case)
        ended = command(case, target.command)
        if ended.code:
            sys.exit(f"without any damage {target.command} ends with {ended.code}: {ended.said}")
        right[target] = result_of(case / target.result)
    kinds = sorted(found)
    for number in range(count):
        rng = random.Random(f"{DAMAGE_SEED} {number}")
        # Each kind equally often, regardless of its number of files.
        target = rng.choice([target for target in chosen if target.kind == kinds[number % len(kinds)]])
        restore(material, case)
        what = damage_file(rng.choice(sorted(path for path in case.glob(target.files) if path.is_file())), rng)
        ended = command(case, target.command)
        outcome = judge(ended, target, case, right[target])
        found[target.kind].update(("damages", outcome))
        print(f"{number}: {what.replace(str(case), '')}: {outcome}", flush=True)
        if outcome in ("silently wrong", "traceback", "other"):
            print(ended.said, flush=True)
    columns = ("damages", "same result", "same result, fallback named", "one sentence")
    bad = ("silently wrong", "traceback", "other")
    return [{"files": kind, **{name: counts[name] for name in (*columns, *bad)}} for kind, counts in found.items()]


def restore(material: Path, case: Path) -> None:
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(material, case)


def damage_file(path: Path, rng: random.Random) -> str:
    """Damage a file; return how."""
    data = bytearray(path.read_bytes())
    place = rng.randrange(len(data))
    how = rng.choice(("bit flipped", "cut off", "tail zeroed"))
    if how == "bit flipped":
        data[place] ^= 1 << rng.randrange(8)
    elif how == "cut off":
        del data[place:]
    else:
        data[place:] = bytes(len(data) - place)
    path.write_bytes(data)
    return f"{path}: {how} at {place:,}"


def judge(ended: Ended, target: Target, case: Path, right: Any) -> str:
    """Classify how a command ended after a damage."""
    if "Traceback" in ended.said:
        return "traceback"
    if ended.code == 0:
        if result_of(case / target.result) != right:
            return "silently wrong"
        return "same result, fallback named" if any(word in ended.said for word in NAMED) else "same result"
    last = ended.said.strip().splitlines()[-1:]
    return (
        "one sentence"
        if ended.code in (1, 2) and last and last[0].startswith(("error: ", "run-", "saved"))
        else "other"
    )


def must(folder: Path, *words: str) -> None:
    ended = command(folder, words)
    if ended.code:
        sys.exit(f"{words} ended with {ended.code}: {ended.said}")


def command(folder: Path, words: Sequence[str]) -> Ended:
    """Run a command in a fork to its end."""
    said = folder / "said"
    _, status = os.waitpid(start(folder, words, said), 0)
    return Ended(os.waitstatus_to_exitcode(status), said.read_text(encoding="utf8", errors="replace"))


def start(folder: Path, words: Sequence[str], said: Path) -> int:
    """Start a command in a fork with its output in a file; return its process id."""
    return fork(partial(run_command, folder, words, said))


def run_command(folder: Path, words: Sequence[str], said: Path) -> None:
    """Run a command in this process, and exit with its status."""
    code = 1
    try:
        os.chdir(folder)
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.argv = ["partita", *words]
        from partita.cli.main import run

        run()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 99
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# Hostile input


def hostile_input(folder: Path, quick: bool) -> Result:
    """2,000 mutated configurations and 2,000 mutated data files: rows or an error message, in little time and memory.

    Each configuration goes through `partita validate`. A valid one also goes through `partita explain` and `partita
    preview`. Each data file is read twice: by index, with predictions of a model with fixed answers, and as a stream.
    Every input is handled in a separate process. Time is CPU time without the imports; a data file may take 0.3 ms more
    per predicted row. Memory is the increase over that of the imports. CSV files with broken quotes are read at three
    sizes, which shows whether time is linear in size. The mutations are those of tests/hostile, with another seed.
    """
    count = 100 if quick else 2000
    found = {kind: outcomes(kind, count) for kind in ("configs", "data")}
    rows = [input_row(kind, cases) for kind, cases in found.items()]
    quotes = {name: [seconds_of(line, size) for size in MEGABYTES] for name, line in BROKEN_QUOTES.items()}
    cases = [case for kind in found.values() for case in kind]
    limits = [
        Limit("mutated configurations", len(found["configs"]), count, "min"),
        Limit("mutated data files", len(found["data"]), count, "min"),
        Limit(
            "tracebacks, wrong exit statuses and killed processes", sum("traceback" in case for case in cases), 0, "max"
        ),
        Limit("rows unaccounted for", sum(case.get("unaccounted", 0) for case in cases), 0, "max"),
        Limit("most CPU seconds of one input, without its answers", max(map(seconds_of_reading, cases)), 5, "max"),
        Limit("most megabytes added by one input", max(case["megabytes"] for case in cases), 500, "max"),
        Limit("CPU seconds of 1 MB of broken quotes", max(times[-1] for times in quotes.values()), 2, "max"),
        Limit(
            "CPU seconds of 1 MB over those of 0.25 MB",
            max(times[-1] / times[0] for times in quotes.values()),
            6,
            "max",
        ),
    ]
    rows += [quote_row(name, times) for name, times in quotes.items()]
    return rows, limits


def outcomes(kind: str, count: int) -> list[dict[str, Any]]:
    """Return the outcomes of mutations, and print those that violate a limit."""
    found = []
    for first in range(0, count, PART):
        with tempfile.TemporaryDirectory() as folder:
            found += outcomes_of_part(kind, first, min(first + PART, count), folder)
        print(f"{kind}: {len(found):,} of {count:,}", flush=True)
    return found


def outcomes_of_part(kind: str, first: int, last: int, folder: str) -> list[dict[str, Any]]:
    home = ROOT / "tests" / "hostile"
    words = [sys.executable, home / "program.py", kind, home, HOSTILE_SEED, first, last]
    environment = one_thread() | {"HF_HUB_OFFLINE": "1", "PARTITA_CACHE": f"{folder}/cache"}
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    for case in cases:
        if "traceback" in case or case.get("unaccounted") or seconds_of_reading(case) > 5 or case["megabytes"] > 500:
            print(json.dumps(case), flush=True)
    return cases


def seconds_of_reading(case: dict[str, Any]) -> float:
    """Return the CPU seconds of an input, less the time allowed for its answers."""
    return float(case["seconds"] - SECONDS_A_ROW * case.get("rows", 0))


def input_row(kind: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row of the table."""
    seconds = sorted(case["seconds"] for case in cases)
    return {
        "input": kind,
        "inputs": len(cases),
        "read": sum(case.get("outcome") in ("good", "answered") for case in cases),
        "refused": sum(case.get("outcome") == "refused" for case in cases),
        "tracebacks": sum("traceback" in case for case in cases),
        "CPU s, median": seconds[len(seconds) // 2],
        "CPU s, most": seconds[-1],
        "MB, most": max(case["megabytes"] for case in cases),
    }


def quote_row(name: str, times: list[float]) -> dict[str, Any]:
    named = {f"CPU s, {size:g} MB": seconds for size, seconds in zip(MEGABYTES, times, strict=True)}
    return {"input": f"quotes: {name}", **named}


def seconds_of(line: str, megabytes: float) -> float:
    """Return the CPU seconds of reading a CSV file of a repeated line, the minimum of three runs."""
    head = 'question,answer\n"'
    data = (head + line * (int(megabytes * 1_000_000) // len(line))).encode()
    found = []
    for _ in range(3):
        begun = time.process_time()
        for _ in read_cells(io.BytesIO(data), "rows.csv", default=",", options=FileOptions()):
            pass
        found.append(time.process_time() - begun)
    return min(found)


if __name__ == "__main__":
    main(damage, hostile_input)
