"""A small server that speaks OpenAI's protocol on a real socket, and configurations that use it."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from partita.backends.endpoint import request_sender


@dataclass(frozen=True)
class Response:
    """A response of the server."""

    status: int
    body: Any
    headers: dict[str, str] = field(default_factory=dict)


class HangUp(Exception):  # noqa: N818 -- no error of ours
    """Raised by `reply` to close the connection without a response."""


def prompt_of(body: dict[str, Any]) -> str:
    """Return the prompt of a request: the prompt, or the last message."""
    text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    return str(text)


def answer(body: dict[str, Any], text: str, **choice: Any) -> Response:
    """Return a complete response in OpenAI's format; words count as tokens."""
    said = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
    usage = {"prompt_tokens": len(prompt_of(body).split()), "completion_tokens": len(text.split())}
    return Response(200, {"choices": [{"index": 0, "finish_reason": "stop", **said, **choice}], "usage": usage})


def error(status: int, message: str, *, code: str | None = None, **headers: str) -> Response:
    """Return an error in OpenAI's format."""
    return Response(status, {"error": {"message": message, "code": code}}, headers)


class LocalServer:
    """A server that answers with `reply`, a function of the request body, and records the requests."""

    def __init__(self) -> None:
        self.reply: Callable[[dict[str, Any]], Response] = lambda body: answer(body, prompt_of(body).upper())
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.active = self.most_active = 0
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # one piece: with two, the second waits for an acknowledgement

            def do_POST(self) -> None:
                outer.serve(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

        class Sockets(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Ignore clients that have disconnected."""

        self.http = Sockets(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.block_on_close = False
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    @property
    def asked(self) -> list[str]:
        """Return the prompts of all requests."""
        return [prompt_of(body) for body in self.bodies]

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.bodies.append(body)
            self.paths.append(handler.path)
            self.keys.append(handler.headers["Authorization"])
            self.times.append(time.monotonic())
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        try:
            response = self.reply(body)
        except HangUp:
            handler.close_connection = True
            return
        finally:
            with self.lock:
                self.active -= 1
        text = response.body if isinstance(response.body, str) else json.dumps(response.body)
        handler.send_response(response.status)
        for name, value in response.headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(text.encode())))
        handler.end_headers()
        handler.wfile.write(text.encode())

    def hang(self) -> None:
        """Block until the test ends."""
        self.stopping.wait(30)

    def close(self) -> None:
        self.stopping.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalServer]:
    """Start a server; the test runs in an empty folder, with short waits between retries."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(request_sender, "FIRST_WAIT", 0.02)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    running = LocalServer()
    yield running
    running.close()


@pytest.fixture
def make_file(server: LocalServer) -> Callable[..., dict[str, Any]]:
    """Return a configuration that asks the server `question` for `answer`; `backend` keys and sections are merged into
    it."""

    def make(backend: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
        return {
            "base_model": "small",
            "input_features": [{"name": "question", "type": "text"}],
            "output_features": [{"name": "answer", "type": "text"}],
            "backend": {"type": "endpoint", "url": server.url, **(backend or {})},
            **sections,
        }

    return make


class RawServer:
    """A server that sends the bytes yielded by `reply`, piece by piece, and closes the connection."""

    def __init__(self) -> None:
        self.reply: Callable[[dict[str, Any]], Iterable[bytes]] = lambda body: [whole(b"{}")]
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.accept)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listening.getsockname()[1]}/v1"

    def accept(self) -> None:
        while True:
            connection, _ = self.listening.accept()
            if self.stopping.is_set():
                connection.close()
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            body = read_request(connection)
            if body is None:
                return
            for piece in self.reply(body):
                connection.sendall(piece)

    def close(self) -> None:
        self.stopping.set()
        with socket.create_connection(self.listening.getsockname()):
            self.thread.join()
        self.listening.close()


def read_request(connection: socket.socket) -> dict[str, Any] | None:
    """Return the body of a request, or None if the client disconnects first."""
    request = b""
    while piece := connection.recv(65536):
        request += piece
        head, _, body = request.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if length is not None and len(body) >= int(length[1]):
            result: dict[str, Any] = json.loads(body)
            return result
    return None


def whole(body: bytes, *, status: bytes = b"HTTP/1.1 200 OK", headers: Sequence[bytes] = ()) -> bytes:
    """Return a response as bytes."""
    lines = [status, *headers, b"Connection: close", b"Content-Length: %d" % len(body), b"", b""]
    return b"\r\n".join(lines) + body


@pytest.fixture
def raw_server(server: LocalServer) -> Iterator[RawServer]:
    """Start a server that may send any bytes; the test runs in an empty folder, with short waits between retries."""
    running = RawServer()
    yield running
    running.close()
