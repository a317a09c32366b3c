"""Answers to many rows on a CPU, compared with transformers and with other libraries: CPU seconds and equal answers.

512 prompts of skewed lengths (rows), also with a shared instruction (shared), two new models (tiny: 5 M parameters,
small: 99 M), 32 new tokens each, greedy, one thread, one process per run. The environments of other libraries are kept
for the next run in the folder that the environment variable PARTITA_PEERS names, if it is set.
"""

import hashlib
import json
import os
import random
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from fixtures import read_rows, zero_shot
from generate_contenders import CONTENDERS, OUR_INT8, OUR_INT8_FASTEST, Peers, compare_contenders, ratio, said
from harness import SHARED, Limit, Result, Row, call, main, run_script

NEW_TOKENS = 32
WORKS = {"tiny": ("rows", "shared", "mixed"), "small": ("rows", "shared")}
ROUNDS = {"tiny": 3, "small": 1}
BATCHES = {"tiny": (16, 32, 64), "small": (32,)}
MIXED_BUDGET = "700MB"
ROWS_ALONE = {"tiny": 512, "small": 32}
"""Number of rows answered one at a time; the time for all rows is extrapolated."""
SOME_ROWS = {"tiny": 512, "small": 128}
"""Number of rows in the comparison with other libraries, spread over all."""
QUICK_ROWS = {"tiny": 64, "small": 16}
DOCUMENTS, OPENVINO, SORTED_32 = "documents", "OpenVINO GenAI fp32", "sorted, batches of 32"
INT8 = {"quantization": {"type": "int8_dynamic_activation_int8_weight"}}
FASTEST = {"model_parameters": {"dtype": "fastest"}}
CONFIGURATIONS: dict[str, Row] = {
    "partita": {},
    "partita, dtype: fastest": FASTEST,
    OUR_INT8: INT8,
    OUR_INT8_FASTEST: INT8 | FASTEST,
}
"""Sections of the config for each configuration of partita beside other libraries; the first is exact, in fp32."""


def batches(folder: Path, quick: bool) -> Result:
    """Answers to 512 rows compared with plain transformers: CPU seconds, peak memory, and equal answers.

    Needs the shared folder next to the repository. Two new models (tiny: 5 M parameters, small: 99 M), prompts of
    skewed lengths (rows), also with a shared instruction (shared), 32 new tokens each, greedy, fp32, one thread, one
    process per run. Peers: transformers' `generate` one row at a time with all scores kept, as in Ludwig's predict,
    and in batches of rows sorted by length. partita is `Model.predict` with its journal, at the batch size that it
    finds; the search is timed separately. mixed: answers of 2 to 256 tokens, which end as if by an end token; the peer
    stops each row of a batch at its end, and the batch with its longest row; partita has as much memory as the peer
    used (memory_budget), and all memory in another row.

    The last columns compare a run with the limits of the machine. Prompts: 2 FLOP per weight and token, without the
    embedding, with the output layer for only the last token of each prompt, and with a shared prefix counted once, at
    the measured rate of float32 matrix products of the faster of torch's two libraries (transformers uses MKL, partita
    the faster one). Answers: the same per token, or reading the weights and the keys and values of all rows in every
    step at the measured copy bandwidth, whichever takes longer.
    """
    run_script([SHARED / "peers" / "workload.py", folder])
    rows: list[Row] = []
    limits: list[Limit] = []

    def study(name: str) -> dict[str, list[Row]]:
        return {work: compare(folder, name, work, rounds=1 if quick else ROUNDS[name]) for work in WORKS[name]}

    names = ["tiny"] if quick else ["tiny", "small"]
    with ThreadPoolExecutor(len(names)) as pool:  # each uses separate processes on a separate core
        for name, found in zip(names, pool.map(study, names), strict=True):
            for work, table in found.items():
                rows += table
                limits += limits_of(name, work, table)
    return rows, limits


