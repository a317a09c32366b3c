"""Test of the upload to a Hub, with a small local server for the requests of huggingface_hub."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita import Model

SCRIPT = """
import sys
from partita import Model
model = Model(sys.argv[1], quiet=True)
print(model.push_to_hub("somebody/colours"))
print(model.push_to_hub("somebody/public", private=False))
"""


class Hub(ThreadingHTTPServer):
    """A server that stores created repositories and commits; files are small and are sent inside the commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.tokens: set[str] = set()
        self.unknown: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.tokens.add(self.headers.get("Authorization", "none"))
        name = "/".join(self.path.split("/")[3:5])
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            made = self.server.created[-1]
            self.answer({"url": f"{self.server.address}/{made['organization']}/{made['name']}"})
        elif self.path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            self.answer(
                {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]}
            )
        elif self.path.endswith("/commit/main"):
            files = self.server.files.setdefault(name, {})
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.server.messages.append(line["value"]["summary"])
                else:
                    assert line["key"] == "file"
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"commitUrl": f"{self.server.address}/{name}/commit/1", "commitOid": "1"})
        else:
            self.refuse()

    def do_GET(self) -> None:
        self.refuse()

    def refuse(self) -> None:
        self.server.unknown.append(f"{self.command} {self.path}")
        self.send_error(404)

    def answer(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *words: Any) -> None:
        """Log nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.long
def test_a_pushed_model_is_complete_and_can_be_loaded(
    hub: Hub, colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = colours.config(trainer={"type": "none", "batch_size": 4})
    (tmp_path / "zero.yaml").write_text(yaml.safe_dump(settings), encoding="utf8")
    environment = os.environ | {
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": "hf_secret",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "zero.yaml"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr}\n{hub.unknown}"
    assert done.stdout.splitlines() == [f"{hub.address}/somebody/colours", f"{hub.address}/somebody/public"]
    assert [(one["name"], one["organization"], one["visibility"]) for one in hub.created] == [
        ("colours", "somebody", "private"),
        ("public", "somebody", "public"),
    ]
    assert hub.messages == ["Upload from partita"] * 2
    assert hub.tokens == {"Bearer hf_secret"}
    assert hub.files["somebody/public"] == hub.files["somebody/colours"]

    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    for name, content in hub.files["somebody/colours"].items():
        (downloaded / name).write_bytes(content)
    rows = colours.rows(6)
    wanted = [row["colour_raw"] for row in Model(settings, quiet=True).predict(rows, output=tmp_path / "a.jsonl")]
    loaded = Model.load(downloaded, quiet=True)
    assert [row["colour_raw"] for row in loaded.predict(rows, output=tmp_path / "b.jsonl")] == wanted
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(downloaded).num_parameters() > 10_000
    assert len(AutoTokenizer.from_pretrained(downloaded)) <= 128
