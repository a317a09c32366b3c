"""A server in this process that replaces the Hub: it records requests and has no repositories."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from partita import Model, PartitaError

from .observers import Config, Observation


def asking_hub(config: Config, place: Path) -> Observation:
    """Train until the Hub reports a missing repository; return the requests."""
    with hub() as paths, suppress(PartitaError):
        Model(config, quiet=True).train(run=place / "run")
    return {"asked": sorted({path for path in paths if "/resolve/" in path})}


@contextmanager
def hub() -> Iterator[list[str]]:
    """Redirect the libraries to a server in this process; yield the list of requested paths.

    They read the address of the Hub when they are imported, so an environment variable would be too late.
    """
    import datasets
    from huggingface_hub import constants

    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "ENDPOINT", url)
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
            patch.setattr(constants, "HF_HUB_OFFLINE", False)
            patch.setattr(datasets.config, "HF_ENDPOINT", url)
            patch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
            yield paths
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