def tiny_rows(folder: Path, quick: bool) -> Result:
    """Answers of tiny to 512 rows compared with libraries that a user would choose on a CPU.

    Needs the shared folder next to the repository. The work of the part batches, without journal for the others.
    CTranslate2, OpenVINO GenAI, llama.cpp (server of xllamacpp in its process), onnxruntime-genai and transformers'
    continuous batching; all but the last in separate environments, which the script creates. CPU seconds are those of
    answering, from texts of prompts to token ids, without loading and conversion, after a first batch of other rows;
    for partita they also contain texts of answers and the journal, and its search for a batch size comes before. The
    end token is not allowed. All settings of a contender run in the first round and the fastest one of them again, two
    times: tokens (of a batch, or of a step), rows (in a batch, or at once), slots. CTranslate2 has a static prompt for
    a shared prefix, OpenVINO prefix caching, llama.cpp the last prompt of each slot. `CPU s over ours` is the median of
    the ratios to partita in the same round, and `equal answers` counts texts equal to those of partita. The limits are
    for the fastest contender in fp32 of which all answers are equal, and for int8 beside int8. With int8_bfloat16,
    CTranslate2 computes what is not in int8 in bfloat16, as partita does with dtype: fastest.
    """
    return with_libraries(folder, "tiny", "rows", quick=quick)


def tiny_shared(folder: Path, quick: bool) -> Result:
    """Answers of tiny to prompts with a shared instruction compared with other libraries, as in the part tiny_rows.

    Needs the shared folder next to the repository.
    """
    return with_libraries(folder, "tiny", "shared", quick=quick)


def small_rows(folder: Path, quick: bool) -> Result:
    """Answers of small to 128 of the 512 rows compared with other libraries, as in the part tiny_rows, but one round.

    Needs the shared folder next to the repository. One setting for each contender.
    """
    return with_libraries(folder, "small", "rows", quick=quick)


def small_shared(folder: Path, quick: bool) -> Result:
    """Answers of small to 128 of the 512 rows with a shared instruction, as in the part small_rows.

    Needs the shared folder next to the repository.
    """
    return with_libraries(folder, "small", "shared", quick=quick)


def documents(folder: Path, quick: bool) -> Result:
    """Answers of tiny to eight questions about each of 64 documents, in mixed order, 32 new tokens each.

    Needs the shared folder next to the repository. A document has 250 words of the prompts of the part batches and a
    question 4 to 12. Peers: transformers' `generate` in batches of 32 rows sorted by length, and OpenVINO GenAI with
    prefix caching, in the environment of the part tiny_rows. One thread, one process per run, in turn; CPU seconds of
    answering, and the medians of the ratios to partita in the same round.
    """
    run_script([SHARED / "peers" / "workload.py", folder])
    write_documents(folder, count=8 if quick else 64)
    prompts, _ = questions(folder, DOCUMENTS)
    peers = Peers(folder, "tiny", DOCUMENTS, prompts, new_tokens=NEW_TOKENS)
    openvino = next(one for one in CONTENDERS if one.who == OPENVINO)
    peers.prepare(openvino)
    tasks: dict[str, Callable[[], Row]] = {
        "partita": partial(call, answer_with_partita, folder, "tiny", DOCUMENTS),
        SORTED_32: partial(call, answer_sorted, folder, "tiny", DOCUMENTS, 32),
    }
    if OPENVINO not in peers.reasons:
        tasks[OPENVINO] = partial(peers.start, openvino, {"rows": 128, "tokens": 512})
    runs: dict[str, list[Row]] = {who: [] for who in tasks}
    for _ in range(1 if quick else ROUNDS["tiny"]):
        for who, task in tasks.items():
            runs[who].append(said(who, task()))
    ours = runs["partita"]
    rows: list[Row] = []
    for who, found in runs.items():
        same = {hashed(run["texts"]) for run in found} == {hashed(ours[0]["texts"])}
        rows.append(
            {
                "model": "tiny",
                "rows": len(prompts),
                "who": who,
                "CPU s": round(statistics.median(run["cpu"] for run in found), 2),
                "CPU s over ours": round(ratio(found, ours), 2),
                "equal answers": same,
                "peak MB": max(run["peak"] for run in found),
                "runs": [round(run["cpu"], 2) for run in found],
            }
        )
    rows += [{"model": "tiny", "who": who, "skipped": reason} for who, reason in peers.reasons.items()]
    least = {SORTED_32: 2.0, OPENVINO: 1.0}
    limits = [
        Limit(f"documents: over {who}", ratio(runs[who], ours), least[who], "min") for who in least if who in runs
    ]
    equal = all(row["equal answers"] for row in rows if "skipped" not in row)
    return rows, [*limits, Limit("documents: the same answers as all others", float(equal), 1, "min")]


