"""A server that speaks OpenAI's protocol and echoes prompts."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LONGEST_WAIT = 20.0
"""Seconds in which concurrent requests have arrived, even on a busy machine."""


class Server:
    """Records requests. A prompt with `busy` is refused at first; a prompt with `slow` is answered late.

    The first answer waits until `together` requests have arrived.
    """

    def __init__(self, *, together: int) -> None:
        self.together, self.met = together, threading.Event()
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str] = []
        self.active = self.most_active = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = outer.reply(body, self.path, str(self.headers["Authorization"]))
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})

    def reply(self, body: dict[str, Any], path: str, key: str) -> tuple[int, Any]:
        text = str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])
        with self.lock:
            seen = body in self.bodies
            self.bodies.append(body)
            self.paths.append(path)
            self.keys.append(key)
            self.active += 1
            self.most_active = max(self.most_active, self.active)
            if self.active == self.together:
                self.met.set()
        self.met.wait(LONGEST_WAIT)
        time.sleep(0.2 if "slow" in text else 0.02)
        with self.lock:
            self.active -= 1
        if "busy" in text and not seen:
            return 503, {"error": {"message": "busy"}}
        text = '{"one": 3}' if "json" in text else f"1 {text} say 3"
        said = {"message": {"role": "assistant", "content": text}} if "messages" in body else {"text": text}
        usage = {"prompt_tokens": 9, "completion_tokens": 9}
        return 200, {"choices": [{"index": 0, "finish_reason": "stop", **said}], "usage": usage}


@contextmanager
def serving(*, together: int) -> Iterator[Server]:
    """Run a server inside the context."""
    server = Server(together=together)
    server.thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        server.thread.join()
