"""The schema as plain data: what each key accepts, read once from the pydantic models.

Error messages, the reference page and the search for misplaced keys use this, because pydantic's annotations express
the same thing in too many ways.
"""

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from partita_schema.base import ConfigModel, ExpectedText


@dataclass(frozen=True)
class Leaf:
    """A scalar."""

    kind: Literal["integer", "number", "text", "flag", "any"]
    words: str
    """Text for messages, such as `an integer of at least 1`."""


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Section:
    """A mapping with known keys."""

    model: type[ConfigModel]


@dataclass(frozen=True)
class Tagged:
    """A mapping whose keys depend on `type`."""

    arms: tuple[tuple[str, type[ConfigModel]], ...]

    def arm(self, tag: object) -> type[ConfigModel] | None:
        return next((model for name, model in self.arms if name == tag), None)


@dataclass(frozen=True)
class Items:
    """A list of any length with one shape, or a list of fixed length with a shape for each item."""

    item: "Shape"
    fixed: "tuple[Shape, ...] | None" = None
    least: int = 0


@dataclass(frozen=True)
class Named:
    """A mapping with arbitrary keys."""

    value: "Shape"


@dataclass(frozen=True)
class OneOf:
    """A union of several shapes."""

    arms: "tuple[Shape, ...]"


Shape: TypeAlias = Leaf | Choice | Section | Tagged | Items | Named | OneOf


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    name: str
    shape: Shape
    optional: bool
    """Whether null is allowed."""
    required: bool
    default: Any
    """Default value, or None if the key is required."""

    @property
    def can_be_off(self) -> bool:
        """Whether null differs from leaving the key out."""
        return self.optional and self.default is not None


@cache
def keys_of(model: type[ConfigModel]) -> dict[str, Key]:
    """Return the keys of a section, in the order of the model."""
    return {name: key_of(name, info) for name, info in model.model_fields.items()}


def key_of(name: str, info: FieldInfo) -> Key:
    shape, optional = split_null(info.annotation, tuple(info.metadata), tagged=info.discriminator is not None)
    required = info.is_required()
    default = None if required or info.default is PydanticUndefined else info.default
    return Key(name, shape, optional=optional, required=required, default=default)


def split_null(annotation: Any, metadata: tuple[Any, ...], *, tagged: bool) -> tuple[Shape, bool]:
    """Return the shape without null, and whether null was allowed."""
    arms = union_arms(annotation)
    rest = [arm for arm in arms if arm is not type(None)]
    if len(rest) == len(arms):
        return shape_of(annotation, metadata, tagged=tagged), False
    if len(rest) == 1:
        return shape_of(rest[0], metadata, tagged=tagged), True
    return union_shape(rest, tagged=tagged), True


def shape_of(annotation: Any, metadata: tuple[Any, ...] = (), *, tagged: bool = False) -> Shape:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        infos = [part for part in extra if isinstance(part, FieldInfo)]
        plain = [part for part in extra if not isinstance(part, FieldInfo)]
        texts = [part.text for part in plain if isinstance(part, ExpectedText)]
        if texts:
            return Leaf("any", texts[0])
        constraints = (*metadata, *plain, *(part for info in infos for part in info.metadata))
        return shape_of(inner, constraints, tagged=tagged or any(info.discriminator is not None for info in infos))
    if union_arms(annotation):
        return union_shape(list(union_arms(annotation)), tagged=tagged)
    if origin is Literal:
        return Choice(get_args(annotation))
    if origin is tuple:
        return items_shape(get_args(annotation), metadata)
    if origin is dict:
        return Named(shape_of(get_args(annotation)[1]))
    if isinstance(annotation, type) and issubclass(annotation, ConfigModel):
        return Section(annotation)
    return leaf(annotation, metadata)


