"""Predictions: memory that does not grow with the rows, one row at a time, and rows per second on several processes."""

import json
import os
import random
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from fixtures import read_rows, spending, write_rows, zero_shot
from harness import SHARED, Limit, Result, Row, call, main, run_script
from processes import import_all, must_run_ranks

LARGER = (20_000, 200_000)
"""Numbers of rows for the larger model."""


def memory(folder: Path, quick: bool) -> Result:
    """Memory of `predict` by number of rows, with one process per measurement.

    A row has a question, a number and 500 further characters that are not part of the prompt. 5,000 and 50,000 rows go
    through a model of 0.1 M parameters and have answers of at most four tokens, so that rows and not arithmetic are
    measured; 20,000 and 200,000 through one of 5 M with 16 new tokens each, to measure the fraction of a job that is
    neither prompts nor answers: reading rows, encoding, journal, output file. One thread; peak resident memory of the
    whole process, including pages of mapped files.
    """
    sizes = (1000, 10_000) if quick else (5000, 50_000, *LARGER)
    write_questions(folder / "small.jsonl", 500)
    rows = []
    for size in sizes:
        write_questions(folder / f"{size}.jsonl", size)
        rows.append(call(predict_rows, folder, size))
        print(rows[-1], flush=True)
    limits = [
        Limit(f"MB that {more:,} rows take more than {fewer:,}", b["peak MB"] - a["peak MB"], 100, "max")
        for fewer, more, a, b in zip(sizes[::2], sizes[1::2], rows[::2], rows[1::2], strict=True)
    ]
    if not quick:
        share = rows[3]["not the model's"]
        limits.append(Limit(f"share of {LARGER[1]:,} rows that is not the model's", share, 0.05, "max"))
    return rows, limits


def write_questions(path: Path, count: int) -> None:
    rng = random.Random(1)
    words = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u")]
    questions = (" ".join(rng.choices(words, k=rng.randint(3, 20))) for _ in range(count))
    write_rows(
        path,
        (
            {"number": number, "question": question, "answer": words[number % 60], "note": "." * 500}
            for number, question in enumerate(questions)
        ),
    )


