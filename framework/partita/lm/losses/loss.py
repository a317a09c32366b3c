"""The cross-entropy of a batch, with logits only at loss tokens.

Prompts and padding need no logits, and with a large vocabulary most of the computation is in the output layer. A hook
before the output layer selects the hidden states that predict a label, so whatever an architecture does to its logits
afterwards (scaling, soft caps) still applies.

Padding is on the right and attention is causal, so no token attends to padding and no attention mask is needed. Remote
code may use padding nevertheless, so it gets a mask. Packed rows are separated by positions that restart at each row;
an attention mask of ones or a cache would silently disable that.

Shapes: B sequences, T tokens of the longest, K positions that predict a label, H hidden size, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from partita.lm.losses.loss_token_layer import LossTokenHook
from partita_trainers.base import Batch
from partita_trainers.device_copies import to_device


class AnswerPositions:
    """Passes selected positions to the output layer, or all if none are selected.

    For a model without a known output layer, all logits are computed, and then selected.
    """

    def __init__(self, output_layer: nn.Module | None) -> None:
        self.indices_K: torch.Tensor | None = None
        if isinstance(output_layer, nn.Embedding):  # FSMT multiplies by the matrix of the decoder's embedding
            output_layer = None
        self.attached = output_layer is not None
        if output_layer is not None:
            output_layer.register_forward_pre_hook(self.select)

    def select(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Select hidden states: [B, T, H] to [1, K, H]."""
        if self.indices_K is None:
            return None
        hidden_BTH, *others = inputs
        hidden_1KH = hidden_BTH.flatten(0, 1).index_select(0, self.indices_K).unsqueeze(0)
        return (hidden_1KH, *others)

    @contextmanager
    def only(self, indices_K: torch.Tensor) -> Iterator[None]:
        """Pass only these positions of the flattened batch to the output layer, in this order."""
        self.indices_K = indices_K
        try:
            yield
        finally:
            self.indices_K = None


@dataclass(frozen=True)
class LabelInputs:
    """A batch on the device of the model."""

    batch: Batch
    """The same on the host."""
    input_ids_BT: torch.Tensor
    indices_K: torch.Tensor
    """Indices of flattened hidden states that predict a label."""
    labels_K: torch.Tensor
    """These labels."""
    position_ids_BT: torch.Tensor | None = None
    """Positions of packed rows and branches."""
    ends_BT: torch.Tensor | None = None
    """For branches, the first token that does not see each token; see `branches.masks.ends_of_sight`."""
    attention_mask_BT: torch.Tensor | None = None
    """1 for tokens and 0 for padding, for a model that gets it."""


def label_indices(batch: Batch, *, virtual_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices [K] of flattened hidden states that predict a label, and those labels [K].

    `virtual_tokens` precede each row in the hidden states but not in the batch.
    """
    labels_BT = batch.labels_BT[:, 1:]
    row_K, column_K = (labels_BT != -100).nonzero(as_tuple=True)
    labels_K = labels_BT[row_K, column_K]
    if batch.position_ids_BT is not None:
        column_K = predecessors(batch.position_ids_BT)[row_K, column_K + 1]
    width = batch.input_ids_BT.shape[1] + virtual_tokens
    return row_K * width + virtual_tokens + column_K, labels_K


def predecessors(positions_BT: torch.Tensor) -> torch.Tensor:
    """Return the column of the token before each token in its row and branch, int64 [B, T]; -1 at the first of a
    sequence.

    At the start of a branch it is the last token of the prompt; at the start of a packed row it is in another row.
    """
    columns_T = torch.arange(positions_BT.shape[1])
    before_BT = (columns_T - 1).repeat(len(positions_BT), 1)
    sequence_N, column_N = ((positions_BT.diff(dim=1) != 1) & (positions_BT[:, 1:] != 0)).nonzero(as_tuple=True)
    column_N = column_N + 1
    wanted_N = positions_BT[sequence_N, column_N] - 1
    is_parent_NT = (positions_BT[sequence_N] == wanted_N[:, None]) & (columns_T < column_N[:, None])
    before_BT[sequence_N, column_N] = torch.where(is_parent_NT, columns_T, -1).amax(1)
    return before_BT


def copy_labels(batch: Batch, *, virtual_tokens: int, device: torch.device) -> LabelInputs:
    """Return what the loss needs of a batch on the device of the model. The host does not wait for the copies."""
    indices_K, labels_K = label_indices(batch, virtual_tokens=virtual_tokens)
    return LabelInputs(
        batch,
        to_device(batch.input_ids_BT, device),
        to_device(indices_K, device),
        to_device(labels_K, device),
        None if batch.position_ids_BT is None else to_device(batch.position_ids_BT, device),
    )


def label_cross_entropy(
    module: nn.Module,
    inputs: LabelInputs,
    *,
    reduction: Literal["sum", "none"],
    positions: AnswerPositions,
    more_inputs: Mapping[str, Any] = MappingProxyType({}),
    last_layer: LossTokenHook | None = None,
) -> torch.Tensor:
    """Return the cross-entropy of the labels, float32: a scalar, or [K]. Without labels no forward pass is made.

    A sum is made inside the kernel: adding up [K] gives the same gradients, but not the last bits of the loss.

    Args:
        module: The model.
        inputs: The batch on the device.
        reduction: sum: over all labels; none: one value per label.
        positions: Selects positions before the output layer.
        more_inputs: Model inputs in addition to the ids.
        last_layer: Computes the rest of the last layer for these tokens only; None if the model does not support it.
    """
    if not len(inputs.labels_K):
        nothing_K = connected_empty(module, device=inputs.labels_K.device)
        return nothing_K.sum() if reduction == "sum" else nothing_K
    indices_K, tokens = inputs.indices_K, inputs.input_ids_BT.numel()
    selects = last_layer if last_layer is not None and last_layer.pays_off(indices_K, tokens=tokens) else positions
    with selects.only(indices_K):
        logits = module(input_ids=inputs.input_ids_BT, **more_inputs, use_cache=False).logits
    is_selected = selects is last_layer or positions.attached
    logits_KV = logits[0] if is_selected else logits.flatten(0, 1)[indices_K]
    return cross_entropy(logits_KV.float(), inputs.labels_K, reduction=reduction)


def connected_empty(module: nn.Module, *, device: torch.device) -> torch.Tensor:
    """Return a differentiable empty tensor without a forward pass; its gradients are 0 even for infinite weights."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            return parameter.flatten()[:0].float()
    return torch.zeros(0, device=device)
