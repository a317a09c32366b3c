"""500 random damages of what is saved, each met by a command: is its result right, or is it said what is wrong?

A bit is flipped, a file is cut off or its tail is zeroed, at a random place of a checkpoint, a journal, a manifest or a
saved model of a tiny run. Then the command that reads it is started in a process that is forked after the
imports. Its result is compared with that of the same command on undamaged files, byte for byte.
"""

import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from forked import import_all
from harness import Limit, about, parse_arguments, report

SEED = 17
COLOURS = ("red", "blue", "green")
STEPS = 9
NEWEST = "run-begun/checkpoints/step-000006"
"""The checkpoint after which the run is killed."""
NAMED = ("damaged", "falls back", "is kept as", "torn")
"""Words of a log that names a fallback."""


@dataclass(frozen=True)
class Target:
    """Files that are damaged, and what reads them."""

    kind: str
    files: str
    """A glob in the folder of the material."""
    command: tuple[str, ...]
    result: Callable[[Path], Any]
    """What the command leaves, to be compared."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    said: str


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    damages = 40 if arguments.quick else 500
    import_all()
    gc.freeze()  # a fork that looked through all of this for garbage would copy it
    with tempfile.TemporaryDirectory() as name:
        os.environ["PARTITA_CACHE"] = f"{name}/cache"
        case, material = Path(name, "case"), Path(name, "material")
        case.mkdir()
        make_material(case)
        case.rename(material)  # every case lies where the material was made, so that no path differs
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
    report("damage", rows, limits, arguments=arguments, about=about(__doc__))


# What is damaged


def make_material(folder: Path) -> None:
    """Make a run that was killed on its way, a finished one, a saved model, half a prediction and half a simulation."""
    chance = random.Random(SEED)
    rows = []
    for _ in range(48):
        colour, number = chance.choice(COLOURS), chance.randint(1, 4)
        rows.append({"text": f"{number} {colour} balls", "colour": colour})
    for name, some in (("rows", rows), ("asked", rows[:16])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf8")
    for name, changes in (("run", {}), ("lora", {"adapter": {"type": "lora", "r": 2}})):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(configuration() | changes), encoding="utf8")
        must(folder, "train", f"{name}.yaml", "--run", f"{name}-finished")
    kill_training(folder)
    save(folder)
    for name in ("whole", "half"):
        must(folder, "predict", "run-finished", "--dataset", "asked.jsonl", "--output", f"{name}.jsonl")
    (folder / "half.jsonl").unlink()
    keep_half(*folder.glob("run-finished/journal/half-*.jsonl"))
    (folder / "talks.jsonl").write_text('{"talk": [{"role": "user", "content": "hello"}]}\n', encoding="utf8")
    (folder / "talk.yaml").write_text(yaml.safe_dump(talking()), encoding="utf8")
    must(folder, "simulate", "talk.yaml", "--output", "talks")
    keep_half(folder / "talks" / ".predicted.jsonl")


def keep_half(journal: Path) -> None:
    """Forget the second half of a journal."""
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]))


def configuration() -> dict[str, Any]:
    """A tiny model that learns to name a colour."""
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
    """A model that talks to written lines."""
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
    """Train once more, and kill the process on its way, when there are several checkpoints."""
    words = ("train", "run.yaml", "--run", "run-begun")
    pid = start(folder, words, folder / "said")
    while not (folder / NEWEST).exists():
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            sys.exit(f"the training that was to be killed ended before: {(folder / 'said').read_text()}")
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def save(folder: Path) -> None:
    """Save the finished model in a new folder, as `Model.save` does."""
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        from partita.model import Model

        Model.load("run-finished", quiet=True).save("saved")
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        sys.exit("the model was not saved")


def targets() -> list[Target]:
    """Each kind of file with the command that reads it."""
    ask = ("--dataset", "asked.jsonl", "--output")
    return [
        Target("checkpoint", "run-begun/checkpoints/*/*", ("train", "run.yaml", "--run", "run-begun"), trained),
        Target("checkpoint", f"{NEWEST}/*", ("train", "run.yaml", "--run", "run-begun"), trained),
        Target("manifest", "run-begun/manifest.json", ("train", "run.yaml", "--run", "run-begun"), trained),
        Target("manifest", "run-finished/manifest.json", ("predict", "run-finished", *ask, "new.jsonl"), answered),
        Target("manifest", "saved/partita.json", ("predict", "saved", *ask, "new.jsonl"), answered),
        Target("journal", "run-finished/journal/half-*", ("predict", "run-finished", *ask, "half.jsonl"), continued),
        Target("transcripts", "talks/.pred*", ("simulate", "talk.yaml", "--output", "talks"), talked),
        Target("saved model", "run-finished/model/*", ("predict", "run-finished", *ask, "new.jsonl"), answered),
        Target("saved model", "lora-finished/model/**/*", ("predict", "lora-finished", *ask, "new.jsonl"), answered),
        Target("saved model", "saved/*", ("predict", "saved", *ask, "new.jsonl"), answered),
        Target("saved model", "run-finished/model/*", ("train", "run.yaml", "--run", "run-finished"), finished),
    ]


def trained(folder: Path) -> Any:
    return result_of(folder / "run-begun")


def finished(folder: Path) -> Any:
    return result_of(folder / "run-finished")


def result_of(run: Path) -> Any:
    """The weights, the log without times, and the metrics of a run."""
    manifest = json.loads((run / "manifest.json").read_bytes())
    log = [json.loads(line) for line in (run / "log.jsonl").read_bytes().splitlines()]
    for line in log:
        del line["seconds"]
    kept = {name: manifest[name] for name in ("status", "steps", "metrics", "best", "best_step")}
    return (run / "model" / "model.safetensors").read_bytes(), log, kept


def answered(folder: Path) -> bytes:
    return (folder / "new.jsonl").read_bytes()


def continued(folder: Path) -> bytes:
    return (folder / "half.jsonl").read_bytes()


def talked(folder: Path) -> bytes:
    return (folder / "talks" / "predicted.jsonl").read_bytes()


# Damages


def damaged_often(material: Path, case: Path, count: int) -> list[dict[str, Any]]:
    """A row for each kind of file: how its damages ended."""
    found = {target.kind: Counter[str]() for target in targets()}
    chosen = targets()
    right = {}
    for target in chosen:
        restore(material, case)
        ended = command(case, target.command)
        if ended.code:
            sys.exit(f"without any damage {target.command} ends with {ended.code}: {ended.said}")
        right[target] = target.result(case)
    kinds = sorted(found)
    for number in range(count):
        chance = random.Random(f"{SEED} {number}")
        # Each kind as often as the others, whatever the number of its files.
        target = chance.choice([target for target in chosen if target.kind == kinds[number % len(kinds)]])
        restore(material, case)
        what = damage(chance.choice(sorted(path for path in case.glob(target.files) if path.is_file())), chance)
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


def damage(path: Path, chance: random.Random) -> str:
    """Damage a file, and say how."""
    data = bytearray(path.read_bytes())
    place = chance.randrange(len(data))
    how = chance.choice(("bit flipped", "cut off", "tail zeroed"))
    if how == "bit flipped":
        data[place] ^= 1 << chance.randrange(8)
    elif how == "cut off":
        del data[place:]
    else:
        data[place:] = bytes(len(data) - place)
    path.write_bytes(data)
    return f"{path}: {how} at {place:,}"


def judge(ended: Ended, target: Target, case: Path, right: Any) -> str:
    """How a command came out of a damage."""
    if "Traceback" in ended.said:
        return "traceback"
    if ended.code == 0:
        if target.result(case) != right:
            return "silently wrong"
        return "same result, fallback named" if any(word in ended.said for word in NAMED) else "same result"
    last = ended.said.strip().splitlines()[-1:]
    return (
        "one sentence"
        if ended.code in (1, 2) and last and last[0].startswith(("error: ", "run-", "saved"))
        else "other"
    )


# Commands


def must(folder: Path, *words: str) -> None:
    ended = command(folder, words)
    if ended.code:
        sys.exit(f"{words} ended with {ended.code}: {ended.said}")


def command(folder: Path, words: Sequence[str]) -> Ended:
    """Run the command line in a fork, to its end."""
    said = folder / "said"
    _, status = os.waitpid(start(folder, words, said), 0)
    return Ended(os.waitstatus_to_exitcode(status), said.read_text(encoding="utf8", errors="replace"))


def start(folder: Path, words: Sequence[str], said: Path) -> int:
    """The process of a command, whose output goes to a file."""
    pid = os.fork()
    if pid:
        return pid
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


if __name__ == "__main__":
    main()