def write_documents(folder: Path, *, count: int) -> None:
    """Write documents.jsonl: prompts with eight questions about each document, in mixed order."""
    words = " ".join(row["prompt"] for row in read_rows(folder / "rows.jsonl")).split()
    rng = random.Random(0)

    def some_words(number: int) -> str:
        start = rng.randrange(len(words) - number)
        return " ".join(words[start : start + number])

    prompts = []
    for _ in range(count):
        document = some_words(250)
        prompts += [f"{document} Question: {some_words(rng.randint(4, 12))}" for _ in range(8)]
    rng.shuffle(prompts)
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    (folder / f"{DOCUMENTS}.jsonl").write_text("".join(lines), encoding="utf8")


def with_libraries(folder: Path, name: str, work: str, *, quick: bool) -> Result:
    """Compare our configurations with other libraries; return the rows of the table and the limits."""
    run_script([SHARED / "peers" / "workload.py", folder])
    count = (QUICK_ROWS if quick else SOME_ROWS)[name]
    prompts, _ = questions(folder, work, count)
    peers = Peers(folder, name, work, prompts, new_tokens=NEW_TOKENS)
    own = {
        who: partial(call, answer_with_partita, folder, name, work, None, count, sections)
        for who, sections in CONFIGURATIONS.items()
    }
    return compare_contenders(peers, own, rounds=1 if quick else ROUNDS[name], one_setting=quick)


def compare(folder: Path, name: str, work: str, *, rounds: int) -> list[Row]:
    """Return a row of the table for each contender; the runs of all contenders alternate."""
    runs: dict[str, list[Row]] = {}

    def run(contender: str, task: Callable[..., Row], *more: Any) -> None:
        runs.setdefault(contender, []).append(call(task, folder, name, work, *more))
        print(name, work, contender, {k: v for k, v in runs[contender][-1].items() if k != "texts"}, flush=True)

    for number in range(rounds):
        for batch in BATCHES[name] if work != "mixed" else (32,):
            run(f"sorted, batches of {batch}", answer_sorted, batch)
        if work == "mixed":
            run("partita, all memory", answer_with_partita)
            run("partita", answer_with_partita, MIXED_BUDGET)
            continue
        if number == 0:
            run("one row at a time", answer_alone, ROWS_ALONE[name])
        run("partita", answer_with_partita)
    return [summary(name, work, contender, found) for contender, found in runs.items()]


def summary(name: str, work: str, contender: str, runs: list[Row]) -> Row:
    """Return the medians of the runs of a contender."""
    seconds = statistics.median(run["cpu"] for run in runs)
    first = runs[0]
    found = {
        "model": name,
        "work": work,
        "who": contender,
        "CPU s": round(seconds, 2),
        "tokens/CPU s": round(first["tokens"] / seconds, 1),
        "peak MB": max(run["peak"] for run in runs),
        "MB of the job": max(run["grown"] for run in runs),
        "answers": first["hash"],
        "share of the machine's roof": round(first["roof"] / seconds, 3),
        "runs": [round(run["cpu"], 2) for run in runs],
    }
    return found | {
        key: first[key] for key in ("slots", "tuning s", "prompts s", "answers s", "host s") if key in first
    }


def limits_of(name: str, work: str, rows: list[Row]) -> list[Limit]:
    """Return the limits of a workload."""
    ours = next(row for row in rows if row["who"] == "partita")
    batches = [row for row in rows if row["who"].startswith("sorted")]
    best = min(row["CPU s"] for row in batches)
    wanted = {"rows": 1.5, "shared": 2.5, "mixed": 1.6}[work]
    usual = next(row for row in batches if row["who"].endswith(" 32"))
    memory = ours["peak MB"] / usual["peak MB"]
    same = all(row["answers"] == ours["answers"] for row in rows if row["answers"])
    limits = [
        Limit(f"{name}, {work}: over the best sorted batches", best / ours["CPU s"], wanted, "min"),
        Limit(f"{name}, {work}: peak MB over that of sorted batches of 32", memory, 1, "max"),
        Limit(f"{name}, {work}: the same answers as all others", float(same), 1, "min"),
    ]
    alone = [row for row in rows if row["who"] == "one row at a time"]
    if alone:
        times = alone[0]["CPU s"] / ours["CPU s"]
        limits.append(Limit(f"{name}, {work}: over one row at a time", times, {"rows": 6, "shared": 8}[work], "min"))
    return limits


# Functions run in separate processes


