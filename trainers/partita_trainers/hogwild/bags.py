"""Texts as bags of feature ids, and the model interface for lock-free training on them.

Shapes: N rows, K entries of all bags, C labels; n chosen rows, k entries of their bags.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from partita_trainers.base import Batch, LanguageModel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Bags:
    """Rows of a classifier, concatenated."""

    ids_K: "torch.Tensor"
    """Rows of the embedding, int64."""
    starts_Nplus1: "torch.Tensor"
    """Start of each row's bag in ids_K, and the end of the last, int64."""
    labels_N: "torch.Tensor"
    """Index of the correct label of each row, int64."""

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def tensors(self) -> "tuple[torch.Tensor, ...]":
        """All tensors."""
        return self.ids_K, self.starts_Nplus1, self.labels_N


class BagModel(LanguageModel, Protocol):
    """A classifier of bags. Its `module` maps ids [K] and bag starts [N] to logits [N, C]."""

    def bags(self, batch: Batch) -> Bags:
        """Return the rows of a batch as bags."""


def joined(parts: list[Bags]) -> Bags:
    """Concatenate the rows of all parts, in order."""
    import torch

    before = torch.tensor([0, *(len(part.ids_K) for part in parts)]).cumsum(0)
    starts = [part.starts_Nplus1[:-1] + start for part, start in zip(parts, before[:-1], strict=True)]
    return Bags(
        ids_K=torch.cat([part.ids_K for part in parts]),
        starts_Nplus1=torch.cat([*starts, before[-1:]]),
        labels_N=torch.cat([part.labels_N for part in parts]),
    )


def chosen(bags: Bags, rows_n: "torch.Tensor") -> Bags:
    """Select rows by index."""
    import torch

    firsts_n, lengths_n = bags.starts_Nplus1[rows_n], bags.starts_Nplus1[rows_n + 1] - bags.starts_Nplus1[rows_n]
    starts_n1 = torch.cat([lengths_n.new_zeros(1), lengths_n.cumsum(0)])
    indices_k = torch.arange(int(starts_n1[-1])) + torch.repeat_interleave(firsts_n - starts_n1[:-1], lengths_n)
    return Bags(bags.ids_K[indices_k], starts_n1, bags.labels_N[rows_n])
