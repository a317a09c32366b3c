"""Number formats for answers on a CPU: float32, bfloat16, and int8 (`quantization: {type:
int8_dynamic_activation_int8_weight}`), one thread."""

import json
import math
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from fixtures import read_rows, zero_shot
from harness import SHARED, Limit, Result, Row, call, main, run_script

NEW_TOKENS = 32
ROWS = {"tiny": 512, "small": 64}
ROUNDS = 3
INT8 = {"quantization": {"type": "int8_dynamic_activation_int8_weight"}}
FASTEST = {"model_parameters": {"dtype": "fastest"}}
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": INT8,
    "bfloat16": {"model_parameters": {"dtype": "bfloat16"}},
    "dtype: fastest": FASTEST,
    "int8, dtype: fastest": INT8 | FASTEST,
}
STORY_TOKENS = 256
TEXTS = 64
PROMPT_TOKENS = 24
EPOCHS = 3
AGREEING = 0.9
"""Limit of the share of tokens that are the most likely ones in int8 too."""


def speed(folder: Path, quick: bool) -> Result:
    """CPU seconds and memory of `predict`: 512 rows of a new model with 5 M parameters (tiny), 64 rows of one with 99 M
    (small), 32 new tokens each, greedy.

    Needs the shared folder next to the repository. Medians of three runs in turn, one process per run, after the batch
    size was found. resident MB: memory of the process after the model was loaded and gave its first answer. chosen: the
    format of the layers, which `dtype: fastest` and int8 choose by a measurement on the machine.
    """
    run_script([SHARED / "peers" / "workload.py", folder])
    rows: list[Row] = []
    limits: list[Limit] = []
    for name in ["tiny"] if quick else list(ROWS):
        runs: dict[str, list[Row]] = {kind: [] for kind in FORMATS}
        for _ in range(1 if quick else ROUNDS):
            for kind in FORMATS:
                runs[kind].append(call(answer, folder, name, kind))
                print(name, kind, round(runs[kind][-1]["cpu"], 2), flush=True)
        rows += [summary(name, kind, runs) for kind in FORMATS]
        exact, int8, fastest = (
            next(row for row in rows if row["model"] == name and row["format"] == kind)
            for kind in ("float32", "int8", "dtype: fastest")
        )
        if fastest["chosen"] == "bfloat16":
            ratio = exact["CPU s"] / fastest["CPU s"]
            limits.append(Limit(f"{name}: bfloat16, chosen by dtype: fastest, over float32", ratio, 1.5, "min"))
        limits.append(Limit(f"{name}: int8 over float32", exact["CPU s"] / int8["CPU s"], 1.0, "min"))
        limits.append(
            Limit(f"{name}: resident MB of int8 over float32", int8["resident MB"] / exact["resident MB"], 1.0, "max")
        )
    return rows, limits


def summary(name: str, kind: str, runs: dict[str, list[Row]]) -> Row:
    """Return the row of a format, with the medians of its runs."""
    own, exact = runs[kind], runs["float32"]
    seconds = statistics.median(run["cpu"] for run in own)
    same = [one == other for one, other in zip(own[0]["answers"], exact[0]["answers"], strict=False)]
    return {
        "model": name,
        "format": kind,
        "chosen": own[0]["chosen"],
        "CPU s": round(seconds, 2),
        "times float32": round(statistics.median(run["cpu"] for run in exact) / seconds, 2),
        "resident MB": min(run["resident"] for run in own),
        "peak MB": max(run["peak"] for run in own),
        "answers equal to float32": f"{sum(same)} of {len(same)}",
        "runs": [round(run["cpu"], 2) for run in own],
    }


def answer(folder: str, name: str, kind: str) -> Row:
    """Answer the rows in a format; return CPU seconds, memory and answers."""
    import torch

    from partita import Model
    from partita.lm.products.int8_linear import int8_layers

    torch.set_num_threads(1)
    os.chdir(folder)
    rows = read_rows(Path(folder, "rows.jsonl"))[: ROWS[name]]
    config = task(f"{folder}/{name}")
    config["generation"]["min_new_tokens"] = NEW_TOKENS
    model = Model(config | FORMATS[kind], quiet=True)
    lm: Any = model._backend.pipeline().lm
    model.generate(rows[0]["prompt"], max_new_tokens=1, batch_size=1)
    resident = resident_megabytes()
    rows = [{"prompt": row["prompt"]} for row in rows]
    model.tune(rows)
    started = time.process_time()
    found = model.predict(rows, Path(folder, "answers.jsonl"), fresh=True)
    spent = time.process_time() - started
    layers, dtype = len(int8_layers(lm.module)), str(lm.base.dtype).removeprefix("torch.")
    return {
        "cpu": spent,
        "resident": resident,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "chosen": f"{layers} int8 layers, else {dtype}" if layers else dtype,
        "answers": [row["response_raw"] for row in found],
    }


def resident_megabytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


