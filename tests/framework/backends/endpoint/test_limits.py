"""Tests of the limits on concurrent requests and on requests per minute."""

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita import Model
from partita.backends.endpoint import request_sender
from partita.backends.endpoint.request_sender import RateLimiter

from ....properties import examples
from .conftest import LocalServer, Response, answer

MakeFile = Callable[..., dict[str, Any]]
ROWS = [{"question": f"question {n}"} for n in range(60)]


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
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def run() -> list[tuple[float, int]]:
        limits = RateLimiter(requests_per_minute=requests, tokens_per_minute=tokens, clock=lambda: now)
        started = []
        for reserved, used in asked:
            await limits.turn(reserved)
            limits.give_back(reserved - used)
            started.append((now, used))
        return started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_sender.asyncio, "sleep", sleep)
        started = asyncio.run(run())
    for (first, used), (second, _) in pairwise(started):
        assert second - first == pytest.approx(max(60 / requests, 60 * used / tokens), abs=1e-6)


def test_no_request_starts_during_a_requested_wait() -> None:
    now = 5.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def run() -> float:
        limits = RateLimiter(requests_per_minute=None, tokens_per_minute=None, clock=lambda: now)
        await limits.turn(1)
        assert now == 5.0
        limits.pause(3.0)
        limits.pause(1.0)
        await limits.turn(1)
        return now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_sender.asyncio, "sleep", sleep)
        assert asyncio.run(run()) == 8.0
