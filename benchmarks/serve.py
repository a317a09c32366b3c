"""The HTTP server: its CPU time compared with predict and with transformers serve, and time to the first token."""

import http.client
import json
import operator
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fixtures import read_rows, words, write_rows
from harness import SHARED, Limit, Result, Row, call, command, main, one_thread, peer_environment, run_script
from served import NEW_TOKENS, ServerProcess, all_clients, ask, partita_server, pieces, write_config

CLIENTS = 64
TURN_SECONDS = 2.0
OPTIONS = ("--batch-size", str(CLIENTS), "--context", "512", "--quiet")
BATCHING = ("--continuous-batching", "--cb-num-blocks", "160")
"""Options of transformers serve: 160 pages of 256 tokens for 64 requests of up to 512."""


# Load


def load(folder: Path, quick: bool) -> Result:
    """CPU seconds of the server process for 64 clients with 8 requests each, compared with those of `predict`.

    Needs the shared folder next to the repository. 512 rows with prompts of 4 to 480 tokens, 32 new tokens each,
    greedy, fp32, one thread for the model, 64 slots. tiny has 5 M parameters, small 99 M. A client sends its next
    request when it has the answer to the last, on one connection, one row for each request. `predict` reads the rows
    from a file and writes one. Each way is a new process, which has answered 64 other rows before. The three processes
    run in turns of two seconds and are stopped in between (SIGSTOP), because the speed of the machine drifts by more
    than the difference. Answers are compared as texts. The limit is for the larger model: with tiny, a request costs
    20 ms, and HTTP counts.
    """
    run_script([SHARED / "peers" / "workload.py", folder])
    rows: list[Row] = []
    for name in ("tiny",) if quick else ("tiny", "small"):
        found = load_of(folder, name)
        base = found["predict"]
        for way, run in found.items():
            differ = sum(map(operator.ne, run["answers"], base["answers"]))
            row = {
                "model": name,
                "way": way,
                "CPU s": run["CPU s"],
                "over predict": round(run["CPU s"] / base["CPU s"], 3),
            }
            rows.append(row | {"rows": len(run["answers"]), "answers that differ": differ})
    largest = rows[-1]["model"]
    limits = [
        Limit(f"CPU seconds of {path} over those of predict, {largest}", row["over predict"], 1.1, "max")
        for row in rows
        if row["model"] == largest and (path := row["way"]) != "predict"
    ]
    return rows, [*limits, Limit("answers that differ", sum(row["answers that differ"] for row in rows), 0, "max")]


def load_of(folder: Path, name: str) -> dict[str, Row]:
    """Answer the rows by `predict` and two servers, in turns; return the CPU seconds and answers of each."""
    config, log = write_config(folder, name), folder / "server.log"
    prompts = [row["prompt"] for row in read_rows(folder / "rows.jsonl")]
    ways: dict[str, Callable[..., Row]] = {"/predict": predicted, "/v1/completions": completed}
    with ExitStack() as opened:
        worker = opened.enter_context(started(predict_all, folder, name))
        jobs: dict[str, Callable[[], Row]] = {"predict": partial(result_of, worker)}
        processes = [worker]
        for way, answer in ways.items():
            server = opened.enter_context(partita_server(config, *OPTIONS, log=log))
            ask_all(server, answer, [row["prompt"] for row in warm_up_rows()])
            jobs[way] = partial(serve_all, server, answer, prompts)
            processes.append(server.process)
        return dict(zip(jobs, in_turns(processes, list(jobs.values())), strict=True))


