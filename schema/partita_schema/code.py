"""Code that a configuration runs besides partita and installed packages: `module:Class` values and code of models.

The user who writes a configuration agrees to run it. For a model or run that another person saved, this code is listed
so that it can be refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import AfterValidator, BaseModel

from partita_schema.base import check_target, check_target_or_name, is_target
from partita_schema.config import Config
from partita_schema.sections.agents import ModelAgentConfig
from partita_schema.sections.backend import EndpointBackendConfig, RayBackendConfig, TorchrunBackendConfig
from partita_schema.sections.model import ModelParameters
from partita_schema.sections.simulation import EnvironmentWorldConfig

Path = tuple[str, ...]

SECTIONS: dict[str, tuple[str, ...]] = {
    "training": ("trainer", "callbacks", "data.collate", "simulation"),
    "simulation": ("simulation",),
    "data": ("data.source", "data.mix", "data.validation", "data.test"),
}
"""Keys whose code runs only for one activity; all other code runs as soon as the model is used."""


@dataclass(frozen=True)
class Code:
    """A configuration value that runs code."""

    key: str
    value: str

    def __str__(self) -> str:
        return f"{self.key}: {self.value}"

    def is_under(self, keys: Sequence[str]) -> bool:
        """Return whether the key is one of `keys` or below one."""
        return any(f"{self.key}.".startswith((f"{key}.", f"{key}[")) for key in keys)


def code_of(config: Config, *, of: str) -> list[Code]:
    """Return the values that run code for an activity: `model`, or a key of SECTIONS.

    Names that installed packages register for their classes are not included; installing the package is consent.
    """
    entries = [Code(key, value) for key, value in walk(config, "")]
    if of != "model":
        return [code for code in entries if code.is_under(SECTIONS[of])]
    apart = [key for keys in SECTIONS.values() for key in keys]
    return [code for code in entries if not code.is_under(apart)]


def walk(model: BaseModel, key: str) -> Iterator[tuple[str, str]]:
    """Yield the key and value of everything in a section that runs code."""
    yield from special(model, key)
    for name, field in type(model).model_fields.items():
        value, path = getattr(model, name), f"{key}.{name}".removeprefix(".")
        if isinstance(value, str):
            if is_target(value) and takes_target(field.annotation, field.metadata):
                yield path, value
        else:
            yield from walk_values(value, path)


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
    """Yield values that run code but are not `module:Class`."""
    at = f"{key}." if key else ""
    if isinstance(model, Config) and model.trust_remote_code:
        yield "trust_remote_code", "true"
    elif isinstance(model, ModelParameters) and model.pickled_weights:
        yield f"{at}pickled_weights", "true"
    elif isinstance(model, EnvironmentWorldConfig) and ":" in model.environment:  # includes Gymnasium's `module:Id-v0`
        yield f"{at}environment", model.environment
    elif isinstance(model, ModelAgentConfig) and model.file is not None:
        yield f"{at}file", model.file
    elif isinstance(model, RayBackendConfig | TorchrunBackendConfig) and model.address is not None:
        yield f"{at}address", model.address  # what the address sends is unpickled
    elif isinstance(model, EndpointBackendConfig):  # receives rows and an API key of the caller
        yield f"{at}url", model.url


def takes_target(annotation: Any, metadata: Sequence[Any]) -> bool:
    """Return whether a field is validated as `module:Class` or as a registered name."""
    checks = [entry.func for entry in metadata if isinstance(entry, AfterValidator)]
    if check_target in checks or check_target_or_name in checks:
        return True
    # pydantic does not move the metadata of Annotated[str, ...] | None to the field.
    inner = [*get_args(annotation), *getattr(annotation, "__metadata__", ())]
    return any(
        (isinstance(part, AfterValidator) and part.func in (check_target, check_target_or_name))
        or takes_target(part, ())
        for part in inner
    )