def answer_sorted(folder: str, name: str, work: str, batch: int) -> Row:
    """Answer with transformers' `generate` over batches of rows sorted by the length of their prompts."""
    import torch
    from transformers import StoppingCriteriaList

    tokenizer, model = load_peer(folder, name)
    prompts, limits = questions(folder, work)
    before, cpu = peak(), time.process_time()
    ids = tokenizer(prompts)["input_ids"]
    answers: dict[int, list[int]] = {}
    order = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
    with torch.inference_mode():
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            inputs = tokenizer.pad({"input_ids": [ids[row] for row in part]}, return_tensors="pt")
            width = inputs["input_ids"].shape[1]
            ends = torch.tensor([limits[row] for row in part]) + width
            most = max(limits[row] for row in part)
            stop = StoppingCriteriaList([lambda tokens, scores, ends=ends, **_: ends <= tokens.shape[1]])
            settings = {"min_new_tokens": most, "max_new_tokens": most, "do_sample": False}
            found = model.generate(**inputs, **settings, **({"stopping_criteria": stop} if work == "mixed" else {}))
            for row, tokens in zip(part, found[:, width:].tolist(), strict=True):
                answers[row] = tokens[: limits[row]]
    return measured(folder, name, ids, answers, cpu=time.process_time() - cpu, before=before)


def answer_alone(folder: str, name: str, work: str, count: int) -> Row:
    """Answer with transformers' `generate` one row at a time; the time of fewer rows is scaled by their tokens."""
    import torch

    tokenizer, model = load_peer(folder, name)
    prompts, limits = questions(folder, work)
    chosen = range(0, len(prompts), len(prompts) // count)
    before, cpu = peak(), time.process_time()
    ids = tokenizer(prompts)["input_ids"]
    answers: dict[int, list[int]] = {}
    with torch.inference_mode():
        for row in chosen:
            inputs = torch.tensor([ids[row]])
            settings = {"min_new_tokens": limits[row], "max_new_tokens": limits[row], "do_sample": False}
            found = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                output_scores=True,
                return_dict_in_generate=True,
                **settings,
            )
            answers[row] = found.sequences[0, len(ids[row]) :].tolist()
    spent = time.process_time() - cpu
    whole = sum(len(one) for one in ids) / sum(len(ids[row]) for row in chosen)
    return measured(folder, name, ids, answers, cpu=spent * whole, before=before)


def answer_with_partita(
    folder: str,
    name: str,
    work: str,
    budget: str | None = None,
    count: int | None = None,
    sections: Row | None = None,
) -> Row:
    """Find the batch size, within the budget if there is one, and predict the rows.

    Args:
        folder: Folder of the work.
        name: The model.
        work: The prompts.
        budget: `trainer.memory_budget`.
        count: Number of rows, spread over all; None for all.
        sections: Further sections of the config.
    """
    import torch

    from partita import Model

    torch.set_num_threads(1)
    os.chdir(folder)  # for the journal
    prompts, limits = questions(folder, work, count)
    config = zero_shot(
        f"{folder}/{name}",
        "prompt response",
        tokens=max(limits),
        prompt={"template": "{prompt}", "chat": False},
        trainer={"memory_budget": budget},
        **(sections or {}),
    )
    config["generation"]["min_new_tokens"] = max(limits)
    model = Model(config, quiet=True)
    lm = model._backend.pipeline().lm
    rows = [{"prompt": prompt} for prompt in prompts]
    ids = lm.tokenizer(prompts)["input_ids"]
    cpu = time.process_time()
    size = model.tune(rows).generation
    tuning = time.process_time() - cpu
    before, cpu = peak(), time.process_time()
    more: Row = {}
    if work == "mixed":
        answers = answer_mixed(model, ids, limits, rows=size.rows)
    else:
        found = model.predict(rows, Path(folder, f"{name}-{work}.jsonl"), fresh=True)
        texts = [row["response_raw"] for row in found]
        stats = found.stats
        more = {"prompts s": stats.prefill_seconds, "answers s": stats.decode_seconds, "host s": stats.host_seconds}
        more["texts"] = texts
        answers = dict(enumerate(texts))
    spent = time.process_time() - cpu
    result = measured(folder, name, ids, answers, cpu=spent, before=before, limits=limits, tokenizer=lm.tokenizer)
    more |= {key: round(value, 2) for key, value in more.items() if key != "texts"}
    return result | {"slots": size.rows, "tuning s": round(tuning, 2)} | more


