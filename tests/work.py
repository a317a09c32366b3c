"""The amount of work: function calls, which unlike seconds are the same on every machine."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def counted_calls(work: Callable[[], T]) -> tuple[T, int]:
    """Return the result of a function, and the number of Python and C calls that it makes."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        result = work()
    finally:
        sys.setprofile(before)
    return result, count
