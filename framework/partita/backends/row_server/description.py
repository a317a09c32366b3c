"""The description of a server of rows, and its comparison with a file."""

import os
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel, ConfigDict, ValidationError

from partita.backends.endpoint.protocol import error_message
from partita.backends.endpoint.redaction import Redaction
from partita.backends.endpoint.request_sender import deepest_reason
from partita.pipeline.fingerprint import section_fingerprints
from partita.serving.server import TOKEN
from partita_schema.config import Config
from partita_schema.errors import DataError, ModelError, PartitaError, ServerError

SECONDS = 120.0
"""Longest time for the description, for which the server may have to read all weights."""
START = "Start the server with partita serve, or correct --server"


class Description(BaseModel):
    """What determines the answers of a server to rows."""

    model_config = ConfigDict(strict=True)

    fingerprint: str
    """Hash of the model, its labels and its reward model."""
    sections: dict[str, str]
    """Hash of each section of the server's file that determines answers."""
    labels: dict[str, tuple[str, ...]]
    """Labels by output."""
    do_sample: bool
    """Whether answers are sampled."""
    max_new_tokens: int
    context_tokens: int | None
    """Maximum number of tokens of a prompt and its answer; None for the context of the model."""
    model_context_tokens: int | None
    """The same as the model allows; None without limit."""
    max_rows: int
    """Maximum number of rows of a request."""
    max_body_bytes: int
    """Maximum size of a request in bytes."""


@dataclass(frozen=True)
class RowServer:
    """A server of rows, with its description."""

    url: str
    token: str | None
    description: Description


def server_address(url: str) -> str:
    """Return the address of a server without `/v1` and a slash at its end. Raise DataError if it is none."""
    wanted = "write the address that partita serve prints, such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError for an invalid port
    except ValueError as error:
        raise DataError(f"--server {url!r} is not a valid address: {error}; {wanted}") from None
    if parts.username is not None:
        raise DataError(f"--server: a token has no place in the address; set the environment variable {TOKEN}")
    if parts.scheme not in ("http", "https") or not re.fullmatch(r"[A-Za-z0-9._:-]+", parts.hostname or ""):
        raise DataError(f"--server {url!r} is not an address; {wanted}")
    if parts.query or parts.fragment:
        raise DataError(f"--server {url!r} has more than an address; {wanted}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def token_of_environment() -> str | None:
    """Return the token of PARTITA_TOKEN; None if it is not set. Raise ModelError if it cannot be a header."""
    token = os.environ.get(TOKEN, "").strip()
    if not token.isascii() or (token and not token.isprintable()):
        raise ModelError(f"{TOKEN} holds characters that no token has; set it again")
    return token or None


def open_server(url: str) -> RowServer:
    """Return a server with its description.

    Raises:
        DataError: The address is none, or no server of partita is there.
        ModelError: The server needs a token, or another one.
        ServerError: The server cannot be reached, or is stopping.
    """
    address, token = server_address(url), token_of_environment()
    redaction = Redaction(token)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        response = httpx2.get(f"{address}/predict", headers=headers, timeout=SECONDS)
    except httpx2.TimeoutException:
        raise ServerError(f"{address} does not answer within {SECONDS:g} s. {START}") from None
    except httpx2.RequestError as error:
        raise ServerError(f"{address} cannot be reached: {deepest_reason(error)}. {START}") from None
    if response.status_code != 200:
        raise why_refused(address, response.status_code, redaction.message(error_message(response.text)[0]), token)
    try:
        return RowServer(address, token, Description.model_validate_json(response.content))
    except ValidationError:
        raise no_partita(address) from None


def why_refused(address: str, status: int, message: str, token: str | None) -> PartitaError:
    """Return the error that a refusal of all requests of this client means.

    Args:
        address: Address of the server.
        status: Status of the response.
        message: The server's message.
        token: The token that was sent.
    """
    if status == 403:
        return ModelError(f"{address} refuses this client: {message}")
    if status == 401:
        if token is None:
            return ModelError(f"{address} needs its token; set the environment variable {TOKEN} to it")
        return ModelError(f"{address} does not take the token in {TOKEN}; set it to that of the server")
    if status >= 500:
        return ServerError(f"{address} failed ({status}): {message}. {START}")
    return no_partita(address)


def no_partita(address: str) -> DataError:
    """Return the error of an address where another program answers."""
    return DataError(
        f"no server of partita answers at {address}; write the address that partita serve prints. For other servers, "
        "write backend: {type: endpoint} in the file"
    )


def check_fits(server: RowServer, config: Config, *, name: str) -> None:
    """Raise DataError if a server was started with a file that gives other answers.

    Args:
        server: The server.
        config: The configuration.
        name: Name of the file or the run.
    """
    here, there = section_fingerprints(config), server.description.sections
    differ = [section for section in {**here, **there} if here.get(section) != there.get(section)]
    if differ:
        raise DataError(
            f"the server at {server.url} was started with other values than {name}: {', '.join(sorted(differ))}. "
            "Name the file or the run that it serves, with the same --set"
        )
