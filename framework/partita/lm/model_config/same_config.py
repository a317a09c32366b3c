"""Comparison of the config of a base model with that of an earlier start."""

from collections.abc import Iterator, Mapping
from typing import Any

NOT_COMPARED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")
"""Keys of a config that say nothing about what a model computes in a given dtype."""


def compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a config that are compared, also of the configs in it."""
    return {
        key: compared(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in NOT_COMPARED
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, inside: str = "") -> Iterator[str]:
    """Yield each key with its values, such as `rms_norm_eps: 1e-05 before, 0.1 now`.

    Keys of one side only are those of another version of transformers.

    Args:
        before: The keys that are compared.
        now: The same at this start.
        inside: Prefix of the keys.
    """
    for key, value in before.items():
        if key not in now:
            continue
        if isinstance(value, Mapping) and isinstance(now[key], Mapping):
            yield from changes(value, now[key], inside=f"{inside}{key}.")
        elif value != now[key]:
            yield f"{inside}{key}: {value} before, {now[key]} now"
