"""Values of Arrow columns for which Python would have others than the user wrote: short floats, and class labels.

A column of the type `ClassLabel` of `datasets` holds indices of names, which are in the metadata of the schema.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from partita.data.short_floats import SHORT, same_text

if TYPE_CHECKING:
    import pyarrow

Convert = Callable[[Any], Any]
NOTHING: Mapping[str, Any] = {}


def converters(schema: "pyarrow.Schema") -> dict[str, Convert]:
    """Return functions for the values of the columns that need one, also in lists and structs, by column."""
    features = features_of(schema)
    found = {
        name: converter_of(kind, features.get(name)) for name, kind in zip(schema.names, schema.types, strict=True)
    }
    return {name: convert for name, convert in found.items() if convert is not None}


def features_of(schema: "pyarrow.Schema") -> Mapping[str, Any]:
    """Return what `datasets` wrote about the columns of a schema, by column; an empty mapping if it did not."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return NOTHING
    return features if isinstance(features, Mapping) else NOTHING


def converter_of(kind: "pyarrow.DataType", feature: Any = None) -> Convert | None:
    """Return the function for values of an Arrow type; None if they need none.

    Args:
        kind: The type.
        feature: What `datasets` wrote about the values; None if it did not.
    """
    import pyarrow

    types = pyarrow.types
    if str(kind) in SHORT:
        return partial(same_text, kind=SHORT[str(kind)])
    if types.is_integer(kind) and part_of(feature, "_type") == "ClassLabel":
        names = part_of(feature, "names")
        return partial(name_of_label, names=names) if isinstance(names, Sequence) else None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = converter_of(kind.value_type, item_of(feature))
        return None if item is None else lambda values: None if values is None else [item(one) for one in values]
    if types.is_struct(kind):
        return struct_converter({field.name: converter_of(field.type, field_of(feature, field.name)) for field in kind})
    return None


def part_of(feature: Any, name: str) -> Any:
    return feature.get(name) if isinstance(feature, Mapping) else None


def item_of(feature: Any) -> Any:
    """Return what `datasets` wrote about the items of a list."""
    if isinstance(feature, Sequence) and len(feature) == 1:
        return feature[0]
    return part_of(feature, "feature")


def field_of(feature: Any, name: str) -> Any:
    """Return what `datasets` wrote about a field of a struct.

    Earlier versions wrote a struct of lists as a sequence of a struct.
    """
    if part_of(feature, "_type") == "Sequence":
        return {"_type": "List", "feature": part_of(part_of(feature, "feature"), name)}
    return part_of(feature, name)


def name_of_label(index: int | None, *, names: Sequence[str]) -> str | int | None:
    """Return the name of a class label; None for -1, an unknown label; an index without a name stays as it is."""
    if index is None or index == -1:
        return None
    return names[index] if 0 <= index < len(names) else index


def struct_converter(found: Mapping[str, Convert | None]) -> Convert | None:
    """Return the function for a struct, given those of its fields; None if no field needs one."""
    fields = {name: convert for name, convert in found.items() if convert is not None}
    if not fields:
        return None
    return lambda values: (
        None if values is None else {**values, **{name: convert(values[name]) for name, convert in fields.items()}}
    )


def convert_rows(rows: Iterable[dict[str, Any]], converters: Mapping[str, Convert]) -> None:
    """Convert the columns of rows in place."""
    if converters:
        for row in rows:
            row.update({name: convert(row[name]) for name, convert in converters.items()})
