"""A server in a separate process, its CPU time and memory, and its clients; for serve.py and serve_robustness.py."""

import http.client
import json
import os
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
from fixtures import zero_shot
from harness import Row, one_thread

HOST = "127.0.0.1"
START_SECONDS = 300
ANSWER_SECONDS = 600
NEW_TOKENS = 32


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


def write_config(folder: Path, name: str, *, tokens: int = NEW_TOKENS, at_least: int | None = None) -> Path:
    """Write the configuration of a model without training; answers have `tokens` tokens, or `at_least` to `tokens`."""
    path = folder / f"{name}.json"
    config = zero_shot(
        f"{folder}/{name}", "prompt response", tokens=tokens, prompt={"template": "{prompt}", "chat": False}
    )
    config["generation"] |= {"min_new_tokens": tokens if at_least is None else at_least, "do_sample": False}
    path.write_text(json.dumps(config), encoding="utf8")
    return path


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