def union_arms(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()


def union_shape(arms: list[Any], *, tagged: bool) -> Shape:
    if tagged:
        models = [arm for arm in arms if isinstance(arm, type) and issubclass(arm, ConfigModel)]
        return Tagged(
            tuple((tag, model) for model in models for tag in get_args(model.model_fields["type"].annotation))
        )
    shapes = tuple(shape_of(arm) for arm in arms if arm is not type(None))
    return shapes[0] if len(shapes) == 1 else OneOf(shapes)


def items_shape(arguments: tuple[Any, ...], metadata: tuple[Any, ...]) -> Items:
    least = next((part.min_length for part in metadata if isinstance(part, MinLen)), 0)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return Items(shape_of(arguments[0]), least=least)
    return Items(shape_of(arguments[0]), tuple(shape_of(argument) for argument in arguments))


def leaf(annotation: Any, metadata: tuple[Any, ...]) -> Leaf:
    if annotation is bool:
        return Leaf("flag", "true or false")
    if annotation is int:
        return Leaf("integer", f"an integer{bounds(metadata)}")
    if annotation is float:
        return Leaf("number", f"a number{bounds(metadata)}")
    if annotation is str:
        return Leaf("text", "a text")
    return Leaf("any", "a value")


def bounds(metadata: tuple[Any, ...]) -> str:
    """Return ` from 0 to 1`, ` of at least 1` or ` above 0`, or an empty text without limits."""
    least = [part.ge for part in metadata if isinstance(part, Ge)]
    above = [part.gt for part in metadata if isinstance(part, Gt)]
    most = [part.le for part in metadata if isinstance(part, Le)]
    below = [part.lt for part in metadata if isinstance(part, Lt)]
    if least and most:
        return f" from {least[0]} to {most[0]}"
    parts = [f"above {above[0]}"] if above else [f"of at least {least[0]}"] if least else []
    parts += [f"at most {most[0]}"] if most else [f"below {below[0]}"] if below else []
    return f" {' and '.join(parts)}" if parts else ""


def words(shape: Shape) -> str:
    """Return what to write, such as `an integer of at least 1, or auto`."""
    match shape:
        case Leaf():
            return shape.words
        case Choice(values):
            return " or ".join(str(value) for value in values) if len(values) < 3 else f"one of {listed(values)}"
        case Section():
            return "a mapping"
        case Tagged(arms):
            return f"a mapping with type: {one_of([tag for tag, _ in arms]) if len(arms) <= 10 else '...'}"
        case Items(item, fixed):
            if not fixed:
                return f"a list of {plural(item)}"
            alike = len(set(fixed)) == 1
            return f"a list of {len(fixed)} {plural(item)}" if alike else f"[{', '.join(map(words, fixed))}]"
        case Named(value):
            return f"a mapping from name to {words(value).removeprefix('a ').removeprefix('an ')}"
        case OneOf(arms):
            return ", or ".join(words(arm) for arm in arms)


def plural(shape: Shape) -> str:
    match shape:
        case Leaf("text"):
            return "texts"
        case Leaf("integer" | "number") | Section() | Tagged() | Named():
            head, _, tail = words(shape).removeprefix("a ").removeprefix("an ").partition(" ")
            return f"{head}s {tail}".rstrip()
        case Choice(values):
            return f"any of {listed(values)}"
        case _:
            return "values"


def listed(values: tuple[Any, ...]) -> str:
    return ", ".join(str(value) for value in values)


def one_of(tags: Sequence[str | None]) -> str:
    """Return tags as a list in prose: `a, b or c`."""
    *first, last = map(str, tags)
    return f"{', '.join(first)} or {last}" if first else last


def models_of(shape: Shape) -> Iterator[tuple[str | None, type[ConfigModel]]]:
    """Yield the sections in a shape with their tags, including those in lists and unions."""
    match shape:
        case Section(model):
            yield None, model
        case Tagged(arms):
            yield from arms
        case Items(item):
            yield from models_of(item)
        case Named(value):
            yield from models_of(value)
        case OneOf(arms):
            for arm in arms:
                yield from models_of(arm)
        case _:
            return