def quality(folder: Path, quick: bool) -> Result:
    """What int8 changes: perplexity, and how often the most likely token and greedy answers are those of float32.

    Needs the shared folder next to the repository. stories260k: a published model with 64 dimensions, on texts that it
    wrote in float32 itself, 256 tokens each, and on answers of 64 tokens to the first 24 of them. trained: the new
    model of 5 M parameters after three epochs on 448 of the 512 rows, on the responses of the others, and on answers of
    32 tokens to their prompts. All linear layers are in int8 here, also those that are not faster in it; one row of
    each model leaves the output layer in float32.
    """
    run_script([SHARED / "peers" / "workload.py", folder])
    rows: list[Row] = []
    limits: list[Limit] = []
    call(train, folder, 1 if quick else EPOCHS)
    for name in ("stories260k", "trained"):
        found = {kind: call(judge, folder, name, kind) for kind in QUALITIES}
        exact = found["float32"]
        for kind, one in found.items():
            pairs = list(zip(one["answers"], exact["answers"], strict=True))
            likely = [a == b for a, b in zip(one["likely"], exact["likely"], strict=True)]
            rows.append(
                {
                    "model": name,
                    "format": kind,
                    "perplexity": round(one["perplexity"], 3),
                    "same most likely token": f"{sum(likely) / len(likely):.1%}",
                    "equal answers": f"{sum(a == b for a, b in pairs)} of {len(pairs)}",
                    "tokens before the first other one": round(statistics.mean(same_tokens(a, b) for a, b in pairs), 1),
                }
            )
            if kind == "int8":
                limits.append(Limit(f"{name}: same most likely token", sum(likely) / len(likely), AGREEING, "min"))
                ratio = one["perplexity"] / exact["perplexity"]
                limits.append(Limit(f"{name}: perplexity over that of float32", ratio, 1.03, "max"))
    return rows, limits


QUALITIES: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": INT8,
    "int8, lm_head in float32": {"quantization": {**INT8["quantization"], "skip_modules": ["lm_head"]}},
    "bfloat16": {"model_parameters": {"dtype": "bfloat16"}},
    "int8, others in bfloat16": INT8 | {"model_parameters": {"dtype": "bfloat16"}},
}


def same_tokens(answer: list[int], other: list[int]) -> int:
    """Return the number of tokens before the first that differs."""
    differ = (index for index, pair in enumerate(zip(answer, other, strict=False)) if pair[0] != pair[1])
    return next(differ, len(answer))


def task(base: str, **sections: Any) -> dict[str, Any]:
    """Return a file whose prompts are the texts of the rows."""
    return (
        zero_shot(base, "prompt response", tokens=NEW_TOKENS, prompt={"template": "{prompt}", "chat": False}) | sections
    )


def train(folder: str, epochs: int) -> Row:
    """Train the tiny model on all but the last rows."""
    from partita import Model

    os.chdir(folder)
    trainer = {
        "type": "finetune",
        "epochs": epochs,
        "learning_rate": 1e-3,
        "batch_size": 16,
        "evaluate_generated": False,
    }
    model = Model(task(f"{folder}/tiny", trainer=trainer), quiet=True)
    model.train(read_rows(Path(folder, "rows.jsonl"))[:-TEXTS], Path(folder, "run"))
    return {}


def judge(folder: str, name: str, kind: str) -> Row:
    """Return the perplexity of a model in a format on its texts, its most likely tokens and its greedy answers."""
    import torch

    from partita import Model
    from partita.lm.loading import number_formats
    from partita.lm.loading.number_formats import Int8Speed
    from partita.lm.products.int8_linear import FBGEMM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.chdir(folder)
    number_formats.int8_speeds = lambda shapes, dtype: dict.fromkeys(shapes, Int8Speed(FBGEMM, math.inf))
    base = f"{folder}/run/model" if name == "trained" else str(SHARED / "models" / name)
    lm: Any = Model(task(base, **QUALITIES[kind]), quiet=True)._backend.pipeline().lm
    texts = texts_of(folder, name, lm)
    loss, count = 0.0, 0
    likely: list[int] = []
    answers = []
    with torch.no_grad():
        for prompt, text in texts:
            ids = torch.tensor([prompt + text])
            logits = lm.base(ids).logits[0, len(prompt) - 1 : -1].float()
            loss += torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum").item()
            count += len(text)
            likely += logits.argmax(-1).tolist()
            new = 64 if name == "stories260k" else NEW_TOKENS
            start = torch.tensor([(prompt + text)[:PROMPT_TOKENS] if name == "stories260k" else prompt])
            mask = torch.ones_like(start)
            found = lm.base.generate(
                start, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )
            answers.append(found[0, start.shape[1] :].tolist())
    return {"perplexity": math.exp(loss / count), "likely": likely, "answers": answers}


def texts_of(folder: str, name: str, lm: Any) -> list[tuple[list[int], list[int]]]:
    """Return prompts and texts after them, as tokens; those of stories260k are written by it, once."""
    import torch

    if name == "trained":
        rows = read_rows(Path(folder, "rows.jsonl"))[-TEXTS:]
        pairs = [(lm.tokenizer(row["prompt"])["input_ids"], lm.tokenizer(row["response"])["input_ids"]) for row in rows]
        return [(prompt, text) for prompt, text in pairs if text]
    path = Path(folder, "texts.json")
    if not path.exists():  # the first format is float32
        start = torch.full((TEXTS, 1), lm.tokenizer.bos_token_id)
        written = lm.base.generate(
            start, attention_mask=torch.ones_like(start), max_new_tokens=STORY_TOKENS, do_sample=True, pad_token_id=0
        )
        path.write_text(json.dumps([row.tolist() for row in written]))
    return [(ids[:1], ids[1:]) for ids in json.loads(path.read_text())]


if __name__ == "__main__":
    main(speed, quality)
