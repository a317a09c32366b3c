"""Requests that are not valid and connections that are slow, for serve_robustness.py and the tests of the server."""

import json
import random
import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple

from harness import Row
from served import open_socket

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
    rng = random.Random(f"{seed} {number}")
    path = rng.choice([*VALID, *VALID, *VALID, *OTHER_PATHS])
    bodies = VALID.get(path) or [body for some in VALID.values() for body in some]
    body = json.loads(json.dumps(rng.choice(bodies)))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        body = mutated(body, rng)
    content = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf8", "surrogatepass")
    content = damaged(content, rng)
    method = rng.choice(METHODS) if rng.random() < 0.1 else "POST" if path in VALID else "GET"
    kind = rng.choice(TYPES) if rng.random() < 0.2 else TYPES[0]
    size: Any = len(content)
    if rng.random() < 0.05:
        size = rng.choice((-1, size + 5, 2**40, "x", "", max(size - 3, 0)))
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n"
    whole = size == len(content)
    if rng.random() < 0.03:
        head += rng.choice(("Transfer-Encoding: chunked\r\n", "A" * 100_000 + ": b\r\n", "Expect: 100-continue\r\n"))
        whole = False
    return FuzzedRequest(f"{head}Connection: close\r\n\r\n".encode("latin1") + content, whole)


def mutated(body: Any, rng: random.Random) -> Any:
    """Return a body with a value, a key or an item changed, removed or repeated."""
    if rng.random() < 0.03:
        return rng.choice(VALUES)
    if isinstance(body, dict) and body:
        key = rng.choice(list(body))
        choice = rng.random()
        if choice < 0.1:
            return {name: value for name, value in body.items() if name != key}
        if choice < 0.2:
            return body | {rng.choice(("", "a", "model", "stream", "\ud800", "n", "stop", "keys")): value(rng)}
        if choice < 0.6 and isinstance(body[key], dict | list) and body[key]:
            return body | {key: mutated(body[key], rng)}
        return body | {key: value(rng)}
    if isinstance(body, list) and body:
        index = rng.randrange(len(body))
        new = mutated(body[index], rng) if rng.random() < 0.5 else value(rng)
        return [*body[:index], new, *body[index + 1 :], *(body[index:] if rng.random() < 0.1 else ())]
    return value(rng)


def value(rng: random.Random) -> Any:
    """Return a value, in some cases deeply nested."""
    found = rng.choice(VALUES)
    if rng.random() < 0.1:
        for _ in range(rng.choice((10, 150))):
            found = rng.choice(([found], {"a": found}, {"type": "object", "properties": {"a": found}}))
    return found


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return bytes that in some cases are not JSON, not UTF-8 or nested too deeply."""
    choice = rng.random()
    if choice < 0.05:
        return content[: rng.randrange(len(content) + 1)]
    if choice < 0.1:
        at = rng.randrange(len(content) + 1)
        return content[:at] + rng.randbytes(3) + content[at:]
    if choice < 0.13:
        return rng.choice((b"[" * 50_000, b'{"a":' * 50_000, b"", b"\xef\xbb\xbf{}", b"1e999999", b"9" * 100_000))
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
