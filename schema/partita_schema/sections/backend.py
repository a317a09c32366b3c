"""Where a run executes; a union on `type`."""

import re
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from partita_schema.base import ConfigModel, Name, NonNegativeInt, Positive, PositiveInt, rule_error

SET_ELSEWHERE = {
    "model": "backend.model",
    "messages": "prompt",
    "prompt": "prompt",
    "seed": "generation.seed",
    "stop": "generation.stop",
    "logprobs": "generation.logprobs",
}
"""Request keys that are set by other keys of the file."""
ONE_WHOLE_ANSWER = ("stream", "n", "best_of", "echo")
"""Request keys that would make the response something other than one complete text."""

Sharding = Literal["none", "full"]
"""Which part of a model in training each process stores."""

HOST_AND_PORT = r"[A-Za-z0-9._\[\]:-]+:[0-9]{1,5}"


class LocalBackendConfig(ConfigModel):
    """Run in this process."""

    loads_model: ClassVar[bool] = True
    """Whether the model and its settings are read from a checkpoint."""

    type: Literal["local"] = "local"
    """Run in this process."""


class TorchrunBackendConfig(ConfigModel):
    """Several processes started by torchrun, on one machine or on several. On several machines, run the same command on
    each."""

    loads_model: ClassVar[bool] = True
    type: Literal["torchrun"]
    """Run in several processes. They share the micro-batches of each optimizer step, and the rows to predict."""
    processes: PositiveInt | Literal["auto"] = "auto"
    """Number of processes per machine. `auto`: one per GPU, or one without GPUs."""
    nodes: PositiveInt = 1
    """Number of machines. Run the same command on each of them."""
    address: Name | None = None
    """Rendezvous endpoint `HOST:PORT` on one of the machines. Required with more than one machine."""
    sharding: Sharding = "none"
    """How a model in training is stored. none: each process holds all of it. full: weights, gradients and optimizer
    state are sharded across processes, and each layer is gathered while it is computed (FSDP2)."""
    timeout_seconds: Positive = 1800.0
    """Seconds that a process waits for another before the job fails."""

    @field_validator("address")
    @classmethod
    def address_has_a_port(cls, address: str | None) -> str | None:
        if address is not None and not re.fullmatch(HOST_AND_PORT, address):
            raise rule_error("write the name or number of a machine and a port, such as node-0:29500")
        return address

    @model_validator(mode="after")
    def machines_find_each_other(self) -> "TorchrunBackendConfig":
        if self.nodes > 1 and self.address is None:
            raise rule_error("with nodes above 1, write address: HOST:PORT of one of them", at="address")
        return self


class RayBackendConfig(ConfigModel):
    """Workers started by Ray, on this machine or on a cluster. Training restarts when a worker dies."""

    loads_model: ClassVar[bool] = True
    type: Literal["ray"]
    """Run on Ray (`pip install 'partita[ray]'`). Workers train together, share the rows of predict and evaluate, or run
    one trial of a sweep each."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Number of worker processes, each with its own GPU if there are any. `auto`: one per GPU of the cluster, or one
    without GPUs."""
    max_failures: NonNegativeInt = 3
    """How many times a training, or a trial of a sweep, restarts from its newest checkpoint after a worker died."""
    address: Name | None = None
    """Address of a Ray cluster, such as `ray-head:6379`; `auto` uses the cluster that this machine belongs to. Default:
    start Ray on this machine for the duration of the job."""
    sharding: Sharding = "none"
    """How a model in training is stored. none: each process holds all of it. full: weights, gradients and optimizer
    state are sharded across processes, and each layer is gathered while it is computed (FSDP2)."""
    timeout_seconds: Positive = 1800.0
    """Seconds after which a worker that did not start or respond counts as lost."""

    @field_validator("address")
    @classmethod
    def address_is_a_head(cls, address: str | None) -> str | None:
        if address is not None and address != "auto" and not re.fullmatch(HOST_AND_PORT, address):
            raise rule_error(
                "write HOST:PORT of the cluster's head, such as ray-head:6379, or auto on one of its machines"
            )
        return address


class EndpointBackendConfig(ConfigModel):
    """A server with an OpenAI-compatible API, such as vLLM, SGLang, llama.cpp or a hosted service."""

    loads_model: ClassVar[bool] = False
    type: Literal["endpoint"]
    """Send requests to a server. The model is not trained."""
    url: Name
    """Base URL of the API, including the version, such as `http://localhost:8000/v1`."""
    model: Name | None = None
    """Name of the model on the server. Default: base_model."""
    api_key_env: Name | None = None
    """Name of the environment variable that holds the API key, never the key itself. Default: no key is sent."""
    mode: Literal["chat", "completion"] | None = None
    """chat: send messages, and the server applies the chat template. completion: send the prompt as one text. Default:
    chat, or completion with `prompt.chat: false`."""
    concurrency: PositiveInt = 16
    """Maximum number of concurrent requests."""
    requests_per_minute: PositiveInt | None = None
    """Maximum requests per minute, spaced evenly, retries included. Default: no limit."""
    tokens_per_minute: PositiveInt | None = None
    """Maximum tokens per minute, prompts and answers together. Default: no limit."""
    timeout_seconds: Positive = 600.0
    """Seconds after which a request without a complete response is aborted."""
    max_response_mb: Positive = 16.0
    """Maximum size of a response in megabytes, after decompression. The row of a larger response fails."""
    retries: NonNegativeInt = 5
    """Number of retries of a request when the server is busy or fails."""
    extra_body: dict[str, Any] = {}
    """Additional keys of the request body. null removes a key that partita would send."""

    @field_validator("url")
    @classmethod
    def url_is_a_base_address(cls, url: str) -> str:
        wanted = "write an address with http:// or https://, such as http://localhost:8000/v1"
        try:
            parts = urlsplit(url)
            _ = parts.port  # raises ValueError for an invalid port
        except ValueError as error:
            raise rule_error(f"{wanted}; got one with a mistake: {error}") from None
        if parts.scheme not in ("http", "https") or not re.fullmatch(r"[a-z0-9._:-]+", parts.hostname or ""):
            raise rule_error(wanted)
        if parts.username is not None:
            raise rule_error(
                "a key has no place in the address; write api_key_env, the name of an environment variable"
            )
        if parts.query or parts.fragment:
            raise rule_error("write the address alone, without ? and # and what follows")
        path = parts.path.rstrip("/")
        for ending in ("/chat/completions", "/completions"):
            if path.endswith(ending):
                raise rule_error(f"write the address without {ending}, which is added by mode")
        return url.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def api_key_is_named(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            # The value may be the key itself, so it is not shown.
            raise rule_error(
                "write the name of an environment variable, such as OPENAI_API_KEY; the key itself must not be in "
                "the file"
            )
        return name

    @field_validator("extra_body")
    @classmethod
    def extra_body_adds(cls, body: dict[str, Any]) -> dict[str, Any]:
        for key in body:
            if key in SET_ELSEWHERE and body[key] is not None:
                raise rule_error(f"{key} has its own key; remove it, and write {SET_ELSEWHERE[key]}", at=key)
            if key in ONE_WHOLE_ANSWER:
                raise rule_error(f"{key} would change what an answer is: one text, whole; remove it", at=key)
        return body


Backend = Annotated[
    LocalBackendConfig | TorchrunBackendConfig | RayBackendConfig | EndpointBackendConfig, Field(discriminator="type")
]
