"""Tests of the command: a server in another process, its clients, and its end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from partita import Model, ModelError
from partita.model import open_engine
from partita.serving.address import bound
from partita.serving.engine import ServingEngine
from partita.serving.hosts import is_loopback, why_foreign
from partita.serving.server import TOKEN, ServeOptions, serve, token_for
from partita_schema.errors import DataError, PartitaError

from .conftest import CONFIG, make_model

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    (folder / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n', encoding="utf8")
    (folder / "small.yaml").write_text(yaml.safe_dump(CONFIG | {"data": {"source": "rows.jsonl"}}), encoding="utf8")
    return folder / "small.yaml"


@contextmanager
def command(file: Path, *options: str, **environment: str) -> Iterator[tuple[Any, str, list[str]]]:
    """Start a server; yield its process, its address and the lines that it has printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "partita", "serve", str(file), "--port", "0", "--batch-size", "2", *options],
        env=ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=file.parent,
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip()]
        assert " is served at http://" in lines[0], process.communicate(timeout=30)
        if "0.0.0.0" in options and not environment:
            lines.append(process.stdout.readline().strip())
        yield process, lines[0].rpartition(" ")[2].replace("0.0.0.0", "127.0.0.1"), lines
    finally:
        process.kill()
        process.communicate(timeout=30)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_after_what_it_accepted(file: Path, number: int) -> None:
    body = {"prompt": "a", "max_tokens": 300, "temperature": 0}
    with command(file, "--quiet") as (process, url, lines), ThreadPoolExecutor(4) as pool:
        assert lines[0].startswith("small is served at http://127.0.0.1:")
        asked = [pool.submit(httpx2.post, f"{url}/v1/completions", json=body, timeout=60) for _ in range(3)]
        while float(httpx2.get(f"{url}/metrics").text.partition("\npartita_requests_total ")[2].split()[0]) < 3:
            pass
        process.send_signal(number)
        assert [future.result().status_code for future in asked] == [200] * 3
        assert process.wait(30) == 0
        _, errors = process.communicate(timeout=30)
        assert errors == ""


@pytest.mark.long
def test_another_address_than_loopback_needs_a_token(file: Path) -> None:
    with command(file, "--quiet", "--host", "0.0.0.0") as (_process, url, lines):
        token = lines[1].removeprefix("token: ")
        assert len(token) > 30
        assert httpx2.get(f"{url}/v1/models").status_code == 401
        assert httpx2.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {token}"}).status_code == 200


@pytest.mark.long
def test_a_client_of_smolagents_chats_and_calls_tools(model: Any, tmp_path: Path) -> None:
    from smolagents import OpenAIServerModel, tool

    @tool
    def weather() -> str:
        """Return the weather."""
        return "rain"

    saved = model.save(tmp_path / "saved")
    with command(saved, "--quiet", "--name", "small") as (_, url, _lines):
        client = OpenAIServerModel("small", api_base=f"{url}/v1", api_key="none", max_tokens=60, temperature=0)
        asked = [{"role": "user", "content": [{"type": "text", "text": "one red ball"}]}]
        reply = client.generate(asked)
        assert reply.content
        assert reply.token_usage.output_tokens > 0
        called = client.generate(asked, tools_to_call_from=[weather], max_tokens=200)
        [call] = called.tool_calls
        assert call.function.name == "weather"


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.9.9.9", True), ("0.0.0.0", False), ("::", False)],
)
def test_addresses_that_only_this_machine_reaches(host: str, own: bool) -> None:
    assert is_loopback(host) == own


@pytest.mark.parametrize(
    ("host", "origin", "reason"),
    [
        ("127.0.0.1:8000", None, None),
        ("localhost", "http://localhost", None),
        ("[::1]:8000", "http://[::1]:8000", None),
        (None, None, None),
        ("evil.example:8000", None, "the header Host names another machine"),
        ("evil.example:8000", "http://evil.example:8000", "the header Host names another machine"),
        ("127.0.0.1:8000", "http://evil.example", "the request comes from a page of another site"),
        ("127.0.0.1:8000", "http://127.0.0.1:9000", "the request comes from a page of another site"),
        ("127.0.0.1:8000", "null", "the request comes from a page of another site"),
    ],
)
def test_requests_of_pages_of_other_sites(host: str | None, origin: str | None, reason: str | None) -> None:
    found = why_foreign(host, origin)
    assert found is None if reason is None else found is not None and found.startswith(reason)


def test_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert token_for("127.0.0.1", wanted=False) is None
    assert token_for("127.0.0.1", wanted=True) != token_for("0.0.0.0", wanted=False)
    monkeypatch.setenv(TOKEN, "sixteen-letters!")
    assert token_for("127.0.0.1", wanted=False) == "sixteen-letters!"
    for wrong in ("short", "a token with spaces", "sixteen-létters!"):
        monkeypatch.setenv(TOKEN, wrong)
        with pytest.raises(PartitaError, match="PARTITA_TOKEN must have at least 16 letters"):
            token_for("127.0.0.1", wanted=False)


class Said(Exception):  # noqa: N818 -- ends a server that is ready
    """A line that a server has said."""


@pytest.mark.parametrize(("name", "served"), [(None, "tickets"), ("shop", "shop")])
def test_a_run_is_served_by_the_name_of_its_folder(
    name: str | None, served: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(line: str) -> None:
        raise Said(line)

    monkeypatch.chdir(model.save(tmp_path / "tickets"))
    with pytest.raises(Said, match=f"^{served} is served at http://"):
        Model.load(".", quiet=True).serve(port=0, name=name, context=200, batch_size=2, say=say)


def test_the_page_of_a_model_that_answers_no_messages_is_announced_with_the_reason(tmp_path: Path) -> None:
    def say(line: str) -> None:
        raise Said(line)

    plain = make_model(tmp_path)
    plain._backend.pipeline().lm.tokenizer.chat_template = None  # type: ignore[attr-defined]
    with pytest.raises(Said, match=r"^the page at / cannot chat: .*chat template"):
        plain.serve(port=0, ui=True, context=200, batch_size=2, say=say)


def test_an_address_that_is_taken() -> None:
    with bound("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        expected = f"cannot listen on 127.0.0.1 port {port}: Address already in use; write another --host or --port"
        with pytest.raises(DataError, match=expected):
            bound("127.0.0.1", port)
        missing = {**CONFIG, "base_model": "./missing"}
        with pytest.raises(DataError, match=expected):
            Model(missing, quiet=True).serve(port=port)
    with pytest.raises(ModelError, match="base_model: there is no folder missing"):
        Model(missing, quiet=True).serve(port=port)


def test_a_command_reports_an_address_that_is_taken_before_it_loads_libraries(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf8")
    with bound("127.0.0.1", 0) as sock:
        sock.listen()
        port = str(sock.getsockname()[1])
        words = [sys.executable, "-X", "importtime", "-m", "partita", "serve", "run.yaml", "--port", port]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"error: cannot listen on 127.0.0.1 port {port}: " in done.stderr
    loaded = {line.split("|")[-1].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "partita" in loaded
    assert loaded.isdisjoint({"torch", "transformers"})


@pytest.mark.parametrize(("host", "port"), [("local\0host", 0), ("127.0.0.1", 70_000)])
def test_an_address_that_cannot_be_is_refused(host: str, port: int) -> None:
    with pytest.raises(DataError, match=r"cannot listen on .*; write another --host or --port"):
        bound(host, port)


def test_an_address_that_is_taken_while_the_model_is_loaded(model: Model) -> None:
    with bound("127.0.0.1", 0) as other:
        port = other.getsockname()[1]

        def load() -> ServingEngine:
            other.listen()
            return open_engine(model, context=200, batch_size=2)

        with pytest.raises(DataError, match=f"cannot listen on 127.0.0.1 port {port}: .*; write another --host or"):
            serve(load, ServeOptions(port=port, name="x"), say=print)
