"""Tests of jobs that are interrupted."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from partita import Model

from .conftest import LocalServer, Response, answer, prompt_of

MakeFile = Callable[..., dict[str, Any]]
ROWS = [{"question": f"question {n}"} for n in range(40)]
SCRIPT = """
import json, sys
from partita import Model
file, rows = json.load(sys.stdin)
Model(file, quiet=True).predict(rows, "out.jsonl")
"""


def journal_rows() -> list[int]:
    """Return the rows of the journal."""
    (path,) = Path("runs/run/journal").glob("*.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [json.loads(line)["row"] for line in lines]


def answering_some(server: LocalServer, count: int) -> threading.Event:
    """Answer `count` requests and block the others; the event is set when one blocks."""
    hanging = threading.Event()

    def reply(body: dict[str, Any]) -> Response:
        if int(prompt_of(body).split()[1]) < count:
            return answer(body, "fine")
        hanging.set()
        server.hang()
        return answer(body, "late")

    server.reply = reply
    return hanging


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_job_at_once_and_keeps_answered_rows(
    server: LocalServer, make_file: MakeFile, number: signal.Signals
) -> None:
    hanging = answering_some(server, 20)

    def interrupt() -> None:
        hanging.wait(10)
        time.sleep(0.2)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        Model(make_file({"concurrency": 4}), quiet=True).predict(ROWS, "out.jsonl")
    thread.join()
    assert not [thread for thread in threading.enumerate() if thread.name == "partita endpoint"], threads
    assert sorted(journal_rows()) == list(range(20)), "no wait for the late answers"
    asked = len(server.bodies)
    server.reply = lambda body: answer(body, "fine")
    result = Model(make_file({"concurrency": 4}), quiet=True).predict(ROWS, "out.jsonl")
    assert (result.stats.ok, result.stats.resumed) == (40, 20)
    assert len(server.bodies) - asked == 20
    assert sorted(journal_rows()) == list(range(40))


@pytest.mark.long
def test_a_killed_job_resumes(server: LocalServer, make_file: MakeFile) -> None:
    hanging = answering_some(server, 25)
    file = make_file({"concurrency": 4})
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps([file, ROWS]))
    process.stdin.close()
    try:
        assert hanging.wait(60)
        while len(journal_rows()) < 25:
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    asked = len(server.bodies)
    server.reply = lambda body: answer(body, "fine")
    result = Model(file, quiet=True).predict(ROWS, "out.jsonl")
    assert (result.stats.ok, result.stats.resumed, len(server.bodies) - asked) == (40, 25, 15)
    assert [row["question"] for row in result] == [row["question"] for row in ROWS]


def test_a_job_runs_inside_the_event_loop_of_a_notebook(server: LocalServer, make_file: MakeFile) -> None:
    import asyncio

    async def cell() -> int:
        return Model(make_file(), quiet=True).predict(ROWS).stats.ok

    assert asyncio.run(cell()) == 40
