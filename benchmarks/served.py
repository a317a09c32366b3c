"""A server in a separate process, its CPU time and memory, and its clients; for serve.py."""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil
from harness import Row, one_thread

HOST = "127.0.0.1"
START_SECONDS = 300
ANSWER_SECONDS = 600


class Answer(NamedTuple):
    """A response."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ServerProcess:
    """A server in a process; a context manager that waits for its first response, and kills it at the end."""

    def __init__(self, command: Sequence[str], *, log: Path, ready: str = "/health", **environment: str) -> None:
        """Describe a server.

        Args:
            command: The command, to which a port is added.
            log: File for its output.
            ready: Path that it answers with status 200 once it is ready.
            environment: Further environment variables.
        """
        self.port = free_port()
        self.command = [*command, "--port", str(self.port)]
        self.log, self.ready = log, ready
        self.environment = one_thread() | environment

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=self.environment)
        until = time.monotonic() + START_SECONDS
        while True:
            with suppress(OSError, http.client.HTTPException):
                if self.get(self.ready).status == 200:
                    return self
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                raise RuntimeError(f"the server did not start: {self.log.read_text(encoding='utf8')[-2000:]}")
            time.sleep(0.05)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all its threads and child processes so far, in user and kernel mode."""
        process = psutil.Process(self.process.pid)
        return sum(sum(one.cpu_times()[:4]) for one in [process, *process.children(recursive=True)])

    @property
    def resident_mb(self) -> float:
        """Resident memory in MiB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="utf8").split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)

    @property
    def open_files(self) -> int:
        """Number of open files and connections."""
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    @property
    def tracebacks(self) -> int:
        """Number of tracebacks in its log."""
        return self.log.read_text(encoding="utf8", errors="replace").count("Traceback (most recent call last)")

    def connection(self, seconds: float = ANSWER_SECONDS) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(HOST, self.port, timeout=seconds)

    def get(self, path: str) -> Answer:
        connection = self.connection(10.0)
        try:
            return ask(connection, path)
        finally:
            connection.close()

    def post(self, path: str, body: Row) -> Answer:
        connection = self.connection()
        try:
            return ask(connection, path, body)
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """Return a value of /metrics without labels."""
        lines = self.get("/metrics").body.decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


def partita_server(config: Path, *options: str, log: Path) -> ServerProcess:
    """Return a server of `partita serve`."""
    return ServerProcess([sys.executable, "-m", "partita", "serve", str(config), *options], log=log)


def open_socket(port: int, seconds: float = 10.0) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=seconds)


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def ask(connection: http.client.HTTPConnection, path: str, body: Row | None = None) -> Answer:
    """Return the response to a GET, or to a POST of JSON."""
    if body is None:
        connection.request("GET", path)
    else:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    return Answer(response.status, response.read())


def pieces(connection: http.client.HTTPConnection, path: str, body: Row) -> Iterator[Row]:
    """Yield the parts of a stream."""
    connection.request("POST", path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {response.read()[:500]!r}")
    while line := response.readline():
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            response.read()
            return
        if data:
            yield json.loads(data)


def all_clients(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Call `work` with the number of each client in threads; return its results, or raise its error."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def client(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


# Requests that are not valid

LONG = "x" * 20_000
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 65, 2**31, 2**63, -(2**63), 10**30, 1e308, -1e-320, 0.5, float("nan")),
    *(float("inf"), "", "a", "\x00", "\ud800", "😀" * 50, LONG, [], [[]], [None], [1, "a"], {}, {"a": {}}),
    *(["a"] * 2000, [[1]] * 100, {"role": "user"}, {"type": "object"}, {str(number): 0 for number in range(500)}),
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"b": {}}}}}
SAMPLING: Row = {
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "min_tokens": 1,
    "seed": 1,
    "stop": ["x"],
    "stop_token_ids": [3],
    "n": 2,
    "logit_bias": {"5": 1.0},
    "repetition_penalty": 1.1,
    "user": "u",
}
MESSAGES = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
VALID: dict[str, list[Row]] = {
    "/v1/chat/completions": [
        {"messages": MESSAGES, **SAMPLING, "logprobs": True, "top_logprobs": 2},
        {"messages": MESSAGES, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": MESSAGES, "max_tokens": 2, "tools": [TOOL], "tool_choice": "auto"},
        {"messages": MESSAGES, "max_tokens": 2, "response_format": SCHEMA},
    ],
    "/v1/completions": [
        {"prompt": "a b", **SAMPLING, "logprobs": 1},
        {"prompt": [[5, 6], [7]], "max_tokens": 2},
        {"prompt": ["a", "b"], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
    ],
    "/predict": [
        {"rows": [{"prompt": "a b"}, {"prompt": "c"}], "keys": ["1", "2"]},
        {"rows": [{"prompt": "a"}], "records": True},
    ],
    "/tokenize": [{"prompt": "a b", "add_special_tokens": False}, {"messages": MESSAGES}],
    "/v1/embeddings": [{"input": ["a", "b"], "encoding_format": "base64"}],
}
"""Valid bodies of every route that reads one."""
OTHER_PATHS = ("/", "/v1/models", "/v1/models/%00", "/v1/models/../..", "/health", "/metrics", "/%ff%fe", "/a?b=%")
METHODS = ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "POST ", "", "po\x00st")
TYPES = ("application/json", "text/plain", "", "application/json; charset=utf-16", "multipart/form-data; boundary=x")


class FuzzedRequest(NamedTuple):
    """A request that is invalid, or strange."""

    content: bytes
    whole: bool
    """Whether the body has the announced length."""


def fuzzed(number: int, seed: int = 0) -> FuzzedRequest:
    """Return a request of a sequence, which is the same for the same seed."""
    chance = random.Random(f"{seed} {number}")
    path = chance.choice([*VALID, *VALID, *VALID, *OTHER_PATHS])
    bodies = VALID.get(path) or [body for some in VALID.values() for body in some]
    body = json.loads(json.dumps(chance.choice(bodies)))
    for _ in range(chance.choice((0, 1, 1, 1, 2, 4))):
        body = mutated(body, chance)
    content = json.dumps(body, ensure_ascii=chance.random() < 0.5).encode("utf8", "surrogatepass")
    content = damaged(content, chance)
    method = chance.choice(METHODS) if chance.random() < 0.1 else "POST" if path in VALID else "GET"
    kind = chance.choice(TYPES) if chance.random() < 0.2 else TYPES[0]
    size: Any = len(content)
    if chance.random() < 0.05:
        size = chance.choice((-1, size + 5, 2**40, "x", "", max(size - 3, 0)))
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n"
    whole = size == len(content)
    if chance.random() < 0.03:
        head += chance.choice(("Transfer-Encoding: chunked\r\n", "A" * 100_000 + ": b\r\n", "Expect: 100-continue\r\n"))
        whole = False
    return FuzzedRequest(f"{head}Connection: close\r\n\r\n".encode("latin1") + content, whole)


def mutated(body: Any, chance: random.Random) -> Any:
    """Return a body with a value, a key or an item changed, removed or repeated."""
    if chance.random() < 0.03:
        return chance.choice(VALUES)
    if isinstance(body, dict) and body:
        key = chance.choice(list(body))
        choice = chance.random()
        if choice < 0.1:
            return {name: value for name, value in body.items() if name != key}
        if choice < 0.2:
            return body | {chance.choice(("", "a", "model", "stream", "\ud800", "n", "stop", "keys")): value(chance)}
        if choice < 0.6 and isinstance(body[key], dict | list) and body[key]:
            return body | {key: mutated(body[key], chance)}
        return body | {key: value(chance)}
    if isinstance(body, list) and body:
        index = chance.randrange(len(body))
        new = mutated(body[index], chance) if chance.random() < 0.5 else value(chance)
        return [*body[:index], new, *body[index + 1 :], *(body[index:] if chance.random() < 0.1 else ())]
    return value(chance)


def value(chance: random.Random) -> Any:
    """Return a value, in some cases deeply nested."""
    found = chance.choice(VALUES)
    if chance.random() < 0.1:
        for _ in range(chance.choice((10, 150))):
            found = chance.choice(([found], {"a": found}, {"type": "object", "properties": {"a": found}}))
    return found


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return bytes that in some cases are not JSON, not UTF-8 or nested too deeply."""
    choice = chance.random()
    if choice < 0.05:
        return content[: chance.randrange(len(content) + 1)]
    if choice < 0.1:
        at = chance.randrange(len(content) + 1)
        return content[:at] + chance.randbytes(3) + content[at:]
    if choice < 0.13:
        return chance.choice((b"[" * 50_000, b'{"a":' * 50_000, b"", b"\xef\xbb\xbf{}", b"1e999999", b"9" * 100_000))
    if choice < 0.15:
        return content.decode("utf8", "replace").encode("utf-16")
    return content


def answer_to(port: int, request: FuzzedRequest, *, seconds: float = 60.0) -> int:
    """Send a request, and end the sending side if it is not whole; return the status, and 0 without a response."""
    with open_socket(port, seconds) as connection:
        with suppress(OSError):  # the server may answer before it has read everything
            connection.sendall(request.content)
            if not request.whole:
                connection.shutdown(socket.SHUT_WR)
        return status_on(connection)


def status_on(connection: socket.socket) -> int:
    """Read to the end of a connection; return the status of the first response, and 0 if there is none."""
    received = bytearray()
    with suppress(ConnectionError):
        while part := connection.recv(65_536):
            received += part
    words = bytes(received[:64]).split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


SLOW = ("silent", "half a head", "half a body", "half-closed", "closed at once", "slow bytes", "reads nothing")
"""Ways in which a client is slow or leaves."""


def slow_connection(port: int, number: int, *, seconds: float) -> None:
    """Open a connection that is slow, half-closed or left, for some seconds."""
    kind = SLOW[number % len(SLOW)]
    content = json.dumps({"prompt": "a b", "max_tokens": 16, "stream": number % 2 == 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with suppress(ConnectionError, TimeoutError), open_socket(port, seconds) as connection:
        if kind == "half a head":
            connection.sendall(head[:40])
        elif kind == "half a body":
            connection.sendall(head + content[:10])
        elif kind == "half-closed":
            connection.sendall(head + content)
            connection.shutdown(socket.SHUT_WR)
        elif kind == "closed at once":
            connection.sendall(head + content)
            return
        elif kind == "reads nothing":
            connection.sendall((head + content) * 20)
        elif kind == "slow bytes":
            for byte in head + content:
                connection.sendall(bytes([byte]))
                time.sleep(seconds / (len(head) + len(content)))
        time.sleep(seconds)
