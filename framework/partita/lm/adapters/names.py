"""Names of modules in the keys of an adapter: each has to match a module, because peft ignores one that does not."""

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

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


def check_tied_modules(adapted: "PeftModel", called: Collection[nn.Module]) -> None:
    """Raise ModelError if an adapted module is not used, but others that have its weight.

    T5 and BART have such modules: their encoder and decoder have the weight of the embedding `shared`.

    Args:
        adapted: The model with the adapter.
        called: The adapted modules that a forward pass has called.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules = dict(adapted.get_base_model().named_modules(remove_duplicate=False))
    for name, layer in modules.items():
        if not isinstance(layer, BaseTunerLayer) or layer in called:
            continue
        weight = getattr(layer.get_base_layer(), "weight", None)
        tied = [other for other, module in modules.items() if weight is not None and has_weight(module, weight)]
        others = [other.removesuffix(".base_layer") for other in tied if not other.startswith(f"{name}.")]
        if others:
            raise ModelError(
                f"adapter.target_modules: {name} is not used by this model; its weight is that of "
                f"{', '.join(others)}: write {others[0].rpartition('.')[2]} instead"
            )


def has_weight(module: nn.Module, weight: torch.Tensor) -> bool:
    """Return whether a module itself has this weight."""
    return any(parameter is weight for parameter in module.parameters(recurse=False))


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
