"""InfoNCE (van den Oord et al. 2018, arXiv 1807.03748, equation 4), its gradient, and the ranks of the positives.

Each anchor has one right candidate among all candidates of a step, its positive. All other candidates are negatives,
except those with the same text as the positive, which would be wrong negatives.

Shapes: A anchors, C candidates, D dimensions of an embedding.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

MAX_SIMILARITIES = 1 << 22
"""Similarities in memory at a time."""


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of a step, float32 on the CPU."""

    anchors_AD: torch.Tensor
    candidates_CD: torch.Tensor
    positives_A: torch.Tensor
    """Index in the candidates of the positive of each anchor, int64."""
    texts_C: torch.Tensor
    """A number for the text of each candidate: equal exactly if the texts are equal, int64."""


@dataclass(frozen=True)
class Contrast:
    """InfoNCE of each anchor, and the gradients of the sum."""

    losses_A: torch.Tensor
    """Loss of each anchor in nats."""
    ranks_A: torch.Tensor
    """Rank of each positive among the texts of the candidates, from 1. Texts that are as similar come before it, and a
    text that several candidates have counts once."""
    gradients: tuple[torch.Tensor, torch.Tensor] | None
    """Gradients with respect to anchors and candidates."""


def contrast(embeddings: Embeddings, *, temperature: float, gradients: bool = True) -> Contrast:
    """Return InfoNCE over all anchors and candidates of a step.

    The gradient with respect to the similarities is the softmax minus one at the positive, so that no graph of the
    similarities has to be kept: memory holds only `MAX_SIMILARITIES` of them at a time.

    Args:
        embeddings: Embeddings of the step.
        temperature: Divides the similarities.
        gradients: Whether to compute gradients.
    """
    anchors_AD, candidates_CD = embeddings.anchors_AD, embeddings.candidates_CD
    losses, ranks, anchor_gradients = [], [], list[torch.Tensor]()
    candidate_gradients_CD = torch.zeros_like(candidates_CD)
    is_first_C = first_copies(embeddings.texts_C)
    chunk = max(1, MAX_SIMILARITIES // max(1, len(candidates_CD)))
    for start in range(0, len(anchors_AD), chunk):
        rows_AD, positives_A = anchors_AD[start : start + chunk], embeddings.positives_A[start : start + chunk]
        similarities_AC = rows_AD @ candidates_CD.T / temperature
        is_other_AC = embeddings.texts_C != embeddings.texts_C[positives_A, None]
        same_AC = ~is_other_AC
        same_AC[torch.arange(len(positives_A)), positives_A] = False
        similarities_AC.masked_fill_(same_AC, -torch.inf)
        losses.append(functional.cross_entropy(similarities_AC, positives_A, reduction="none"))
        own_A1 = similarities_AC.gather(1, positives_A[:, None])
        # Not >=: with NaN, of a diverged model, all texts come before the positive.
        ranks.append(1 + (~(similarities_AC < own_A1) & is_other_AC & is_first_C).sum(1))
        if not gradients:
            continue
        gradient_AC = similarities_AC.softmax(1)
        gradient_AC[torch.arange(len(positives_A)), positives_A] -= 1
        anchor_gradients.append(gradient_AC @ candidates_CD / temperature)
        candidate_gradients_CD += gradient_AC.T @ rows_AD / temperature
    found = (torch.cat(anchor_gradients), candidate_gradients_CD) if gradients else None
    return Contrast(torch.cat(losses), torch.cat(ranks), found)


def first_copies(texts_C: torch.Tensor) -> torch.Tensor:
    """Return which candidates are the first ones with their text, bool [C]."""
    is_first_C = torch.zeros(len(texts_C), dtype=torch.bool)
    is_first_C[torch.from_numpy(np.unique(texts_C.numpy(), return_index=True)[1])] = True
    return is_first_C
