"""Clients of the HTTP server that leave or misbehave, and stops under load."""

import http.client
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bad_requests import answer_to, fuzzed, slow_connection
from fixtures import make_model, zero_shot
from harness import SHARED, Limit, Result, Row, main, run_script
from served import ServerProcess, all_clients, ask, open_socket, partita_server, write_config

FUZZED = 1000
SLOW_CONNECTIONS = 200
STOPS = 20
CHAT_TEMPLATE = """{%- for message in tools or [] %}{{ message | tojson }}
{% endfor %}{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% if message.tool_calls %}{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{% endif %}
{%- endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
"""A chat template with tools and calls."""


# Cancelled requests


def cancel(folder: Path, quick: bool) -> Result:
    """Decoding steps that the slot of a client remains taken after the client has closed its connection.

    Needs the shared folder next to the repository. The model small of `serve load`, one slot. A client closes its
    connection during its answer of up to 400 tokens, and another one waits for the slot. The number of steps is read
    from /metrics right before the connection is closed, and after the answer of the other client, without that
    client's own steps.
    """
    run_script([SHARED / "peers" / "workload.py", folder])
    config = write_config(folder, "small", tokens=400)
    options = ("--batch-size", "1", "--context", "512", "--quiet")
    rows = []
    with partita_server(config, *options, log=folder / "server.log") as server:
        for way, body in (("a stream", {"stream": True}), ("a whole answer", {})):
            steps = [steps_after_close(server, body) for _ in range(3 if quick else 10)]
            rows.append({"request": way, "clients": len(steps), "median": statistics.median(steps), "most": max(steps)})
            print(rows[-1], flush=True)
        rows.append({"request": "waiting or active at the end", "most": int(server.metric("partita_requests_active"))})
    return rows, [
        Limit("steps until the slot is free, most", max(row["most"] for row in rows[:2]), 2, "max"),
        Limit("requests that remain", rows[2]["most"], 0, "max"),
    ]


def steps_after_close(server: ServerProcess, body: Row) -> int:
    """Return the steps between the end of a connection and the release of its slot."""
    tokens = 4
    content = json.dumps({"prompt": "a b", "max_tokens": 400, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with open_socket(server.port) as connection:
        before = server.metric("partita_decode_steps_total")
        connection.sendall(head + content)
        while server.metric("partita_decode_steps_total") < before + 5:
            time.sleep(0.01)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(
                server.post, "/v1/completions", {"prompt": "c d", "max_tokens": tokens, "min_tokens": 0}
            )
            while server.metric("partita_requests_waiting") < 1:
                time.sleep(0.01)
            closed = server.metric("partita_decode_steps_total")
            connection.close()
            answer = other.result()
    assert answer.status == 200, answer
    own = answer.json["usage"]["completion_tokens"] - 1
    return int(server.metric("partita_decode_steps_total") - closed) - own


# Bad requests


def fuzz(folder: Path, quick: bool) -> Result:
    """1,000 mutated requests to all routes, and 200 slow, half-closed or silent connections, twice.

    A new model of 0.3 M parameters with 8 slots. Mutations of valid requests: values of other types and sizes, missing
    and unknown keys, deep nesting, invalid UTF-8 and JSON, huge numbers, NaN, other methods, content types, lengths and
    paths. The second round repeats the first; resident memory is measured before, between and after, once no request
    is active. `statuses` counts the responses; 0 is a connection that was closed without one.
    """
    path = write_chat_model(folder)
    count, slow = (200, 42) if quick else (FUZZED, SLOW_CONNECTIONS)
    rows = []
    with partita_server(path, "--batch-size", "8", "--quiet", log=folder / "server.log") as server:
        for number in range(50):
            answer_to(server.port, fuzzed(number, seed=1))
        for round_number in (1, 2):
            before, files = server.resident_mb, server.open_files
            statuses = Counter(answer_to(server.port, fuzzed(number)) for number in range(count))
            all_clients(slow, lambda number: slow_connection(server.port, number, seconds=3.0))
            wait_until_idle(server)
            rows.append(
                {
                    "round": round_number,
                    "requests": count,
                    "slow connections": slow,
                    "statuses": ", ".join(f"{status}: {found}" for status, found in sorted(statuses.items())),
                    "errors of the server": sum(found for status, found in statuses.items() if status >= 500),
                    "tracebacks": server.tracebacks,
                    "MB before": before,
                    "MB after": server.resident_mb,
                    "open files more": server.open_files - files,
                }
            )
            print(rows[-1], flush=True)
        for line in server.log.read_text(encoding="utf8", errors="replace").splitlines()[-20:]:
            print(line[:200])
    return rows, [
        Limit("responses with status 500 or more", sum(row["errors of the server"] for row in rows), 0, "max"),
        Limit("tracebacks in the log", rows[-1]["tracebacks"], 0, "max"),
        Limit("MB that the second round adds", round(rows[1]["MB after"] - rows[1]["MB before"], 1), 5, "max"),
        Limit("connections that remain open", max(row["open files more"] for row in rows), 0, "max"),
    ]


def write_chat_model(folder: Path) -> Path:
    """Write a new model of 0.3 M parameters with a chat template, and its configuration; return that."""
    make_model(folder / "model", context=512)
    (folder / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf8")
    config = zero_shot(
        str(folder / "model"), "prompt response", tokens=8, prompt={"template": "{prompt}", "chat": False}
    )
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf8")
    return path


def wait_until_idle(server: ServerProcess) -> None:
    """Wait until no request is active, for a minute at most."""
    until = time.monotonic() + 60
    while server.metric("partita_requests_active") + server.metric("partita_requests_waiting") > 0:
        if time.monotonic() > until:
            sys.exit("requests remain active")
        time.sleep(0.1)
    time.sleep(1.0)


# Stops


def stop(folder: Path, quick: bool) -> Result:
    """Twenty SIGTERMs at random moments while 16 clients send requests, each on a new connection or on a kept one.

    A new model of 0.3 M parameters with 8 slots; half of the clients stream. A request is lost if its connection was
    accepted and neither a whole answer nor status 503 came back: it was reset, closed or cut. Connections that are
    refused once the server does not listen any more are counted separately.
    """
    path = write_chat_model(folder)
    rng = random.Random(0)
    found, statuses, slowest = Counter[str](), Counter[int](), 0.0
    stops = 4 if quick else STOPS
    for _ in range(stops):
        with partita_server(path, "--batch-size", "8", "--quiet", log=folder / "server.log") as server:
            stopper = threading.Timer(rng.uniform(0.2, 1.0), server.terminate)
            stopper.start()
            for outcomes in all_clients(16, lambda number: outcomes_of(server, number)):
                found += outcomes
            stopper.join()
            started = time.monotonic()
            statuses[server.process.wait(60)] += 1
            slowest = max(slowest, time.monotonic() - started)
            found["tracebacks"] += server.tracebacks
    names = ("answered", "503", "refused", "lost", "tracebacks")
    row = {"stops": stops, **{name: found[name] for name in names}, "exit status 0": statuses[0]}
    return [row | {"other outcomes": sum(found.values()) - sum(found[name] for name in names)}], [
        Limit("accepted requests that are lost", row["lost"], 0, "max"),
        Limit("tracebacks in the log", row["tracebacks"], 0, "max"),
        Limit("stops with exit status 0", statuses[0], stops, "min"),
    ]


def outcomes_of(server: ServerProcess, number: int) -> Counter[str]:
    """Send requests until one is refused or lost; return the numbers of outcomes."""
    found = Counter[str]()
    connection = server.connection(30.0)
    body = {"prompt": "a b", "max_tokens": 24, "stream": number % 2 == 0}
    while True:
        if number % 4 < 2:
            connection.close()
        try:
            answer = ask(connection, "/v1/completions", body)
        except ConnectionRefusedError:
            found["refused"] += 1
            return found
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
                found["lost"] += 1
            else:
                found[type(error).__name__] += 1
            return found
        whole = answer.status == 200 and (not body["stream"] or answer.body.endswith(b"data: [DONE]\n\n"))
        found["answered" if whole else str(answer.status) if answer.status != 200 else "lost"] += 1


if __name__ == "__main__":
    main(cancel, fuzz, stop)
