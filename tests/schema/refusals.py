"""The error messages for a refused configuration."""

from collections.abc import Sequence
from typing import Any

import pytest

from partita_schema.errors import ConfigError
from partita_schema.load import load_config


def message_of(source: Any, *, overrides: Sequence[str] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides=overrides)
    return str(caught.value)


def last_line_of(source: Any) -> str:
    """Return the only problem, or the last one."""
    return message_of(source).splitlines()[-1].strip()


def problems_of(source: Any) -> list[str]:
    """Return all problems; empty for a valid configuration."""
    try:
        load_config(source)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []
