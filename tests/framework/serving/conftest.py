"""A small model, and servers of it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from partita import Model
from partita.model import open_engine
from partita.serving.address import bound
from partita.serving.app import ServerState, make_app
from partita.serving.engine import ServingEngine
from partita.serving.server import run_server

CHATML = (
    "{% if tools %}tools: {{ tools | tojson }}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONFIG: dict[str, Any] = {
    "base_model": {"type": "scratch", "size": "nano", "tokenizer": "byte", "context_length": 1024},
    "input_features": [{"name": "question", "type": "text"}],
    "output_features": [{"name": "answer", "type": "text", "decoder": {"max_new_tokens": 12}}],
    "trainer": {"type": "none", "batch_size": 8},
    "prompt": {"template": "{question} ->", "chat": False},
}
QUESTIONS = ["one red ball", "two", "three blue balls and a cat", "four cats"]


def make_model(folder: Path, **sections: Any) -> Model:
    """Return a model whose answers vary, with a chat template."""
    rows = folder / "rows.jsonl"
    rows.write_text('{"question": "a", "answer": "b"}\n', encoding="utf8")
    made = Model({**CONFIG, "data": {"source": str(rows)}, **sections}, quiet=True)
    lm: Any = made._backend.pipeline().lm
    lm.tokenizer.chat_template = CHATML
    with torch.no_grad():
        for parameter in lm.module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return made


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("served"))


@dataclass
class RunningServer:
    """A server in a thread."""

    url: str
    engine: ServingEngine
    thread: threading.Thread


@contextmanager
def running(model: Model, *, engine: dict[str, Any] | None = None, **state: Any) -> Iterator[RunningServer]:
    """Serve a model on a free port until the end of the context."""
    opened = open_engine(model, **{"context": 1024, "batch_size": 4, **(engine or {})})
    sock = bound("127.0.0.1", 0)
    ready = threading.Event()
    with sock, opened:
        app = make_app(ServerState(opened, "small", 1_700_000_000, **state))
        thread = threading.Thread(
            target=run_server, args=(app, opened, sock), kwargs={"finish_seconds": 5.0, "ready": ready.set}
        )
        thread.start()
        assert ready.wait(20)
        try:
            yield RunningServer(f"http://127.0.0.1:{sock.getsockname()[1]}", opened, thread)
        finally:
            opened.refuse_new()
            thread.join(20)
            assert not thread.is_alive(), "the server has not stopped"


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[RunningServer]:
    with running(model) as started:
        yield started


def wait_for(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)