def predict_rows(folder: str, count: int) -> Row:
    """Predict the rows of a file; return the row of the table."""
    from partita.model import Model

    os.chdir(folder)
    larger = count in LARGER
    base_model = {"type": "scratch", "tokenizer": "word", "vocab_size": 256, "context_length": 64}
    config = zero_shot(
        base_model | {"size": "mini" if larger else "nano"},
        "question answer",
        tokens=4,
        data={"source": "small.jsonl"},
        trainer={"batch_size": 256},
    )
    if larger:
        config["generation"] = {"max_new_tokens": 16, "min_new_tokens": 16}
    model = Model(config, quiet=True)
    model._backend.pipeline()
    output = Path(f"out{count}.jsonl")
    started = time.perf_counter()
    stats = model.predict(f"{count}.jsonl", output=output).stats
    seconds = time.perf_counter() - started
    with output.open("rb") as file:
        assert sum(1 for _ in file) == stats.rows == count
    return {
        "rows": count,
        "answered": stats.ok,
        "seconds": round(seconds, 1),
        "rows a second": round(count / seconds),
        "not the model's": round(1 - (stats.prefill_seconds + stats.decode_seconds) / seconds, 4),
        "MB written": round(output.stat().st_size / 2**20, 1),
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


# One row at a time


def single(folder: Path, quick: bool) -> Result:
    """One row at a time compared with a loop over `generate`: CPU seconds, and equal answers.

    Needs the shared folder next to the repository. A model of 5 M parameters answers 64 rows with 32 new tokens each,
    without training and with a LoRA adapter after three steps; one thread. The loop encodes a prompt, calls
    transformers' `generate`, of peft's model if there is an adapter, decodes the answer and writes it. partita is
    `Model.predict` with a batch size of 1, with its journal: one call for all rows, and one call for each. In turn in
    one process, after a round that is not counted; medians of five, and of the ratios of each round.
    """
    run_script([SHARED / "peers" / "workload.py", folder])
    rounds, count = (1, 16) if quick else (5, 64)
    rows: list[Row] = []
    limits: list[Limit] = []
    for name in ("no training", "LoRA"):
        found = call(predict_singly, folder, name == "LoRA", count, rounds)
        loop = found["seconds"]["generate"]
        for who, seconds in found["seconds"].items():
            rows.append(
                {
                    "model": name,
                    "who": who,
                    "rows": count,
                    "CPU s": round(statistics.median(seconds), 3),
                    "ms a row": round(1000 * statistics.median(seconds) / count, 2),
                    "speed over generate": round(
                        statistics.median(a / b for a, b in zip(loop, seconds, strict=True)), 3
                    ),
                }
            )
        limits += [
            Limit(f"{name}, one call: speed over a loop over generate", rows[-2]["speed over generate"], 1, "min"),
            Limit(f"{name}: rows with other answers", found["other"], 0, "max"),
        ]
    return rows, limits


def predict_singly(folder: str, adapted: bool, count: int, rounds: int) -> Row:
    """Return the CPU seconds of each contender, and the number of rows whose answers differ."""
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    model, generate = (adapted_models if adapted else base_models)(folder)
    tokenizer = model._backend.pipeline().lm.tokenizer
    prompts = [row["prompt"] for row in read_rows(Path("rows.jsonl"))[:count]]
    answers: dict[str, list[str]] = {}

    def loop() -> None:
        with torch.inference_mode(), Path("loop.jsonl").open("w", encoding="utf8") as file:
            for prompt in prompts:
                inputs = tokenizer(prompt, return_tensors="pt")
                tokens = generate(**inputs, min_new_tokens=32, max_new_tokens=32, do_sample=False)
                text = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
                file.write(json.dumps({"prompt": prompt, "response_raw": text}) + "\n")
        answers["generate"] = [row["response_raw"] for row in read_rows(Path("loop.jsonl"))]

    def one_call() -> None:
        rows = [{"prompt": prompt} for prompt in prompts]
        found = model.predict(rows, "call.jsonl", batch_size=1, fresh=True)
        answers["partita, one call"] = [row["response_raw"] for row in found]

    def a_call_each() -> None:
        answers["partita, a call for each row"] = [
            model.predict([{"prompt": prompt}], batch_size=1, fresh=True)[0]["response_raw"] for prompt in prompts
        ]

    contenders = {"generate": loop, "partita, one call": one_call, "partita, a call for each row": a_call_each}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, work in contenders.items():
            with spending() as spent:
                work()
            if number:
                seconds[name].append(spent.cpu)
    loop_answers = answers.pop("generate")
    other = sum(one != two for found in answers.values() for one, two in zip(found, loop_answers, strict=True))
    return {"seconds": seconds, "other": other}


def single_config(folder: str, **changes: Any) -> Row:
    config = zero_shot(
        f"{folder}/tiny", "prompt response", tokens=32, prompt={"template": "{prompt}", "chat": False}, **changes
    )
    config["generation"]["min_new_tokens"] = 32
    return config


def base_models(folder: str) -> tuple[Any, Any]:
    """Return partita's model, and `generate` of transformers'."""
    import torch
    from transformers import AutoModelForCausalLM

    from partita.model import Model

    peer = AutoModelForCausalLM.from_pretrained(f"{folder}/tiny", dtype=torch.float32).eval()
    return Model(single_config(folder), quiet=True), peer.generate


def adapted_models(folder: str) -> tuple[Any, Any]:
    """Train a LoRA adapter for three steps; return partita's model of the run, and `generate` of peft's."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from partita.model import Model

    trainer = {"type": "finetune", "learning_rate": 0.01, "max_steps": 3, "batch_size": 4, "skip_all_evaluation": True}
    config = single_config(folder, trainer=trainer, adapter={"type": "lora"}, data={"source": "rows.jsonl"})
    run = Model(config, quiet=True).train(run=Path(folder, "run")).run
    peer = AutoModelForCausalLM.from_pretrained(f"{folder}/tiny", dtype=torch.float32)
    return Model.load(run, quiet=True), PeftModel.from_pretrained(peer, str(run / "model")).eval().generate


# Several processes


def processes(folder: Path, quick: bool) -> Result:
    """Rows per second of `predict` on 2 processes of one thread each, compared with one process of one thread.

    Needs the shared folder next to the repository. A model of 5 M parameters answers 2,048 rows with up to 32 new
    tokens, in 64 slots per process. Time is that of the whole call, from reading rows to the output file, with the
    model in memory and a given batch size; medians of five, in turn. Two processes that only multiply matrices show the
    limit of the machine.
    """
    rounds, copies = (1, 1) if quick else (5, 4)
    import_all()
    run_script([SHARED / "peers" / "workload.py", folder])
    texts = [row["prompt"] for row in read_rows(folder / "rows.jsonl")]
    # All rows differ: equal prompts would be answered once.
    write_rows(folder / "many.jsonl", ({"prompt": f"{text} {copy}"} for copy in range(copies) for text in texts))
    count = copies * len(texts)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    multiplied: dict[int, list[float]] = {1: [], 2: []}
    for number in range(rounds):
        for ranks in (1, 2):
            seconds[ranks].append(timed(folder, ranks, number))
            multiplied[ranks].append(products(folder, ranks))
    same = len({path.read_bytes() for path in folder.glob("out-*.jsonl")}) == 1
    rates = {ranks: count / statistics.median(times) for ranks, times in seconds.items()}
    roof = statistics.median(multiplied[2]) / statistics.median(multiplied[1])
    table = [
        {
            "processes": ranks,
            "rows": count,
            "seconds": round(statistics.median(times), 2),
            "rows a second": round(rates[ranks], 1),
            "GFLOP/s of products alone, together": round(statistics.median(multiplied[ranks]), 1),
        }
        for ranks, times in seconds.items()
    ]
    limits = [
        Limit("rows a second of 2 processes over 1", round(rates[2] / rates[1], 3), 1.8, "min"),
        Limit("the same over what 2 processes of products reach", round(rates[2] / rates[1] / roof, 3), 0.9, "min"),
        Limit("the same answers", float(same), 1, "min"),
    ]
    return table, limits


def timed(folder: Path, ranks: int, number: int) -> float:
    """Return the seconds of a prediction on rank 0, whose call ends after those of all ranks."""
    config = zero_shot(str(folder / "tiny"), "prompt response", tokens=32)

    def work(rank: int) -> None:
        from partita.model import Model

        os.chdir(folder)
        model = Model(config, quiet=True)
        model._backend.pipeline()
        model._backend.context.process_group.all_gather_object(None, "ready")
        started = time.perf_counter()
        model.predict("many.jsonl", output=f"out-{ranks}-{number}.jsonl", batch_size=64, fresh=True)
        if rank == 0:
            Path("seconds").write_text(str(time.perf_counter() - started), encoding="utf8")

    must_run_ranks(ranks, work)
    return float((folder / "seconds").read_text(encoding="utf8"))


def products(folder: Path, ranks: int) -> float:
    """Return the total GFLOP/s of `ranks` processes that multiply matrices for a second."""

    def work(rank: int) -> None:
        import torch

        a, b = torch.randn(256, 1024), torch.randn(1024, 1024)
        done, end = 0, time.perf_counter() + 1
        while time.perf_counter() < end:
            torch.matmul(a, b)
            done += 1
        (folder / f"products-{rank}").write_text(json.dumps(done * 2 * 256 * 1024 * 1024 / 1e9), encoding="utf8")

    must_run_ranks(ranks, work)
    return sum(float((folder / f"products-{rank}").read_text(encoding="utf8")) for rank in range(ranks))


if __name__ == "__main__":
    main(memory, single, processes)
