"""The number of test cases: all in `make test-long`, fewer in `make test`."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

QUICK, FULL = "quick", "full"
QUICK_SHARE = 5


def register_profiles() -> None:
    """Register both profiles; `--hypothesis-profile=full` chooses the second."""
    # Examples are generated slowly on a busy machine, which does not concern the code under test.
    settings.register_profile(QUICK, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile(FULL, parent=settings.get_profile(QUICK))
    settings.load_profile(QUICK)


def examples(number: int, **more: Any) -> settings:
    """Return the settings of a property with `number` examples, or a fifth of them in the quick profile.

    Args:
        number: Examples in the profile `full`.
        **more: Other settings of hypothesis.
    """
    if settings.get_current_profile_name() == QUICK:
        number = max(number // QUICK_SHARE, 3)
    return settings(max_examples=number, **more)


def ends(values: Iterable[Any]) -> list[Any]:
    """Return values of a parameter; those between the first and the last run in the long tests."""
    results = list(values)
    return [results[0], *map(in_long_tests, results[1:-1]), *results[1:][-1:]]


def first(values: Iterable[Any]) -> list[Any]:
    """Return values of a parameter; all but the first run in the long tests."""
    value, *others = values
    return [value, *map(in_long_tests, others)]


def in_long_tests(value: Any) -> Any:
    """Return a value of a parameter, or a `pytest.param`, that runs in the long tests."""
    if hasattr(value, "values") and hasattr(value, "marks"):
        return pytest.param(*value.values, marks=[*value.marks, pytest.mark.long], id=value.id)
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.long)
