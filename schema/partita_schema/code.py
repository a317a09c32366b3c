"""What a configuration runs beside partita and installed packages: classes by `module:Class`, and a model's own code.

A person who writes a file says so with it. Of a saved model or run that somebody else made it is listed, to be refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import AfterValidator, BaseModel

from partita_schema.agents import ModelAgentConfig
from partita_schema.backend import EndpointBackend, RayBackend
from partita_schema.config import Config
from partita_schema.model import ModelParameters
from partita_schema.simulation import EnvironmentWorldConfig
from partita_schema.target import check_part, check_target, is_target

Path = tuple[str, ...]

SECTIONS: dict[str, tuple[str, ...]] = {
    "training": ("trainer", "data.collate", "simulation"),
    "simulation": ("simulation",),
    "data": ("data.source", "data.mix", "data.validation", "data.test"),
}
"""Keys whose code runs only when that is done; everything else runs as soon as the model is used."""


@dataclass(frozen=True)
class Code:
    """A value of a configuration that runs code."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}: {self.value}"

    def is_under(self, keys: Sequence[str]) -> bool:
        """Whether the key is one of these or below one."""
        return any(f"{self.key}.".startswith((f"{key}.", f"{key}[")) for key in keys)


def code_of(config: Config, *, of: str) -> list[Code]:
    """Return what runs code when that is done: `model`, or one of SECTIONS.

    Names that installed packages give to classes of theirs are not among it: who installed them chose them.
    """
    found = [Code(key, value) for key, value in walk(config, "")]
    if of != "model":
        return [code for code in found if code.is_under(SECTIONS[of])]
    apart = [key for keys in SECTIONS.values() for key in keys]
    return [code for code in found if not code.is_under(apart)]


def walk(model: BaseModel, key: str) -> Iterator[tuple[str, str]]:
    """Yield key and value of all that runs code in a section."""
    yield from special(model, key)
    for name, field in type(model).model_fields.items():
        value, place = getattr(model, name), f"{key}.{name}".removeprefix(".")
        if isinstance(value, str):
            if is_target(value) and takes_target(field.annotation, field.metadata):
                yield place, value
        else:
            yield from walk_values(value, place)


def walk_values(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, BaseModel):
        yield from walk(value, key)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from walk_values(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from walk_values(item, f"{key}[{number}]")


def special(model: BaseModel, key: str) -> Iterator[tuple[str, str]]:
    """Yield what runs code and is no `module:Class`."""
    at = f"{key}." if key else ""
    if isinstance(model, Config) and model.trust_remote_code:
        yield "trust_remote_code", "true"
    elif isinstance(model, ModelParameters) and model.pickled_weights:
        yield f"{at}pickled_weights", "true"
    elif isinstance(model, EnvironmentWorldConfig) and ":" in model.environment:  # Gymnasium's `module:Id-v0` as well
        yield f"{at}environment", model.environment
    elif isinstance(model, ModelAgentConfig) and model.file is not None:
        yield f"{at}file", model.file
    elif isinstance(model, RayBackend) and model.address is not None:  # what comes back from there is unpickled
        yield f"{at}address", model.address
    elif isinstance(model, EndpointBackend):  # rows and a key of the caller's are sent there
        yield f"{at}url", model.url


def takes_target(annotation: Any, metadata: Sequence[Any]) -> bool:
    """Whether a field is checked to be `module:Class`, or a name of one."""
    checks = [entry.func for entry in metadata if isinstance(entry, AfterValidator)]
    if check_target in checks or check_part in checks:
        return True
    # Of Annotated[str, ...] | None pydantic leaves the metadata where it stands.
    inner = [*get_args(annotation), *getattr(annotation, "__metadata__", ())]
    return any(
        (isinstance(part, AfterValidator) and part.func in (check_target, check_part)) or takes_target(part, ())
        for part in inner
    )