def answer_mixed(model: Any, ids: list[list[int]], limits: list[int], *, rows: int) -> dict[int, list[int]]:
    """Return answers, each as long as its limit."""
    from partita.generation.generator import generate_requests
    from partita.generation.oom_backoff import BatchBudget
    from partita.generation.requests import GenerationSettings
    from partita.lm.base import GenerationRequest

    pipeline = model._backend.pipeline()
    requests = [GenerationRequest(prompt, limit) for prompt, limit in zip(ids, limits, strict=True)]
    with model._backend.tuner.work("generation", model._backend.tuner.known["generation"].size):
        found = generate_requests(pipeline.lm, requests, GenerationSettings(pipeline.generation, BatchBudget(rows), 0))
    return {row: list(answer.ids) for row, answer in enumerate(found)}


def load_peer(folder: str, name: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/{name}", padding_side="left")
    return tokenizer, AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", dtype=torch.float32).eval()


def questions(folder: str | Path, work: str, count: int | None = None) -> tuple[list[str], list[int]]:
    """Return prompts, or `count` of them, and the number of tokens of each answer."""
    prompts = [row["prompt"] for row in read_rows(Path(folder, f"{'rows' if work == 'mixed' else work}.jsonl"))]
    if count is not None:
        prompts = prompts[:: len(prompts) // count]
    if work != "mixed":
        return prompts, [NEW_TOKENS] * len(prompts)
    rng = random.Random(1)
    return prompts, [min(256, max(2, round(rng.lognormvariate(3.6, 0.9)))) for _ in prompts]


def measured(
    folder: str,
    name: str,
    ids: list[list[int]],
    answers: dict[int, Any],
    *,
    cpu: float,
    before: int,
    limits: list[int] | None = None,
    tokenizer: Any = None,
) -> Row:
    """Return the measurements of a run. Answers are compared as texts, as in prediction files."""
    from transformers import AutoTokenizer

    tokenizer = tokenizer or AutoTokenizer.from_pretrained(f"{folder}/{name}")
    texts = [
        answer if isinstance(answer, str) else tokenizer.decode(answer, skip_special_tokens=True)
        for _, answer in sorted(answers.items())
    ]
    peak_now = peak()
    counts = [limits[row] if isinstance(answer, str) and limits else len(answer) for row, answer in answers.items()]
    whole = len(answers) == len(ids)
    counts = counts if whole else [NEW_TOKENS] * len(ids)
    return {
        "cpu": cpu,
        "tokens": sum(counts),
        "peak": peak_now,
        "grown": peak_now - before,
        "hash": hashed(texts) if whole else "",
        "texts": texts,
        "roof": roof_seconds(folder, name, list(map(len, ids)), counts, len(os.path.commonprefix(ids))),  # noqa: RUF071
    }


def hashed(texts: list[str]) -> str:
    return hashlib.md5(json.dumps(texts).encode()).hexdigest()[:12]


def roof_seconds(folder: str, name: str, prompts: list[int], answers: list[int], shared: int) -> float:
    """Return the minimum seconds for prompts with a shared prefix and for answers, at the rates of this machine."""
    import torch

    shape = json.loads(Path(folder, name, "config.json").read_text(encoding="utf8"))
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner
    head, rows, more = shape["vocab_size"] * hidden, len(prompts), sum(answers) - len(answers)
    reading = 2 * ((sum(prompts) - (rows - 1) * shared) * layers * layer + rows * head)
    seen = sum((length - shared) * new + new * new / 2 for length, new in zip(prompts, answers, strict=True))
    held = 4 * (2 * layers * keys * (seen + shared * max(answers)) + (layers * layer + head) * max(answers))
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    libraries = [
        lambda: left @ right,
        lambda: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], ""),
    ]
    rate = 2 * 1024**3 / min(map(usual_seconds, libraries))
    source = torch.zeros(64 * 2**20)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * 4 / usual_seconds(lambda: target.copy_(source))
    return reading / rate + max(2 * more * (layers * layer + head) / rate, held / copied)


def usual_seconds(work: Callable[[], Any]) -> float:
    """Return the median seconds of a few runs, without the first ones."""
    seconds = []
    for _ in range(8):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds[2:])


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main(batches, tiny_rows, tiny_shared, small_rows, small_shared, documents)
