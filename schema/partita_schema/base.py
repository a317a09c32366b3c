"""Base classes and types of all configuration models: a frozen model that rejects unknown keys, and strict numbers.

By default, pydantic reads YAML's `batch_size: yes` as 1 and `8.0` as 8. Integers and flags are therefore strict. Floats
are lenient, because PyYAML reads `1e-4` as a string.
"""

import re
import warnings
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

Refusal = tuple[str, str]
"""What a rule between sections yields: a key of the file, and why it is not allowed and what to write instead."""


class ConfigModel(BaseModel):
    """Base class of configuration models: immutable, and an unknown key is an error.

    The string below a field is its documentation. `reference.field_docs` reads it from the source, because pydantic
    would do so at every import and double the time of `partita validate`. For the same reason, the default of a section
    is `Section.model_construct()`: `Section()` would build a separate validator for each section at every import.
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
class ExpectedText:
    """Annotation of a type with the text that error messages suggest, where the type alone does not say it."""

    text: str


def rule_error(message: str, *, at: str = "") -> PydanticCustomError:
    """Return the error of a violated rule. `at` is the dotted key to fix, relative to the model that defines the
    rule."""
    return PydanticCustomError("rule", "{message}", {"message": message, "at": at})


def is_set(model: BaseModel, key: str) -> bool:
    """Return whether a key differs from its default. Rules use this, so that a resolved file can be loaded again."""
    return bool(getattr(model, key) != type(model).model_fields[key].default)


def check_regex(pattern: str, *, at: str) -> None:
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise rule_error(f"{pattern!r} is not a regular expression ({error}); fix the pattern", at=at) from None


def refuse_boolean(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "Input should be a valid number")
    return value


PositiveInt = Annotated[int, Field(strict=True, ge=1)]
"""An integer of at least 1."""

NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
"""An integer of at least 0."""

Seed = Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)]
"""A random seed that Python, numpy and torch accept."""

StrictBool = Annotated[bool, Field(strict=True)]
"""A boolean; only true and false are accepted."""

Number = Annotated[float, BeforeValidator(refuse_boolean)]
"""A float; strings such as `1e-4` are accepted, booleans are not."""

NonNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
PositiveFraction = Annotated[Number, Field(gt=0, le=1)]
InnerFraction = Annotated[Number, Field(gt=0, lt=1)]
BelowOne = Annotated[Number, Field(ge=0, lt=1)]
Name = Annotated[str, Field(min_length=1)]
Direction = Literal["lower", "higher"]
"""Whether lower or higher values of a metric are better."""


NAME = re.compile(r"[A-Za-z][\w-]*")
"""A name that a package registers for one of its classes."""


def check_target(target: str) -> str:
    """Return the text if it is `module:Class`; otherwise raise a rule error."""
    if not is_target(target):
        raise rule_error(f"got {target!r}; write module:Class, such as my_package.parts:MyClass")
    return target


def check_target_or_name(target: str, *, at: str = "") -> str:
    """Return the text if it is `module:Class` or a name; otherwise raise a rule error for the key `at`."""
    if not is_target(target) and not NAME.fullmatch(target):
        raise rule_error(f"got {target!r}; write module:Class, such as my_package.parts:MyClass, or a name", at=at)
    return target


def is_target(target: str) -> bool:
    """Return whether the text is `module:Class`."""
    return re.fullmatch(r"\w+(\.\w+)*:\w+", target) is not None