def in_turns(processes: Sequence[subprocess.Popen[Any]], jobs: Sequence[Callable[[], Row]]) -> list[Row]:
    """Run one of several processes at a time, for TURN_SECONDS each, until the job of each has returned."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        results = [pool.submit(job) for job in jobs]
        while any(not result.done() for result in results):
            for process, result in zip(processes, results, strict=True):
                if not result.done():
                    process.send_signal(signal.SIGCONT)
                    wait([result], timeout=TURN_SECONDS)
                    process.send_signal(signal.SIGSTOP)
        return [result.result() for result in results]


def warm_up_rows(count: int = CLIENTS) -> list[Row]:
    rng = random.Random(9)
    return [{"prompt": words(rng, rng.randint(5, 60))} for _ in range(count)]


def predict_all(folder: str, name: str) -> Row:
    """Predict other rows, wait for a line, and predict the rows of a file; return the CPU seconds and the answers."""
    from partita.model import Model

    os.chdir(folder)
    model = Model(f"{name}.json", quiet=True)
    model.predict(warm_up_rows(), batch_size=CLIENTS, fresh=True)
    write_rows(Path("prompts.jsonl"), [{"prompt": row["prompt"]} for row in read_rows(Path("rows.jsonl"))])
    print("ready", flush=True)
    input()
    cpu = time.process_time()
    found = model.predict("prompts.jsonl", Path(f"{name}-predict.jsonl"), batch_size=CLIENTS, fresh=True)
    spent = time.process_time() - cpu
    return {"CPU s": round(spent, 2), "answers": [row["response"] for row in found]}


@contextmanager
def started(function: Callable[..., Row], *arguments: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a function of this script in a process, and wait until it has printed a line."""
    words, pipe = command(function, *arguments), subprocess.PIPE
    with subprocess.Popen(words, env=one_thread(), stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def result_of(process: subprocess.Popen[str]) -> Row:
    """Send a line to a process of `started`, and return its result."""
    output = process.communicate("\n")[0]
    result: Row = json.loads(output.splitlines()[-1])
    return result


def serve_all(server: ServerProcess, answer: Callable[..., Row], prompts: Sequence[str]) -> Row:
    """Answer the prompts by a server; return its CPU seconds and the answers."""
    before = server.cpu_seconds
    answers = ask_all(server, answer, prompts)
    spent = server.cpu_seconds - before
    return {"CPU s": round(spent, 2), "answers": [answer["text"].strip() for answer in answers]}


def ask_all(server: ServerProcess, answer: Callable[..., Row], prompts: Sequence[str], **more: Any) -> list[Row]:
    """Answer prompts with 64 clients; return the answers in the order of the prompts."""

    def client(number: int) -> list[Row]:
        connection = server.connection()
        try:
            return [answer(connection, prompt, **more) for prompt in prompts[number::CLIENTS]]
        finally:
            connection.close()

    found = all_clients(min(CLIENTS, len(prompts)), client)
    return [found[index % CLIENTS][index // CLIENTS] for index in range(len(prompts))]


def predicted(connection: http.client.HTTPConnection, prompt: str) -> Row:
    """Return the answer of /predict."""
    answer = ask(connection, "/predict", {"rows": [{"prompt": prompt}]})
    assert answer.status == 200, answer
    return {"text": answer.json["predictions"][0]["response"]}


def completed(connection: http.client.HTTPConnection, prompt: str, tokens: int = NEW_TOKENS) -> Row:
    """Return the greedy answer of /v1/completions, with its number of tokens."""
    answer = ask(connection, "/v1/completions", {"prompt": prompt, "max_tokens": tokens, "temperature": 0})
    assert answer.status == 200, answer
    return {"text": answer.json["choices"][0]["text"], "tokens": answer.json["usage"]["completion_tokens"]}


# transformers serve


def peer(folder: Path, quick: bool) -> Result:
    """Requests per CPU second of partita serve, and of transformers serve for the same requests of 64 clients.

    Needs the shared folder next to the repository. The models and prompts of the part load: 256 rows for tiny, 64 for
    small, to /v1/completions, which has no chat template; up to 32 new tokens, greedy, fp32, one thread for the model.
    transformers serve has the same versions of torch and transformers, in a separate environment, which the script
    creates. By default it answers one request after the other. With --continuous-batching its cache has 160 pages of
    256 tokens, enough for 64 requests: without that setting the cache takes most of the memory. The servers run one
    after the other, each as a new process, three times; the table has medians. CPU seconds are those of the server and
    its child processes, after 64 other requests of 4 tokens. An answer differs if its text or its number of tokens is
    not that of partita in the first round. The limits are for the faster mode of transformers serve.
    """
    package = f"transformers[serving]=={version('transformers')}"
    programs, reason = peer_environment(folder, package, same=("tokenizers",))
    if programs is None:
        return [{"server": "skipped", "reason": reason}], []
    run_script([SHARED / "peers" / "workload.py", folder])
    prompts = [row["prompt"] for row in read_rows(folder / "rows.jsonl")]
    rows, limits = [], []
    for name, count in (("tiny", 64),) if quick else (("tiny", 256), ("small", 64)):
        found = serve_in_turn(folder, programs, name, prompts[:count], rounds=1 if quick else 3)
        own, *others = table = [median_row(name, server, runs, found["partita"][0]) for server, runs in found.items()]
        rows += table
        seconds = [row["CPU s"] for row in others if "error" not in row]
        if seconds:
            ratio = round(min(seconds) / own["CPU s"], 2)
            limits.append(Limit(f"requests per CPU second over those of transformers, {name}", ratio, 2.0, "min"))
    differ = sum(row.get("answers that differ", 0) for row in rows)
    return rows, [*limits, Limit("answers that differ", differ, 0, "max")]


def serve_in_turn(
    folder: Path, programs: Path, name: str, prompts: Sequence[str], *, rounds: int
) -> dict[str, list[Row]]:
    """Answer the prompts by each server in turn; return the results of each. A server that failed is not run again."""
    config = write_config(folder, name, at_least=0)
    log = folder / "server.log"
    words = [str(programs / "transformers"), "serve", str(folder / name), "--device", "cpu", "--dtype", "float32"]
    found: dict[str, list[Row]] = {}
    for _ in range(rounds):
        servers = {
            "partita": partita_server(config, *OPTIONS, log=log),
            "transformers": ServerProcess(words, log=log, HF_HUB_OFFLINE="1"),
            "transformers, continuous batching": ServerProcess([*words, *BATCHING], log=log, HF_HUB_OFFLINE="1"),
        }
        for way, server in servers.items():
            runs = found.setdefault(way, [])
            if runs and "error" in runs[-1]:
                continue
            try:
                runs.append(serve_prompts(server, prompts))
            except Exception as error:  # a peer may fail in any way
                if way == "partita":
                    raise
                runs.append({"error": " ".join(f"{type(error).__name__}: {error}".split())[-300:].replace("|", "/")})
            print(name, way, {key: value for key, value in runs[-1].items() if key != "answers"}, flush=True)
    return found


def serve_prompts(server: ServerProcess, prompts: Sequence[str]) -> Row:
    """Answer the prompts by a new server after others; return its use of the machine, and the answers."""
    with server:
        ask_all(server, completed, [row["prompt"] for row in warm_up_rows()], tokens=4)
        before, started = server.cpu_seconds, time.perf_counter()
        answers = ask_all(server, completed, prompts)
        seconds, spent = time.perf_counter() - started, server.cpu_seconds - before
        return {"CPU s": round(spent, 2), "seconds": round(seconds, 2), "MB": server.resident_mb, "answers": answers}


def median_row(name: str, server: str, runs: list[Row], first: Row) -> Row:
    """Return the row of a server: medians of its runs, and the most answers that differ from those of `first`."""
    row: Row = {"model": name, "server": server, "requests": len(first["answers"])}
    if "error" in runs[-1]:
        return row | {"error": runs[-1]["error"]}
    seconds, wall, memory = (statistics.median(run[key] for run in runs) for key in ("CPU s", "seconds", "MB"))
    differ = max(sum(map(operator.ne, run["answers"], first["answers"])) for run in runs)
    row |= {"CPU s": seconds, "requests per CPU s": round(row["requests"] / seconds, 2), "seconds": wall}
    return row | {"MB": memory, "answers that differ": differ}


# Time to the first token


def first_token(folder: Path, quick: bool) -> Result:
    """Time to the first token of streams: 8 clients compared with one.

    Needs the shared folder next to the repository. The model tiny of the part load, prompts of 100 to 300 characters,
    32 new tokens, 8 slots. A client starts its next stream up to 0.3 s after its last one has ended. Rounds of one
    client and of 8 alternate. `one prefill` is the time of the model for a prompt, from `predict` with one row at a
    time.
    """
    run_script([SHARED / "peers" / "workload.py", folder])
    config = write_config(folder, "tiny")
    prompts = [row["prompt"] for row in read_rows(folder / "rows.jsonl") if 100 < len(row["prompt"]) < 300]
    prefill = call(prefill_seconds, folder, prompts[:32])
    seconds: dict[int, list[float]] = {1: [], 8: []}
    options = ("--batch-size", "8", "--context", "512", "--quiet")
    rng = random.Random(0)
    with partita_server(config, *options, log=folder / "server.log") as server:
        for _ in range(2 if quick else 6):
            for clients in seconds:
                rng.shuffle(prompts)
                seconds[clients] += first_tokens(server, clients, prompts, 24 // min(clients, 3))
    one, eight = (percentile(found, 0.95) for found in seconds.values())
    rows = [
        {
            "clients": clients,
            "requests": len(found),
            "median ms": round(1000 * statistics.median(found), 1),
            "p95 ms": round(1000 * percentile(found, 0.95), 1),
            "one prefill ms": round(1000 * prefill, 1),
        }
        for clients, found in seconds.items()
    ]
    most = 1.3 * one + prefill
    return rows, [Limit("p95 with 8 clients over 1.3 x that of one client plus a prefill", eight / most, 1.0, "max")]


def prefill_seconds(folder: str, prompts: list[str]) -> float:
    """Return the time in which the model reads a prompt by itself."""
    from partita.model import Model

    os.chdir(folder)
    model = Model("tiny.json", quiet=True)
    model.predict(warm_up_rows(4), batch_size=1, fresh=True)
    stats = model.predict([{"prompt": prompt} for prompt in prompts], batch_size=1, fresh=True).stats
    return float(stats.prefill_seconds / len(prompts))


def first_tokens(server: ServerProcess, clients: int, prompts: list[str], count: int) -> list[float]:
    """Return the times to the first token of `count` streams of each client."""

    def client(number: int) -> list[float]:
        rng, times = random.Random(number), []
        connection = server.connection()
        for index in range(count):
            time.sleep(rng.uniform(0, 0.3))
            prompt = prompts[(number * count + index) % len(prompts)]
            started = time.perf_counter()
            parts = pieces(connection, "/v1/completions", {"prompt": prompt, "max_tokens": NEW_TOKENS})
            next(parts)
            times.append(time.perf_counter() - started)
            for _ in parts:
                pass
        connection.close()
        return times

    return [seconds for found in all_clients(clients, client) for seconds in found]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(round(share * len(values)), len(values) - 1)]


if __name__ == "__main__":
    main(load, peer, first_token)
