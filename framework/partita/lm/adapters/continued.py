"""Adapters that `pretrained_adapter_weights` names: keys of the file that differ from the saved adapter.

The weights decide most of an adapter. Only dropout, which has no weights, can be another one in a second training.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from partita.lm.adapters.methods import LAYERED, NAMES
from partita.tokenizers.hub import loading
from partita_schema.errors import ModelError
from partita_schema.sections import adapter as schema

if TYPE_CHECKING:
    from peft import PeftConfig


def read_config(source: str) -> "PeftConfig":
    """Return the config of a saved adapter. Raise ModelError if it cannot be read."""
    from peft import PeftConfig

    with loading(source, part="adapter", key="adapter"):
        return PeftConfig.from_pretrained(source)


def check_continued(
    adapter: schema.Adapter,
    saved: "PeftConfig",
    *,
    linear_layers: Collection[str],
    head: Collection[str],
    source: str,
    trainable: bool,
) -> None:
    """Raise ModelError if a key of the section differs from the saved adapter, or it cannot be trained further.

    Args:
        adapter: The section; its type is that of the adapter.
        saved: Config of the saved adapter.
        linear_layers: Names of the linear layers of the model, without its output layer.
        head: Names of the modules of its head, which are trained whole, whatever the section says.
        source: Folder or Hub id of the adapter.
        trainable: Whether it is to be trained.
    """
    for key, wanted, found in settings_of(adapter, saved):
        if key == "modules_to_save" and found:
            found = [name for name in found if name in wanted or name not in head]
        if wanted == "all-linear":
            fits = all_linear(found, linear_layers, head=head)
        else:
            fits = comparable(wanted) == comparable(found)
        if not fits and "dropout" not in key:
            raise ModelError(
                f"adapter.{key}: {shown(wanted)} does not fit the adapter in {source}, which has {shown(found)}; "
                "remove the key"
            )
    if trainable and saved.is_prompt_learning:
        raise ModelError(
            f"adapter.pretrained_adapter_weights: the adapter in {source} has virtual tokens, and peft cannot train "
            "them further; remove it to train new ones, or write trainer: {type: none} to use them"
        )
    if trainable and isinstance(adapter, schema.AdaloraAdapter) and getattr(saved, "rank_pattern", None):
        raise ModelError(
            f"adapter.pretrained_adapter_weights: the adapter in {source} has lost ranks in its training, and peft "
            "cannot train such an adapter further; merge it into its base model (partita merge), and train a new one"
        )


def new_dropout(adapter: schema.Adapter, saved: "PeftConfig") -> Mapping[str, float]:
    """Return keys of peft for dropout with their values, where the section has other ones than the saved adapter."""
    if isinstance(adapter, schema.PeftAdapter):
        pairs = {key: value for key, value in adapter.parameters.items() if "dropout" in key}
    else:
        pairs = {
            theirs: getattr(adapter, ours)
            for ours, theirs in NAMES[adapter.type][1].items()
            if "dropout" in ours and ours in adapter.model_fields_set
        }
    return {key: value for key, value in pairs.items() if getattr(saved, key, None) != value}


def settings_of(adapter: schema.Adapter, saved: "PeftConfig") -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys that the file has, with its value and that of the saved adapter, if the latter has the key."""
    if isinstance(adapter, schema.PeftAdapter):
        pairs = [(f"parameters.{key}", value, key) for key, value in adapter.parameters.items()]
    else:
        names = NAMES[adapter.type][1] | {key: key for key in (*LAYERED, "rank_pattern", "alpha_pattern")}
        pairs = [
            (ours, getattr(adapter, ours), theirs)
            for ours, theirs in names.items()
            if ours in adapter.model_fields_set and getattr(adapter, ours) is not None
        ]
    for key, wanted, theirs in pairs:
        if hasattr(saved, theirs):
            yield key, wanted, getattr(saved, theirs)


def all_linear(found: Any, linear_layers: Collection[str], *, head: Collection[str]) -> bool:
    """Return whether the target modules of a saved adapter are all linear layers, at most without the head."""
    if isinstance(found, str):
        selected = {name: {found} if re.fullmatch(found, name) else set() for name in linear_layers}
    else:
        selected = {name: {one for one in found or () if f".{name}".endswith(f".{one}")} for name in linear_layers}
    needed = [name for name in linear_layers if not set(name.split(".")) & set(head)]
    wanted = {found} if isinstance(found, str) else set(found or ())
    return all(selected[name] for name in needed) and set().union(*selected.values()) == wanted


def comparable(value: Any) -> Any:
    """Return a value in a form in which lists are equal in any order."""
    return sorted(map(str, value)) if isinstance(value, list | tuple | set) else value


def shown(value: Any) -> Any:
    """Return a value as a file has it."""
    return sorted(map(str, value)) if isinstance(value, tuple | set) else value
