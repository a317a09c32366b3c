"""Numbers of 16 and 32 bits as Python's numbers of 64 bits, with the same shortest text: 3.8 stays 3.8.

pyarrow, `datasets`, pandas and NumPy return the nearest number of 64 bits instead, which is 3.799999952316284.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow

Convert = Callable[[Any], Any]
SHORT: Mapping[str, type[np.floating]] = {
    "float16": np.float16,
    "float32": np.float32,
    "halffloat": np.float16,
    "float": np.float32,
}
"""The class of a type, by the name of NumPy or Arrow."""


def same_text(value: float | None, *, kind: type[np.floating]) -> float | None:
    """Return a number whose text is that of a shorter type; None for None."""
    return None if value is None else float(str(kind(value)))


def converters(schema: "pyarrow.Schema") -> dict[str, Convert]:
    """Return functions for the values of the columns that hold short floats, also in lists and structs, by column."""
    found = {name: converter_of(kind) for name, kind in zip(schema.names, schema.types, strict=True)}
    return {name: convert for name, convert in found.items() if convert is not None}


def converter_of(kind: "pyarrow.DataType") -> Convert | None:
    """Return the function for values of an Arrow type; None if it holds no short floats."""
    import pyarrow

    if str(kind) in SHORT:
        return partial(same_text, kind=SHORT[str(kind)])
    types = pyarrow.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = converter_of(kind.value_type)
        return None if item is None else lambda values: None if values is None else [item(one) for one in values]
    if types.is_struct(kind):
        return struct_converter({field.name: converter_of(field.type) for field in kind})
    return None


def struct_converter(found: Mapping[str, Convert | None]) -> Convert | None:
    """Return the function for a struct, given those of its fields; None if none of them holds short floats."""
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
