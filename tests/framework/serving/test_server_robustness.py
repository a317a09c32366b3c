"""Clients that send nonsense, are slow, or are interrupted by a stop; benchmarks/serve_robustness.py runs more."""

import errno
import http.client
import json
import logging
import re
import select
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from partita import Model
from partita.lm.base import GenerationOptions
from partita.serving.address import bound
from partita.serving.connections import Connection
from partita.serving.engine import ServingEngine
from partita.serving.graceful_server import drop_new_handshakes
from partita.serving.request_queue import AnswerRequest, RequestScheduler

from .conftest import RunningServer, running, wait_for


@pytest.fixture(scope="module")
def clients() -> ModuleType:
    """Return the module with the bad clients of the benchmark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
        import bad_requests

        return bad_requests


def port_of(server: RunningServer) -> int:
    return int(server.url.rpartition(":")[2])


def open_socket(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(server)), timeout=20)


def completion(**body: Any) -> bytes:
    """Return a request of a completion."""
    content = json.dumps({"prompt": "a", "max_tokens": 4, **body}).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
    )


def test_fuzzed_requests_are_refused_and_not_failures(
    server: RunningServer, clients: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        statuses = Counter(clients.answer_to(port_of(server), clients.fuzzed(number)) for number in range(120))
    wait_for(lambda: server.engine.is_idle)
    assert statuses[200] > 5
    assert statuses[400] > 30
    assert not [status for status in statuses if status >= 500]
    assert not [record for record in caplog.records if record.exc_info]
    assert server.engine.failure is None


@pytest.mark.long
def test_a_thousand_fuzzed_requests(
    server: RunningServer, clients: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        statuses = Counter(clients.answer_to(port_of(server), clients.fuzzed(number, seed=2)) for number in range(1000))
    assert not [status for status in statuses if status >= 500]
    assert not [record for record in caplog.records if record.exc_info]


def test_slow_and_half_closed_connections_leave_nothing(server: RunningServer, clients: ModuleType) -> None:
    number = 2 * len(clients.SLOW)
    with ThreadPoolExecutor(number) as pool:
        list(pool.map(lambda index: clients.slow_connection(port_of(server), index, seconds=0.3), range(number)))
    wait_for(lambda: server.engine.is_idle)
    with open_socket(server) as connection:
        connection.sendall(completion())
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", b"GET /health HT"])
@pytest.mark.parametrize("requests_before", [0, 1])
def test_a_connection_is_closed_if_the_head_of_a_request_does_not_arrive(
    server: RunningServer, sent: bytes, requests_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partita.serving.connections.HEAD_SECONDS", 0.2)
    with open_socket(server) as connection:
        for _ in range(requests_before):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert whole_answer(connection).startswith(b"HTTP/1.1 200 ")
        connection.sendall(sent or (b"G" if requests_before else b""))
        assert connection.recv(4096) == b""  # a timeout of the socket fails the test


def test_a_long_answer_is_not_cut_by_the_limit_for_heads(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partita.serving.connections.HEAD_SECONDS", 0.05)
    with open_socket(server) as connection:
        connection.sendall(completion(max_tokens=400, temperature=0, min_tokens=400))
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_the_slot_of_a_closed_stream_is_free_within_two_steps(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, step = server.engine, RequestScheduler.step

    def slow(scheduler: RequestScheduler) -> None:
        time.sleep(0.1)  # a step of a larger model
        step(scheduler)

    monkeypatch.setattr(RequestScheduler, "step", slow)
    cancelled = engine.counts.cancelled
    with open_socket(server) as connection:
        connection.sendall(completion(max_tokens=900, min_tokens=900, temperature=0, stream=True))
        assert connection.recv(100)
        before = engine.counts.steps
    wait_for(lambda: engine.is_idle)
    assert engine.counts.steps - before <= 2
    assert engine.counts.cancelled == cancelled + 1


def whole_answer(connection: socket.socket) -> bytes:
    """Return the next answer on a connection, with its body."""
    answer = b""
    while True:
        head, found, body = answer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        if found and length is not None and len(body) >= int(length[1]):
            return answer
        received = connection.recv(4096)
        assert received, f"the connection ended after {answer!r}"
        answer += received


def test_a_stop_answers_requests_on_connections_that_are_open_or_wait(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partita.serving.graceful_server.LINGER_SECONDS", 15.0)  # on a busy machine
    with running(model) as server, open_socket(server) as kept, open_socket(server) as silent:
        kept.sendall(completion())
        assert whole_answer(kept).startswith(b"HTTP/1.1 200 ")
        server.engine.refuse_new()
        waiting = [open_socket(server) for _ in range(5)]
        time.sleep(0.3)  # the server closes its listening socket meanwhile
        for connection in (kept, silent, *waiting):
            connection.sendall(completion())
            answer = whole_answer(connection)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close" in answer
            connection.close()


def test_no_part_of_a_stream_waits_for_the_client_to_acknowledge_the_last_one(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = []

    def record(connection: Connection, transport: Any) -> None:
        options.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        connection_made(connection, transport)

    connection_made = Connection.connection_made
    monkeypatch.setattr(Connection, "connection_made", record)
    with running(model) as server, open_socket(server) as connection:
        connection.sendall(completion())
        assert whole_answer(connection).startswith(b"HTTP/1.1 200 ")
    assert options == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux filters packets of a socket")
def test_no_client_connects_to_a_socket_that_is_about_to_be_closed() -> None:
    with bound("127.0.0.1", 0) as sock, socket.socket() as first, socket.socket() as late:
        sock.listen(5)
        first.connect(sock.getsockname())
        drop_new_handshakes(sock)
        late.setblocking(False)
        assert late.connect_ex(sock.getsockname()) == errno.EINPROGRESS
        with sock.accept()[0] as accepted:  # the connection that was there before works
            first.sendall(b"still here")
            assert accepted.recv(10) == b"still here"
        assert not select.select([sock], [late], [], 0.1)[0]
        sock.close()
        assert select.select([], [late], [], 20)[1]
        assert late.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED


def test_every_accepted_request_is_answered_or_refused_with_503_during_stops_under_load(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partita.serving.graceful_server.LINGER_SECONDS", 15.0)  # on a busy machine
    for _ in range(4):
        with running(model) as server, ThreadPoolExecutor(6) as pool:
            clients = [pool.submit(outcomes_until_refused, server, number) for number in range(6)]
            wait_for(lambda server=server: server.engine.counts.requests > 6)
            server.engine.refuse_new()
            outcomes = {outcome for client in clients for outcome in client.result()}
        assert outcomes <= {"200", "503", "refused"}
        assert "refused" in outcomes


def outcomes_until_refused(server: RunningServer, number: int) -> set[str]:
    """Send requests until the server no longer listens; every second client opens a new connection for each."""
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=20)
    found = set[str]()
    while "refused" not in found:
        if number % 2:
            connection.close()
        try:
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "a b", "max_tokens": 3}))
            answer = connection.getresponse()
            answer.read()
            found.add(str(answer.status))
        except ConnectionRefusedError:
            found.add("refused")
    return found


def test_prompts_of_similar_lengths_are_prefilled_together(engine_of_lengths: list[list[int]]) -> None:
    assert [max(group) - min(group) for group in engine_of_lengths[:2]] == [0, 0]


@pytest.fixture
def engine_of_lengths(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the lengths of the prompts of each prefill, for alternately short and longer prompts."""
    from partita.lm.slots.slots import Slots
    from partita.model import open_engine

    groups, forward = list[list[int]](), Slots.forward

    def noted(slots: Slots, prompts: Any, **more: Any) -> Any:
        groups.append([len(prompt) for prompt in prompts])
        return forward(slots, prompts, **more)

    monkeypatch.setattr(Slots, "forward", noted)
    engine: ServingEngine = open_engine(model, context=512, batch_size=8)
    options: GenerationOptions = engine.options
    ended = threading.Semaphore(0)
    rng = np.random.default_rng(0)
    for number in range(8):
        ids = rng.integers(5, 100, size=40 if number % 2 else 60).tolist()
        # the read budget holds four of them in one pass
        engine.submit(AnswerRequest(ids, 1, options), lambda event: ended.release())
    monkeypatch.setattr(Slots, "prefill_tokens", 256)
    with engine:
        for _ in range(8):
            assert ended.acquire(timeout=20)
    return groups
