"""Tests that everything but a server works without the packages of the extras `serve` and `chat`."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
for name in ("starlette", "uvicorn", "prometheus_client", "prompt_toolkit"):
    sys.modules[name] = None
import partita.model
from partita.cli.main import app
from partita.serving.server import ServeOptions, serve
from partita_schema.errors import PartitaError
try:
    serve(None, ServeOptions(name="x", port=0), say=print)
except PartitaError as error:
    print(error)
"""


@pytest.mark.long
def test_without_the_packages_only_serving_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('partita serve needs further packages: pip install "partita[serve]" (')
