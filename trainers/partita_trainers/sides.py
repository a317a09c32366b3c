"""The two sides of a batch for an encoder-decoder: what the encoder reads, and what the decoder learns.

A row is one sequence, prompt first. The answer starts at the first label.

Shapes: B rows, S tokens of the longest prompt, T tokens of the longest answer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class SideRows(Protocol):
    """The part of a `Batch` that this module reads."""

    @property
    def input_ids_BT(self) -> "torch.Tensor": ...

    @property
    def labels_BT(self) -> "torch.Tensor": ...

    @property
    def lengths_B(self) -> "torch.Tensor": ...


@dataclass(frozen=True)
class Sides:
    """Right-padded inputs of an encoder-decoder, int64."""

    input_ids_BS: "torch.Tensor"
    """Tokens of the prompts."""
    attention_mask_BS: "torch.Tensor"
    """1 for tokens of the prompts, 0 for padding."""
    labels_BT: "torch.Tensor"
    """Tokens of the answers, -100 in padding and where a token is not in the loss."""

    def to(self, device: Any) -> "Sides":
        """Return the sides on a device."""
        return Sides(self.input_ids_BS.to(device), self.attention_mask_BS.to(device), self.labels_BT.to(device))


def split_sides(batch: SideRows) -> Sides:
    """Split the rows of a batch at their first labels. Padding of the prompts has the id 0, which is masked."""
    import torch

    ids_BL, labels_BL, lengths_B = batch.input_ids_BT, batch.labels_BT, batch.lengths_B
    is_label_BL = labels_BL != -100
    borders_B = torch.where(is_label_BL.any(1), is_label_BL.int().argmax(1), lengths_B)
    width = int(borders_B.max()) if len(borders_B) else 0
    mask_BS = torch.arange(width) < borders_B[:, None]
    input_ids_BS = ids_BL[:, :width].masked_fill(~mask_BS, 0)
    columns_BT = borders_B[:, None] + torch.arange(max(1, int((lengths_B - borders_B).max())))
    inside_BT = columns_BT < lengths_B[:, None]
    labels_BT = labels_BL.gather(1, columns_BT.clamp(max=labels_BL.shape[1] - 1)).masked_fill(~inside_BT, -100)
    return Sides(input_ids_BS, mask_BS.long(), labels_BT)
