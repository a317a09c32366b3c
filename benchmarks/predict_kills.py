"""Twenty SIGKILLs at random moments of a prediction of 5,000 rows, beside a prediction that nobody kills.

A new model, prompts of 3 to 60 tokens, up to 24 new tokens, one thread. Each attempt is a process of its own, forked
behind the imports. Work is counted in the model: tokens read and made, those of attempts that came to nothing
included, and padding. A kill costs what is in the slots at that moment: for each a prompt and half an answer on
average, so that with R rows, K kills and S slots about K * S / R of the rows are begun again.
"""

import importlib
import json
import mmap
import os
import random
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import Limit, about, parse_arguments, report

SLOTS = (8, 16, 32)
NEW_TOKENS = 24


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    count, kills = (1000, 4) if arguments.quick else (5000, 20)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        prompt_tokens = write_rows(Path("rows.jsonl"), count) / count
        for module in ("torch", "transformers", "peft", "datasets", "partita.model", "partita.lm.huggingface"):
            importlib.import_module(module)
        for slots in SLOTS[:1] if arguments.quick else SLOTS:
            lost = slots * (prompt_tokens + NEW_TOKENS / 2) / (count * (prompt_tokens + NEW_TOKENS))
            rows.append(killed_often(slots, kills=kills) | {"expected work": round(1 + kills * lost, 4)})
    limits = [
        *(Limit(f"work over one pass, {row['slots']} slots", row["work"], 1.05, "max") for row in rows),
        Limit("files that are the straight run's", sum(row["the same file"] for row in rows), len(rows), "min"),
        Limit("kills, least", min(row["kills"] for row in rows), kills, "min"),
    ]
    report("predict_kills", rows, limits, arguments=arguments, about=about(__doc__))


def killed_often(slots: int, *, kills: int) -> dict[str, Any]:
    """A job in so many slots, killed at random moments until it has ended, beside one that runs through."""
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    names = [f"{kind}{slots}" for kind in ("straight", "killed")]
    straight = attempt(names[0], slots, kill_after=None)
    killed = tokens = 0
    while killed < kills:
        # The rest of the job is shorter than the whole: moments are drawn from what is left of it, evenly.
        after = chance.uniform(0.3, 1.0) * straight["seconds"] / (kills + 1) * 1.5
        found = attempt(names[1], slots, kill_after=after)
        tokens += found["tokens"]
        if not found["killed"]:
            break
        killed += 1
    if found["killed"]:
        tokens += attempt(names[1], slots, kill_after=None)["tokens"]
    files = [Path(f"{name}.jsonl").read_bytes() for name in names]
    return {
        "rows": files[1].count(b"\n"),
        "slots": slots,
        "kills": killed,
        "tokens of the straight run": straight["tokens"],
        "tokens of all attempts": tokens,
        "work": round(tokens / straight["tokens"], 4),
        "the same file": files[0] == files[1],
        "seed": seed,
    }


def write_rows(path: Path, count: int) -> int:
    """Questions; how many tokens all have."""
    chance, words = random.Random(1), 0
    with path.open("w", encoding="utf8") as file:
        for number in range(count):
            question = " ".join(f"w{chance.randrange(200)}" for _ in range(chance.randint(3, 60)))
            words += question.count(" ") + 1
            file.write(json.dumps({"number": number, "question": question, "answer": "w1"}) + "\n")
    return words


def attempt(output: str, slots: int, *, kill_after: float | None) -> dict[str, Any]:
    """One process; `kill_after` seconds after its first token it is killed, if it has not ended."""
    counter = mmap.mmap(-1, 16)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            predict(output, slots, counter)
            code = 0
        finally:
            os._exit(code)
    begun: float | None = None
    status = None
    while status is None:
        done, value = os.waitpid(child, os.WNOHANG)
        if done:
            status = value
            break
        if begun is None and struct.unpack("q", counter[:8])[0]:
            begun = time.perf_counter()
        if kill_after is not None and begun is not None and time.perf_counter() - begun > kill_after:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        time.sleep(0.001)
    killed = os.WIFSIGNALED(status)
    if not killed and os.WEXITSTATUS(status):
        sys.exit("an attempt failed")
    seconds = time.perf_counter() - (begun or time.perf_counter())
    found = {"tokens": struct.unpack("q", counter[:8])[0], "killed": killed, "seconds": seconds}
    print(output, found, flush=True)
    return found


def predict(output: str, slots: int, counter: mmap.mmap) -> None:
    """The job, with what the model computes counted where a kill cannot reach it."""
    import torch

    from partita.lm.slots import Slots
    from partita.model import Model

    torch.set_num_threads(1)
    run = Slots.run

    def counted(self: Any, ids_NL: torch.Tensor, *others: Any, **more: Any) -> Any:
        counter[:8] = struct.pack("q", struct.unpack("q", counter[:8])[0] + ids_NL.numel())
        return run(self, ids_NL, *others, **more)

    Slots.run = counted  # type: ignore[method-assign]
    config = {
        "base_model": {
            "type": "scratch",
            "size": "tiny",
            "tokenizer": "word",
            "vocab_size": 256,
            "context_length": 128,
        },
        "input_features": [{"name": "question", "type": "text"}],
        "output_features": [{"name": "answer", "type": "text"}],
        "generation": {"max_new_tokens": NEW_TOKENS},
        "data": {"source": "rows.jsonl"},
        "trainer": {"type": "none", "batch_size": slots},
    }
    Model(config, quiet=True).predict("rows.jsonl", output=f"{output}.jsonl")


if __name__ == "__main__":
    main()
