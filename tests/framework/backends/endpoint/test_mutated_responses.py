"""Tests with mutated responses: every row gets an answer or an error with a reason; nothing leaks, hangs or grows."""

import base64
import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from partita import Model
from partita_schema.errors import ModelError, ServerError
from partita_trainers.batch_size.linux import reset_peak, status

from .conftest import RawServer, prompt_of, whole
from .mutations import KEY, Case, Mutator

MakeFile = Callable[..., dict[str, Any]]
ROWS = [{"question": str(number)} for number in range(3)]
ODD = "1"
"""The prompt whose response is mutated."""
GOOD = json.dumps(Mutator(0).good()).encode()
OUTPUTS: tuple[dict[str, Any], ...] = (
    {"name": "answer", "type": "text"},
    {"name": "answer", "type": "json"},
    {"name": "answer", "type": "number"},
    {"name": "answer", "type": "category", "decoder": {"labels": ["fine", "bad"]}},
)
MOST_CPU_SECONDS = 60.0
"""Far above the cost of any case; a case above it is quadratic in its response, or does not end."""
MOST_BYTES = 500_000_000
FRAGMENT = 12
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def parts_of_the_key() -> set[str]:
    """Return what must appear nowhere: any twelve characters of the key, plain or encoded."""
    header = base64.b64encode(f"Bearer {KEY}".encode()).decode()[10:]
    forms = [KEY, quote(KEY, safe=""), header, "".join(f"\\u{ord(letter):04x}" for letter in KEY)]
    return {form[start : start + FRAGMENT] for form in forms for start in range(len(form) - FRAGMENT + 1)}


PARTS = parts_of_the_key()


def leaked(text: str) -> list[str]:
    return [part for part in PARTS if part in text]


class Harness:
    """Runs the job of three rows for one case after another."""

    def __init__(self, server: RawServer, make_file: MakeFile, caplog: Any) -> None:
        self.server, self.make_file, self.caplog = server, make_file, caplog
        self.most_cpu, self.most_bytes = 0.0, 0

    def model(self, number: int) -> Model:
        backend = {"url": self.server.url, "retries": 1 + number % 2, "timeout_seconds": 2, "api_key_env": "MY_KEY"}
        mode = "chat" if number % 3 else "completion"
        file = self.make_file(
            {**backend, "concurrency": 1 + number % 3, "mode": mode},
            output_features=[OUTPUTS[number % len(OUTPUTS)]],
            generation={"logprobs": number % 5 == 0},
        )
        return Model(file, quiet=True)

    def respond(self, case: Case | None) -> None:
        """Answer all rows correctly except the one whose response is mutated."""

        def reply(body: dict[str, Any]) -> Iterable[bytes]:
            if case is None or prompt_of(body) != ODD:
                yield whole(GOOD)
                return
            for piece in case.pieces:
                if piece:
                    yield piece
                else:
                    time.sleep(0.02)

        self.server.reply = reply

    def run(self, number: int, case: Case) -> str:
        """Return the outcome of the row; assert what holds for every case."""
        model, output = self.model(number), Path(("out.jsonl", "out.csv", "out.parquet")[number % 3])
        self.respond(case)
        reset_peak()
        held, cpu = status("VmRSS") or 0, time.process_time()
        try:
            result = model.predict(ROWS, output, fresh=True)
        except (ModelError, ServerError) as error:
            message, outcome = str(error), "ended"
            self.respond(None)
            result = self.model(number).predict(ROWS, output)
            assert result.stats.ok == 3
        else:
            outcome = str(result[1]["status"])
            message = str(result[1]["error"])
            assert [result[row]["status"] for row in (0, 2)] == ["ok", "ok"]
        self.most_cpu = max(self.most_cpu, time.process_time() - cpu)
        self.most_bytes = max(self.most_bytes, (status("VmHWM") or 0) - held)
        assert self.most_cpu < MOST_CPU_SECONDS
        assert self.most_bytes < MOST_BYTES
        stats = result.stats
        assert len(result) == stats.rows == stats.ok + stats.errors + stats.skipped == 3
        assert outcome != "error" or message
        assert not CONTROLS.search(message)
        self.check_secrecy(message)
        return outcome

    def check_secrecy(self, error_text: str) -> None:
        """Check that no message, file or log contains the key."""
        assert not leaked(error_text)
        assert not leaked(self.caplog.text)
        for path in Path().rglob("*"):
            if path.is_file():
                assert not leaked(path.read_bytes().decode("utf-8", errors="replace")), path
        self.caplog.clear()


@pytest.fixture
def harness(raw_server: RawServer, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> Harness:
    monkeypatch.setenv("MY_KEY", KEY)
    caplog.set_level(logging.INFO)
    return Harness(raw_server, make_file, caplog)


def run_all(harness: Harness, *, seed: int, cases: int) -> dict[str, int]:
    """Return the numbers of cases by outcome of their row."""
    mutator, outcomes = Mutator(seed), dict.fromkeys(("ok", "error", "ended"), 0)
    for number in range(cases):
        case = mutator.case(number)
        try:
            outcomes[harness.run(number, case)] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}, case {number}, {case.kind}: {b''.join(case.pieces)[:600]!r}")
            raise
    return outcomes


@pytest.mark.long
def test_mutated_responses_do_not_end_the_job_or_lose_rows(harness: Harness) -> None:
    outcomes = run_all(harness, seed=17, cases=42)
    assert min(outcomes.values()) > 2, outcomes


@pytest.mark.long
def test_many_mutated_responses_do_not_end_the_job_or_lose_rows(harness: Harness) -> None:
    outcomes = run_all(harness, seed=1, cases=308)
    assert min(outcomes.values()) > 20, outcomes
