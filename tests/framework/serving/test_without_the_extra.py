"""Tests that everything but a server works without the packages of the extras `serve` and `chat`."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
for name in sys.argv[1].split():
    sys.modules[name] = None
import partita.model
from partita.cli.main import app
from partita.serving.server import ServeOptions, serve
from partita_schema.errors import PartitaError
try:
    serve(lambda: print("the model is loaded"), ServeOptions(name="x", port=0), say=print)
except PartitaError as error:
    print(error)
"""


@pytest.mark.long
@pytest.mark.parametrize("missing", ["starlette uvicorn prometheus_client prompt_toolkit", "uvicorn"])
def test_without_the_packages_only_serving_is_refused_before_a_model_is_loaded(missing: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, missing], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('partita serve needs further packages: pip install "partita[serve]" (')
