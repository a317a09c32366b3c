"""What every part of the configuration is built from: a frozen model that refuses unknown keys, and strict numbers.

pydantic reads YAML's `batch_size: yes` as 1 and `8.0` as 8 when left to itself. Counts and flags are therefore strict;
floats stay lenient, because PyYAML reads `1e-4` as a string.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


class Base(BaseModel):
    """A piece of the configuration: immutable, and an unknown key is an error.

    The sentence under a field is its documentation; `reference.field_docs` reads it from the source, because pydantic
    would do so at every import, which doubles the time that `partita validate` takes. For the same reason the default
    of a section is `Section.model_construct()`: `Section()` would build a validator for each section at every import,
    beside the one of the whole configuration.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        defer_build=True,
        allow_inf_nan=False,
        validate_default=False,
        protected_namespaces=(),
    )


@dataclass(frozen=True)
class Words:
    """Among the annotations of a type: what to write, where the types alone do not tell."""

    text: str


def broken(message: str, *, at: str = "") -> PydanticCustomError:
    """An error of a rule between keys. `at` is the key to mend, dotted, relative to the model that holds the rule."""
    return PydanticCustomError("rule", "{message}", {"message": message, "at": at})


def changed(model: BaseModel, key: str) -> bool:
    """Whether a key has another value than its default: rules ask this, so that a resolved file loads again."""
    return bool(getattr(model, key) != type(model).model_fields[key].default)


def refuse_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "Input should be a valid number")
    return value


Count = Annotated[int, Field(strict=True, ge=1)]
"""A whole number of at least 1."""

NonNegativeCount = Annotated[int, Field(strict=True, ge=0)]
"""A whole number of at least 0."""

Flag = Annotated[bool, Field(strict=True)]
"""true or false."""

Number = Annotated[float, BeforeValidator(refuse_boolean)]
"""A number; `1e-4` is read as one."""

NonNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
