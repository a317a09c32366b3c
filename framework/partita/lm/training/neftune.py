"""NEFTune: uniform noise on the embeddings in training (Jain et al. 2023, section 2, algorithm 1)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from partita_trainers.base import Batch
from partita_trainers.device_copies import to_device


class EmbeddingNoise:
    """Adds noise from [-1, 1] times alpha / sqrt(L d) to embeddings of width d, for rows of L tokens.

    Shapes: B sequences, T tokens of the longest.

    It is inactive unless enabled, in training mode, and with known row lengths.
    """

    def __init__(self, embedding: nn.Module, *, alpha: float) -> None:
        self.alpha = alpha
        self.on = False
        self.lengths_BT: torch.Tensor | None = None
        embedding.register_forward_hook(self.add)

    def add(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...], embedded_BTD: torch.Tensor) -> torch.Tensor:
        if not (self.on and layer.training) or self.lengths_BT is None:
            return embedded_BTD
        lengths_BT = to_device(self.lengths_BT.float(), embedded_BTD.device)
        reach_BT = self.alpha / (lengths_BT * embedded_BTD.shape[-1]).sqrt()
        noise_BTD = torch.empty_like(embedded_BTD).uniform_(-1, 1)
        return embedded_BTD + noise_BTD * reach_BT[:, :, None].to(embedded_BTD.dtype)

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """Enable the noise in this context."""
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before

    @contextmanager
    def for_rows(self, batch: Batch) -> Iterator[None]:
        """Set the rows of the forward pass in this context."""
        self.lengths_BT = batch.lengths_B[:, None] if batch.position_ids_BT is None else row_lengths(batch)
        try:
            yield
        finally:
            self.lengths_BT = None


def row_lengths(batch: Batch) -> torch.Tensor:
    """Return the length of its row for each token of packed rows [B, T]; 1 in padding."""
    positions_BT = batch.position_ids_BT
    if positions_BT is None:
        raise AssertionError("only packed rows have positions")
    numbers_BT = (positions_BT == 0).flatten().cumsum(0) - 1
    return numbers_BT.bincount()[numbers_BT].view_as(positions_BT)
