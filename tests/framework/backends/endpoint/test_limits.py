"""Tests of the limits on concurrent requests and on requests per minute."""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any, TypeVar

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita import Model
from partita.backends.endpoint.completion_sender import CompletionSender
from partita.backends.endpoint.receiving import Response as Received
from partita.backends.endpoint.redaction import Redaction
from partita.backends.endpoint.request_sender import RateLimiter, RequestError, RequestFailure, refusal
from partita_schema.sections.backend import EndpointBackendConfig

from ....properties import examples
from .conftest import LocalServer, Response, answer

MakeFile = Callable[..., dict[str, Any]]
ROWS = [{"question": f"question {n}"} for n in range(60)]
T = TypeVar("T")


class NoWaiting(selectors.DefaultSelector):
    """A selector that moves its clock forward instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen"
        self.now += timeout
        return super().select(0)


def run_without_waiting(main: Callable[[Callable[[], float]], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function, which takes a clock, in an event loop whose waits take no time."""
    selector = NoWaiting()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop.time))


@pytest.mark.parametrize(("concurrency", "seconds"), [(1, 0.01), (5, 0.05), (32, 0.4)])
def test_concurrent_requests_reach_the_limit_and_never_exceed_it(
    server: LocalServer, make_file: MakeFile, concurrency: int, seconds: float
) -> None:
    def reply(body: dict[str, Any]) -> Response:
        time.sleep(seconds)
        return answer(body, "fine")

    server.reply = reply
    result = Model(make_file({"concurrency": concurrency}), quiet=True).predict(ROWS)
    assert result.stats.ok == 60
    assert server.most_active <= concurrency
    assert server.most_active >= concurrency - 1


def test_answers_are_written_when_they_arrive(server: LocalServer, make_file: MakeFile, tmp_path: Any) -> None:
    seen: list[int] = []

    def reply(body: dict[str, Any]) -> Response:
        time.sleep(0.01)
        journals = list((tmp_path / "runs").rglob("*.jsonl"))
        seen.append(len(journals[0].read_text(encoding="utf-8").splitlines()) - 1)
        return answer(body, "fine")

    server.reply = reply
    Model(make_file({"concurrency": 2}), quiet=True).predict(ROWS)
    assert all(written >= asked - 6 for asked, written in enumerate(seen))


def test_requests_per_minute_are_evenly_spaced(server: LocalServer, make_file: MakeFile) -> None:
    file = make_file({"requests_per_minute": 1200})
    Model(file, quiet=True).predict(ROWS[:12])
    assert server.times[-1] - server.times[0] >= 11 * 0.05 * 0.95


def test_tokens_per_minute_use_the_counts_of_the_server(server: LocalServer, make_file: MakeFile) -> None:
    # 2 + 1 tokens are used each, and 100 times as many reserved: unused tokens are returned.
    server.reply = lambda body: answer(body, "fine")
    file = make_file({"tokens_per_minute": 3600, "concurrency": 1}, generation={"max_new_tokens": 30})
    started = time.monotonic()
    Model(file, quiet=True).predict(ROWS[:12])
    assert time.monotonic() - started >= 11 * 3 / 60 * 0.95


@examples(50)
@given(
    st.integers(1, 1000),
    st.integers(10, 10_000),
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 60)), min_size=1, max_size=30),
)
def test_requests_are_spaced_exactly_as_the_limits_require(
    requests: int, tokens: int, asked: list[tuple[int, int]]
) -> None:
    async def run(clock: Callable[[], float]) -> list[tuple[float, int]]:
        limits = RateLimiter(requests_per_minute=requests, tokens_per_minute=tokens, clock=clock)
        started = []
        for reserved, used in asked:
            await limits.turn(reserved)
            limits.give_back(reserved - used)
            started.append((clock(), used))
        return started

    started = run_without_waiting(run)
    for (first, used), (second, _) in pairwise(started):
        assert second - first == pytest.approx(max(60 / requests, 60 * used / tokens), abs=1e-6)


def test_no_request_starts_during_a_requested_wait() -> None:
    async def run(clock: Callable[[], float]) -> float:
        limits = RateLimiter(requests_per_minute=None, tokens_per_minute=None, clock=clock)
        await limits.turn(1)
        assert clock() == 0.0
        limits.pause(3.0)
        limits.pause(1.0)
        await limits.turn(1)
        return clock()

    assert run_without_waiting(run) == pytest.approx(3.0)


def test_tokens_that_are_returned_shorten_the_wait_of_the_next_request() -> None:
    # 200 tokens are 2 s, and 10 tokens 0.1 s: each request starts when the answer before it has arrived.
    async def run(clock: Callable[[], float]) -> list[float]:
        limits = RateLimiter(requests_per_minute=None, tokens_per_minute=6000, clock=clock)
        started = []

        async def send() -> None:
            await limits.turn(200)
            started.append(clock())
            await asyncio.sleep(0.1)
            limits.give_back(190)

        await asyncio.gather(*(send() for _ in range(6)))
        return started

    assert run_without_waiting(run) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_a_pause_lengthens_the_wait_of_the_next_request() -> None:
    async def run(clock: Callable[[], float]) -> float:
        limits = RateLimiter(requests_per_minute=None, tokens_per_minute=6000, clock=clock)
        await limits.turn(200)
        waiting = asyncio.create_task(limits.turn(200))
        await asyncio.sleep(0.1)
        limits.pause(5.0)
        limits.give_back(190)
        await waiting
        return clock()

    assert run_without_waiting(run) == pytest.approx(5.1)


@pytest.mark.parametrize(
    ("failure", "returned"),
    [
        (refusal(Received(400, httpx2.Headers(), b"too long")), True),
        (refusal(Received(429, httpx2.Headers(), b"too fast")), True),
        (refusal(Received(500, httpx2.Headers(), b"oh no")), True),
        (RequestFailure("unreachable", "no connection", retry=True), True),
        (RequestFailure("server", "no answer within 60 s", retry=True), False),
        (RequestFailure("row", "the server's response is no JSON"), False),
    ],
)
def test_a_request_that_has_no_answer_returns_its_tokens(
    monkeypatch: pytest.MonkeyPatch, failure: RequestFailure, returned: bool
) -> None:
    async def fail(body: Any) -> Any:
        raise RequestError(failure)

    async def run() -> float:
        backend = EndpointBackendConfig(type="endpoint", url="http://localhost/v1", tokens_per_minute=60, retries=0)
        async with httpx2.AsyncClient() as client:
            sender = CompletionSender(client, backend, Redaction(None), mode="chat", logprobs=False)
            monkeypatch.setattr(sender, "request", fail)
            assert await sender.send({}, tokens=600) == failure
        return sender.rate_limiter.seconds_to_wait()

    seconds = asyncio.run(run())
    assert seconds <= 0 if returned else seconds > 500
