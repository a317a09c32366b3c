"""The loss of a batch, with logits only where a label stands.

Prompts and padding need no logits, and with a large vocabulary the output layer is most of the work. A hook before the
output layer lets only those hidden states through that predict a label, so that whatever an architecture does to its
logits afterwards (scaling, soft caps) still happens.

Rows are padded on the right and attention looks back only, so that no token sees padding and no attention mask is
needed. Code from a model's own repository might look at padding all the same: it keeps the mask. Packed rows are kept
apart by positions that start again with each, which an attention mask of ones or a cache would silently undo.

Shapes: B lines, T tokens of the longest, K positions that predict a label, H width, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from partita_trainers.base import Batch


class AnswerPositions:
    """Lets chosen positions through to the output layer, all of them where none are chosen.

    A model that does not name its output layer computes all logits, of which the chosen ones are taken.
    """

    def __init__(self, output_layer: nn.Module | None) -> None:
        self.places_K: torch.Tensor | None = None
        self.attached = output_layer is not None
        if output_layer is not None:
            output_layer.register_forward_pre_hook(self.select)

    def select(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hidden states [B, T, H] to [1, K, H]."""
        if self.places_K is None:
            return None
        hidden_BTH, *others = inputs
        hidden_1KH = hidden_BTH.flatten(0, 1).index_select(0, self.places_K).unsqueeze(0)
        return (hidden_1KH, *others)

    @contextmanager
    def only(self, places_K: torch.Tensor) -> Iterator[None]:
        """Inside, only these places of the flattened batch reach the output layer, in this order."""
        self.places_K = places_K
        try:
            yield
        finally:
            self.places_K = None


def label_places(batch: Batch, *, virtual_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places [K] in the flattened hidden states that predict a label, and those labels [K].

    `virtual_tokens` stand before each row in the hidden states, but not in the batch.
    """
    labels_BT = batch.labels_BT[:, 1:]
    row_K, column_K = (labels_BT != -100).nonzero(as_tuple=True)
    width = batch.input_ids_BT.shape[1] + virtual_tokens
    return row_K * width + virtual_tokens + column_K, labels_BT[row_K, column_K]


def answer_loss(
    module: nn.Module,
    batch: Batch,
    *,
    positions: AnswerPositions,
    device: torch.device,
    virtual_tokens: int = 0,
    more_inputs: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor:
    """Sum of the cross-entropy over the labels of the batch, float32; 0 with zero gradients where there are none.

    `more_inputs` is what the module is given beside the ids.
    """
    places_K, labels_K = label_places(batch, virtual_tokens=virtual_tokens)
    if not len(labels_K):
        return connected_zero(module, device=device)
    with positions.only(places_K.to(device)):
        logits = module(input_ids=batch.input_ids_BT.to(device), **more_inputs, use_cache=False).logits
    logits_KV = logits[0] if positions.attached else logits.flatten(0, 1)[places_K.to(device)]
    return cross_entropy(logits_KV.float(), labels_K.to(device), reduction="sum")


def padding_mask(batch: Batch) -> torch.Tensor:
    """1 for real tokens, 0 for padding [B, T]."""
    return (torch.arange(batch.input_ids_BT.shape[1]) < batch.lengths_B[:, None]).long()


def connected_zero(module: nn.Module, *, device: torch.device) -> torch.Tensor:
    """0 that can be differentiated: no forward pass, and no NaN even where weights are infinite."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            return parameter.flatten()[:0].sum().float()
    return torch.zeros((), device=device)
