"""Numbers of numpy and torch."""

from typing import Any


def scalar(value: Any) -> Any:
    """Return the number in an array or a tensor without dimensions; anything else as it is."""
    is_scalar = getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None))
    return value.item() if is_scalar else value
