"""NEFTune: uniform noise on the embeddings while training (Jain et al. 2023, section 2, algorithm 1)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class EmbeddingNoise:
    """Adds noise from [-1, 1] times alpha / sqrt(L d) to embeddings of width d, L being the real length of the row.

    It is silent unless it is switched on, in training mode, and the lengths of the rows are known.
    """

    def __init__(self, embedding: nn.Module, *, alpha: float) -> None:
        self.alpha = alpha
        self.on = False
        self.lengths_B: torch.Tensor | None = None
        embedding.register_forward_hook(self.add)

    def add(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...], embedded_BTD: torch.Tensor) -> torch.Tensor:
        if not (self.on and layer.training) or self.lengths_B is None:
            return embedded_BTD
        lengths_B = self.lengths_B.to(embedded_BTD.device, torch.float32)
        reach_B = self.alpha / (lengths_B * embedded_BTD.shape[-1]).sqrt()
        noise_BTD = torch.empty_like(embedded_BTD).uniform_(-1, 1)
        return embedded_BTD + noise_BTD * reach_B[:, None, None].to(embedded_BTD.dtype)

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """Inside, noise is added."""
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before

    @contextmanager
    def for_lengths(self, lengths_B: torch.Tensor) -> Iterator[None]:
        """Inside, rows of the forward pass have these lengths."""
        self.lengths_B = lengths_B
        try:
            yield
        finally:
            self.lengths_B = None
