"""Tests of the upload to a Hub, with a small local server for the requests of huggingface_hub, and of model cards."""

import base64
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from partita import Model, ModelError
from partita.backends.local import LocalBackend
from partita.export.shared_paths import replaced, shared_name

from ..json_lines import write_json_lines
from .conftest import Command
from .export.conftest import train_reward_model

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
        self.pages: list[str] = []
        """Model cards whose metadata was to be checked."""
        self.refused = ""
        """Why commits are refused; empty to accept them."""

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
        elif self.path == "/api/validate-yaml":
            self.server.pages.append(json.loads(body)["content"])
            self.answer({"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            self.answer(
                {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]}
            )
        elif self.path.endswith("/commit/main") and self.server.refused:
            self.send_error(403, self.server.refused)
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


@pytest.fixture
def reached_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Let huggingface_hub send its requests to the server."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return hub


SOURCE = """
# trained by me in {folder}
base_model: {folder}/base
input_features: [{{name: text}}]
output_features: [{{name: colour, type: category}}]
adapter: {{type: lora, r: 2}}
generation:
  max_new_tokens: ${{PUSHED_LIMIT}}
data: {{source: {folder}/rows.jsonl, split: {{type: random, probabilities: [0.5, 0.1, 0.4]}}}}
trainer: {{type: finetune, max_steps: 2, batch_size: 8, learning_rate: 0.01}}
"""


