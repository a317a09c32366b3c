"""The two parts of llama.cpp that an export uses: its converter, and its server by the binding xllamacpp."""

import json
import os
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from partita.export.answers import END, Answers
from partita.export.prompts import CheckPrompts
from partita.export.templates import Messages
from partita_schema.errors import ExportError, PartitaError

VARIABLE = "PARTITA_LLAMA_CPP"
"""Environment variable that names a checkout of llama.cpp."""
CONVERTER = "convert_hf_to_gguf.py"
BINDING = "xllamacpp"
NO_CHECKOUT = (
    "{missing}; the converter of GGUF files is {converter} in the repository of llama.cpp: run `git clone --depth 1 "
    "https://github.com/ggml-org/llama.cpp`, or unpack vendor/llama.cpp from `pip download --no-deps --no-binary :all: "
    "llama-cpp-python`, and name the folder with --llama-cpp or the environment variable {variable}"
)
NOT_COMPARED = (
    "the answers of the GGUF file were not compared, because no binding of llama.cpp is installed; run pip install "
    "'partita[gguf]' and export again"
)
LAST_LINES = 6
"""Lines of the converter that an error shows."""
TIMEOUT_SECONDS = 600
"""Time for an answer of the server."""


def find_checkout(named: Path | None) -> Path:
    """Return the checkout of llama.cpp: the named one, or that of the environment variable. Raise PartitaError."""
    folder = named
    if folder is None and os.environ.get(VARIABLE):
        folder = Path(os.environ[VARIABLE])
    if folder is None:
        missing = "no checkout of llama.cpp is named"
    elif not (folder / CONVERTER).is_file():
        missing = f"{folder} has no {CONVERTER}"
    else:
        return folder
    raise PartitaError(NO_CHECKOUT.format(missing=missing, converter=CONVERTER, variable=VARIABLE))


def convert(checkout: Path, *words: object) -> None:
    """Run the converter with the packages of this Python. Raise ExportError with its last lines if it fails."""
    command = [sys.executable, str(checkout / CONVERTER), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        advice = ""
        if "No module named" in done.stderr:
            advice = "; install what it needs with pip install 'partita[gguf]'"
        elif "NotImplementedError" in done.stderr:
            advice = "; a newer checkout may support the model"
        raise ExportError(f"{CONVERTER} failed: {' / '.join(lines[-LAST_LINES:])}{advice}")


def has_binding() -> bool:
    """Return whether the binding of llama.cpp is installed."""
    return find_spec(BINDING) is not None


@dataclass(frozen=True)
class LlamaServer:
    """A server of llama.cpp in this process, with a GGUF file."""

    address: str
    """Its URL."""
    key: str
    """What a request is allowed with."""

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer. Raise ExportError if the server refuses it."""
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"{self.address}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                answer: dict[str, Any] = json.load(response)
        except OSError as error:
            raise ExportError(f"llama.cpp does not answer {path} with the GGUF file: {error}") from error
        return answer

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, with special tokens in it and none added."""
        return list(self.post("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"])

    def answer(self, ids: Sequence[int], *, max_tokens: int, ends: Sequence[int]) -> tuple[int, ...]:
        """Return the greedy answer to a prompt, with END if it ended.

        Args:
            ids: The prompt.
            max_tokens: Maximum new tokens.
            ends: End tokens of the run, which the answer may contain as its last token.
        """
        body = {"prompt": list(ids), "n_predict": max_tokens, "temperature": 0, "samplers": ["temperature"]}
        answer = self.post("/completion", {**body, "return_tokens": True, "cache_prompt": False})
        tokens = list(answer["tokens"])
        while tokens and tokens[-1] in ends:
            tokens.pop()
        return (*tokens, END) if answer["stop_type"] == "eos" else tuple(tokens)

    def render(self, messages: Messages) -> str | None:
        """Return a dialogue as the chat template of the file renders it."""
        return str(self.post("/apply-template", {"messages": list(messages)})["prompt"])


@contextmanager
def serving(path: Path, *, context_length: int | None) -> Iterator[LlamaServer]:
    """Load a GGUF file on the CPU and serve it in the context, on a free port of this machine.

    Args:
        path: The file.
        context_length: Context length in tokens; None for that of the file.
    """
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = context_length or 0
    parameters.n_parallel = 1
    parameters.n_gpu_layers = 0
    parameters.warmup = False
    parameters.verbosity = -1
    key = secrets.token_hex(16)
    parameters.api_keys = [key]
    try:
        server = xllamacpp.Server(parameters)
    except RuntimeError as error:
        raise ExportError(f"llama.cpp cannot load {path}: {error}") from error
    try:
        yield LlamaServer(server.listening_address, key)
    finally:
        del server


def server_answers(server: LlamaServer, prompts: CheckPrompts, *, ends: Sequence[int]) -> Answers:
    """Return the answers of a GGUF file.

    Args:
        server: Serves it.
        prompts: The prompts.
        ends: End tokens of the run.
    """
    return Answers(
        tokens=tuple(
            server.answer(request.input_ids, max_tokens=request.max_new_tokens, ends=ends)
            for request in prompts.requests
        )
    )
