"""Names of modules in the keys of an adapter: each has to match a module, because peft ignores one that does not."""

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from partita_schema.common.text import nearest
from partita_schema.errors import ModelError
from partita_schema.sections import adapter as schema

if TYPE_CHECKING:
    from peft import PeftModel


def check_names(adapted: "PeftModel", adapter: schema.Adapter, modules: Collection[str]) -> None:
    """Raise ModelError if a name or a pattern of an adapter matches no module.

    Args:
        adapted: The model with the adapter.
        adapter: The adapter section.
        modules: Names of the modules without the adapter.
    """
    targeted = getattr(adapted.base_model, "targeted_module_names", ())
    for key, name, pattern in wanted_names(adapter):
        known, matches = targeted if key.endswith("_pattern") else modules, re.compile(pattern).fullmatch
        if any(map(matches, known)):
            continue
        if any(map(matches, modules)):
            raise ModelError(f"adapter.{key}: {name} matches no adapted module; add it to target_modules")
        close = nearest(name.rpartition(".")[2], sorted({one.rpartition(".")[2] for one in known}))
        advice = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ModelError(f"adapter.{key}: {name} matches no module{advice}")


def wanted_names(adapter: schema.Adapter) -> Iterator[tuple[str, str, str]]:
    """Yield the key, the name as written, and the pattern that peft looks for, of each name of an adapter."""
    for name in getattr(adapter, "modules_to_save", None) or ():
        yield "modules_to_save", name, rf".*{re.escape(name)}"
    excluded = getattr(adapter, "exclude_modules", None) or ()
    for name in (excluded,) if isinstance(excluded, str) else excluded:
        yield "exclude_modules", name, name if isinstance(excluded, str) else rf"(.*\.)?{re.escape(name)}"
    for key in ("rank_pattern", "alpha_pattern"):
        for name in getattr(adapter, key, {}):
            yield key, name, rf"(.*\.)?({name})"