@pytest.fixture(scope="module")
def pushed_run(colours: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of an adapter on a local base model, whose file has a variable and absolute paths."""
    folder = tmp_path_factory.mktemp("pushed")
    Model(colours.config(trainer={"type": "none", "batch_size": 4}), quiet=True).save(folder / "base")
    (folder / "base" / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n", encoding="utf8")
    write_json_lines(folder / "rows.jsonl", colours.rows(40))
    (folder / "lora.yaml").write_text(SOURCE.format(folder=folder), encoding="utf8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PUSHED_LIMIT", "17")
        Model(folder / "lora.yaml", quiet=True).train(run=folder / "run")
    return folder / "run"


def test_the_model_card_has_what_a_reader_needs_and_no_local_path(
    pushed_run: Path, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not (pushed_run / "model" / "README.md").exists(), "peft's page has no content but a path"
    assert command("push", pushed_run, "somebody/colours", "--dry-run", tmp_path / "dry", "--quiet") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'dry'}\n"
    page = (tmp_path / "dry" / "README.md").read_text(encoding="utf8")
    _, header, body = page.split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["partita", "lora"],
        "license": "cc-by-4.0",
    }
    assert body.strip().startswith(
        "# colours\n\nAn adapter (`lora`) for a model in a local folder, `base`, which is not in this repository, "
        "trained with `finetune`. It reads `text` and predicts `colour` (category). The license of the base model is "
        "`cc-by-4.0`."
    )
    assert "| training | 20 | 20 | 0 | 0 | " in body
    assert re.search(r"\| colour\.accuracy \| 0\.\d+ \(0\.\d+ to 0\.\d+\) \|", body)
    assert "| steps | 2 |" in body
    assert "max_new_tokens: ${PUSHED_LIMIT}" in body, "variables stay as they were written"
    assert "data: {source: rows.jsonl, " in body
    assert str(pushed_run.parent) not in page
    assert "/home" not in page
    load = 'Model.load(snapshot_download("somebody/colours"), overrides=["base_model=base"])'
    assert f'{load}\nmodel.predict([{{"text": ...}}])' in body
    assert (
        "The adapter was trained on a model in a local folder, `base`. It can only be used with the same model: put "
        "its folder next to your program, or write its path or Hub id in place of `base`."
    ) in body
    assert command("push", pushed_run, "somebody/colours", "--dry-run", tmp_path / "dry") == 2
    advice = "dry exists and is not an empty folder; name another folder for the dry run"
    assert advice in capsys.readouterr().err


def test_a_pushed_adapter_has_no_local_path_and_loads_with_its_base_model_elsewhere(
    pushed_run: Path, colours: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Model.load(pushed_run, quiet=True)
    run.push_to_hub("somebody/colours", dry_run=tmp_path / "dry")
    for file in (tmp_path / "dry").iterdir():
        assert str(pushed_run.parent).encode() not in file.read_bytes(), file.name
    assert json.loads((tmp_path / "dry" / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    config = json.loads((tmp_path / "dry" / "partita.json").read_text())["config"]
    assert (config["base_model"], config["data"]["source"]) == ("base", "rows.jsonl")
    rows = colours.rows(6)
    wanted = run.predict(rows).to_pandas()
    (tmp_path / "other").symlink_to(pushed_run.parent / "base")
    monkeypatch.chdir(tmp_path)
    loaded = Model.load(tmp_path / "dry", overrides=["base_model=other"], quiet=True)
    assert loaded.predict(rows).to_pandas().equals(wanted)
    with pytest.raises(ModelError, match="base_model: there is no folder "):
        Model.load(tmp_path / "dry", overrides=["base_model=./base"], quiet=True).predict(rows)
    (tmp_path / "other").rename(tmp_path / "base")
    assert Model.load(tmp_path / "dry", quiet=True).predict(rows).to_pandas().equals(wanted)


def test_only_paths_are_replaced_by_names(tmp_path: Path) -> None:
    cached = "/root/.cache/huggingface/hub/models--org--name/snapshots/0123abcd"
    config = {
        "base_model": cached,
        "prompt": {"system": "/no_think/ or /think", "task": str(tmp_path), "retrieval": {"dataset": "~/a/pool.csv"}},
        "data": {"mix": [{"source": "/gone/data/*.jsonl"}, {"source": "relative/rows.csv"}]},
    }
    assert replaced(config, shared_name) == {
        "base_model": "org/name",
        "prompt": {"system": "/no_think/ or /think", "task": tmp_path.name, "retrieval": {"dataset": "pool.csv"}},
        "data": {"mix": [{"source": "*.jsonl"}, {"source": "relative/rows.csv"}]},
    }
    assert shared_name("/hub/models--gpt2/snapshots/01") == "gpt2"
    assert shared_name("/models/org/name") == "name"


def test_a_text_that_begins_like_a_path_stays_as_it_was_written(colours: Any, tmp_path: Path) -> None:
    task = "/no_think Is the ball red/blue or green?"
    prompt = {"task": task, "template": "/think/hard {__task__} {text}", "chat": False}
    config = colours.config(trainer={"type": "none", "batch_size": 4}, prompt=prompt)
    Model(config, quiet=True).push_to_hub("somebody/model", dry_run=tmp_path / "dry")
    page = (tmp_path / "dry" / "README.md").read_text(encoding="utf8")
    written = yaml.safe_load(page.partition("````yaml\n")[2].partition("````")[0])
    assert written["prompt"] == prompt


def test_the_code_of_the_card_of_a_reward_model_scores_an_answer(tmp_path: Path) -> None:
    train_reward_model(tmp_path).push_to_hub("somebody/model", dry_run=tmp_path / "dry")
    page = (tmp_path / "dry" / "README.md").read_text(encoding="utf8")
    assert "It reads `prompt`, `answer`, and predicts the score of the answer." in page
    code = page.split("```python\n")[1].split("```")[0].replace("...", "'the cat'")
    code = re.sub(r"snapshot_download\(.*?\)", repr(str(tmp_path / "dry")), code)
    *lines, call = code.strip().splitlines()
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    [row] = eval(call, names)
    assert isinstance(row["answer_score"], float)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["adapter", "new base", "head", "plain"])
def test_the_code_of_a_model_card_loads_the_model(pushed_run: Path, colours: Any, tmp_path: Path, kind: str) -> None:
    if kind == "adapter":
        model = Model.load(pushed_run, quiet=True)
    elif kind == "plain":
        model = Model(colours.config(trainer={"type": "none"}), quiet=True)
    else:
        changes: dict[str, Any] = {"adapter": {"type": "lora", "r": 2}}
        if kind == "head":
            colour = {"name": "colour", "type": "category", "head": "linear"}
            base = str(pushed_run.parent / "base")
            changes |= {"base_model": base, "output_features": [colour]}
        trainer = {"type": "finetune", "max_steps": 1, "batch_size": 8, "learning_rate": 0.01}
        config = colours.config(**changes) | {"trainer": trainer}
        if kind == "head":
            del config["generation"]
        model = Model(config, quiet=True)
        model.train(run=tmp_path / "run")
    model.push_to_hub("somebody/model", dry_run=tmp_path / "dry")
    code = (tmp_path / "dry" / "README.md").read_text(encoding="utf8").split("```python\n")[2].split("```")[0]
    code = code.replace('"somebody/model"', repr(str(tmp_path / "dry")))
    code = code.replace("snapshot_download('", "str('")
    code = re.sub(r'from_pretrained\("base"', f"from_pretrained({str(pushed_run.parent / 'base')!r}", code)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["model"].num_parameters() > 10_000
    assert len(names["tokenizer"]) <= 128
    if kind == "head":
        assert names["model"].base_model.config.num_labels == 3


def test_push_creates_a_repository_and_a_refusal_is_one_sentence(
    pushed_run: Path, reached_hub: Hub, command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command("push", pushed_run, "somebody/colours", "--public", "--quiet") == 0
    assert capsys.readouterr().out == f"{reached_hub.address}/somebody/colours\n"
    assert [one["visibility"] for one in reached_hub.created] == ["public"]
    assert {"README.md", "adapter_model.safetensors", "partita.json"} <= set(reached_hub.files["somebody/colours"])

    reached_hub.refused = "read only"
    assert command("push", pushed_run, "somebody/colours", "--quiet") == 1
    assert reached_hub.created[-1]["visibility"] == "private"
    message = capsys.readouterr().err
    assert "the Hub did not take the upload to somebody/colours: " in message
    assert "; check the name, the connection, and that the token of `hf auth login` may write there" in message
    for options in ((), ("--dry-run", tmp_path / "dry")):
        assert command("push", pushed_run, "two words", "--quiet", *options) == 2
        assert "'two words' is no name of a repository: " in capsys.readouterr().err
    assert not (tmp_path / "dry").exists()


def test_a_model_that_cannot_be_saved_leaves_no_repository(
    pushed_run: Path, reached_hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **named: object) -> None:
        raise ModelError("its weights are int8")

    monkeypatch.setattr(LocalBackend, "save", fails)
    with pytest.raises(ModelError, match="its weights are int8"):
        Model.load(pushed_run, quiet=True).push_to_hub("somebody/colours")
    assert reached_hub.created == []


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
    pages = [hub.files[f"somebody/{name}"].pop("README.md").decode() for name in ("colours", "public")]
    assert [page.splitlines()[7] for page in pages] == ["# colours", "# public"]
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
