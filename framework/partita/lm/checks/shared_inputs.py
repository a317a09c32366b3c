"""Which linear layers of a model get the same inputs, such as q_proj, k_proj and v_proj of an attention."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from partita.lm.checks.logit_check import REFUSALS
from partita_trainers.libraries.torch_internals import version

logger = logging.getLogger(__name__)


class Call(NamedTuple):
    """A call of a layer."""

    name: str
    x: torch.Tensor
    version: int
    """Number of changes of `x` in place before the call."""

    def has_inputs_of(self, other: "Call") -> bool:
        """Return whether a layer of the same module is called with the same tensor, and it has not changed."""
        same_module = self.name.rpartition(".")[0] == other.name.rpartition(".")[0]
        return same_module and self.x is other.x and self.version == other.version


def shared_inputs(model: nn.Module, layers: Mapping[str, nn.Linear]) -> list[list[str]]:
    """Return the names of layers in groups that get the same inputs, each group in the order in which it is called.

    A forward pass finds the groups. The layers of a group belong to the same module and are called once, one after the
    other. All other layers are groups of one. If the pass fails, there are no other groups.

    Args:
        model: A model that takes token ids.
        layers: Some of its layers, by name.
    """
    try:
        calls = record_calls(model, layers)
    except REFUSALS as error:
        logger.debug("no layers with the same inputs were found: %r", error)
        calls = []
    times = Counter(call.name for call in calls)
    groups: list[list[str]] = []
    before: Call | None = None
    for call in calls:
        if before is not None and call.has_inputs_of(before) and times[call.name] == times[before.name] == 1:
            groups[-1].append(call.name)
        elif times[call.name] == 1:
            groups.append([call.name])
        before = call
    return groups + [[name] for name in layers if times[name] != 1]


@torch.no_grad()
def record_calls(model: nn.Module, layers: Mapping[str, nn.Linear]) -> list[Call]:
    """Return the calls of layers in a forward pass of two tokens."""
    calls: list[Call] = []

    def record(name: str, x: torch.Tensor) -> None:
        calls.append(Call(name, x, version(x)))

    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: record(name, inputs[0]))
        for name, layer in layers.items()
    ]
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls
