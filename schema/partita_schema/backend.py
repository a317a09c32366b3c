"""Where the run takes place: a union on `type`."""

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from partita_schema.base import Base, Count, Name, NonNegativeCount, Positive, broken

SET_ELSEWHERE = {
    "model": "backend.model",
    "messages": "prompt",
    "prompt": "prompt",
    "seed": "generation.seed",
    "stop": "generation.stop",
    "logprobs": "generation.logprobs",
}
"""Keys of a request that the file has a place of its own for."""
ONE_WHOLE_ANSWER = ("stream", "n", "best_of", "echo")
"""Keys of a request that make something else of an answer than one text that comes at once."""

Sharding = Literal["none", "full"]
"""What of a model that is trained each process holds."""

HOST_AND_PORT = r"[A-Za-z0-9._\[\]:-]+:[0-9]{1,5}"


class LocalBackend(Base):
    """This process."""

    type: Literal["local"] = "local"
    """This process."""


class TorchrunBackend(Base):
    """Several processes, started by torchrun: on one machine, or on several by the same command on each."""

    type: Literal["torchrun"]
    """Several processes: a step's batches and the rows to answer are shared among them."""
    processes: Count | Literal["auto"] = "auto"
    """Processes on each machine. `auto`: one for each GPU, else one."""
    nodes: Count = 1
    """Machines; the same command is started on each of them."""
    address: Name | None = None
    """Where machines find each other, `HOST:PORT` of one of them. Needed with more than one."""
    sharding: Sharding = "none"
    """What each process holds of a model that is trained. none: all of it. full: a part of the weights, the gradients
    and the state of the optimizer, and of a layer all weights while it is at work (FSDP2)."""
    timeout_seconds: Positive = 1800.0
    """Time after which a process that waits for another gives up."""

    @field_validator("address")
    @classmethod
    def address_has_a_port(cls, address: str | None) -> str | None:
        if address is not None and not re.fullmatch(HOST_AND_PORT, address):
            raise broken("write the name or number of a machine and a port, such as node-0:29500")
        return address

    @model_validator(mode="after")
    def machines_find_each_other(self) -> "TorchrunBackend":
        if self.nodes > 1 and self.address is None:
            raise broken("with nodes above 1, write address: HOST:PORT of one of them", at="address")
        return self


class RayBackend(Base):
    """Processes that Ray starts, on this machine or on those of a cluster, and may start again when one dies."""

    type: Literal["ray"]
    """Ray (`pip install 'partita[ray]'`): workers train together, or answer the rows that predict and evaluate deal."""
    workers: Count | Literal["auto"] = "auto"
    """Processes that hold the model, each on a GPU of its own where there are any. `auto`: one for each GPU of the
    cluster, else one."""
    max_failures: NonNegativeCount = 3
    """How often a training whose worker has died is started again, at its newest checkpoint."""
    address: Name | None = None
    """Where a Ray cluster is, such as `ray-head:6379`; `auto` finds the one that this machine belongs to. Default: Ray
    is started on this machine, and ends with the job."""
    sharding: Sharding = "none"
    """What each process holds of a model that is trained. none: all of it. full: a part of the weights, the gradients
    and the state of the optimizer, and of a layer all weights while it is at work (FSDP2)."""
    timeout_seconds: Positive = 1800.0
    """Time after which a worker is given up that has not started, or has not answered."""

    @field_validator("address")
    @classmethod
    def address_is_a_head(cls, address: str | None) -> str | None:
        if address is not None and address != "auto" and not re.fullmatch(HOST_AND_PORT, address):
            raise broken("write HOST:PORT of the cluster's head, such as ray-head:6379, or auto on one of its machines")
        return address


class EndpointBackend(Base):
    """A server that speaks the protocol of OpenAI, such as vLLM, SGLang, llama.cpp or a hosted one."""

    type: Literal["endpoint"]
    """A server; it is only asked, nothing is trained."""
    url: Name
    """Address of the server up to its version, such as `http://localhost:8000/v1`."""
    model: Name | None = None
    """Name of the model on the server. Default: base_model."""
    api_key_env: Name | None = None
    """Name of the environment variable that holds the key; never the key itself. Default: no key is sent."""
    mode: Literal["chat", "completion"] | None = None
    """chat: messages are sent, and the server renders them. completion: the prompt is sent as one text. Default: chat,
    with prompt.chat: false completion."""
    concurrency: Count = 16
    """Requests at the same time."""
    requests_per_minute: Count | None = None
    """Most requests a minute, evenly apart, tries included. Default: no limit."""
    tokens_per_minute: Count | None = None
    """Most tokens a minute, those of prompts and answers together. Default: no limit."""
    timeout_seconds: Positive = 600.0
    """Time after which a request without a whole response is given up, however slowly it comes."""
    max_response_mb: Positive = 16.0
    """Largest response in megabytes, after decompression; a larger one is an error of its row."""
    retries: NonNegativeCount = 5
    """How often a request is sent again that met a busy or failing server."""
    extra_body: dict[str, Any] = {}
    """Further keys of each request, as the server knows them; null takes a key out that partita would send."""

    @field_validator("url")
    @classmethod
    def url_is_a_base_address(cls, url: str) -> str:
        wanted = "write an address with http:// or https://, such as http://localhost:8000/v1"
        try:
            parts = urlsplit(url)
            _ = parts.port  # raises for one that is none
        except ValueError as error:
            raise broken(f"{wanted}; got one with a mistake: {error}") from None
        if parts.scheme not in ("http", "https") or not re.fullmatch(r"[a-z0-9._:-]+", parts.hostname or ""):
            raise broken(wanted)
        if parts.username is not None:
            raise broken("a key has no place in the address; write api_key_env, the name of an environment variable")
        if parts.query or parts.fragment:
            raise broken("write the address alone, without ? and # and what follows")
        path = parts.path.rstrip("/")
        for ending in ("/chat/completions", "/completions"):
            if path.endswith(ending):
                raise broken(f"write the address without {ending}, which is added by mode")
        return url.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def api_key_is_named(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            # What stands there may be the key, so it is not shown.
            raise broken(
                "write the name of an environment variable, such as OPENAI_API_KEY; the key itself must not stand in "
                "the file"
            )
        return name

    @field_validator("extra_body")
    @classmethod
    def extra_body_adds(cls, body: dict[str, Any]) -> dict[str, Any]:
        for key in body:
            if key in SET_ELSEWHERE and body[key] is not None:
                raise broken(f"{key} has a place of its own; remove it, and write {SET_ELSEWHERE[key]}", at=key)
            if key in ONE_WHOLE_ANSWER:
                raise broken(f"{key} would change what an answer is: one text, whole; remove it", at=key)
        return body


Backend = Annotated[LocalBackend | TorchrunBackend | RayBackend | EndpointBackend, Field(discriminator="type")]
