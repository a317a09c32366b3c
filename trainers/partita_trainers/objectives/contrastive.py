"""The contrastive objective of text embeddings: InfoNCE with the other rows of the whole step as negatives.

A row holds the texts anchor and positive, and possibly negatives. The loss of an anchor depends on the embeddings of
all rows of the step, on all ranks, and not only on those of its micro-batch. Gradients are cached (GradCache, Gao et
al. 2021, arXiv 2101.06983): `prepare` computes all embeddings without a graph, and the gradient of the loss with
respect to each. `loss` computes the embeddings of a micro-batch again, with a graph, and continues from the cached
gradient. The result is that of one large batch, for any number of micro-batches and ranks.

Shapes: N texts of a batch, D dimensions of an embedding.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from partita_trainers.base import Batch, LanguageModel
from partita_trainers.device_copies import to_device
from partita_trainers.objective import ObjectiveContext, ObjectiveRow, WeightedMean
from partita_trainers.objectives.contrast import Contrast, Embeddings, contrast
from partita_trainers.objectives.text_identity import numbers_of

DEPTHS = (1, 5, 10)
"""Ranks that recall is reported for."""


class EmbeddingModel(LanguageModel, Protocol):
    """A model that computes a vector of a text."""

    def embeddings(self, module: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the embeddings of the texts of a batch, row by row, of length 1, float32 [N, D].

        `text_ends` says where the texts of a row end. `module` is `self.module`, or a wrapper of it.
        """


@dataclass(frozen=True)
class RowTexts:
    """The texts of one row: the anchor, the positive, and negatives."""

    key: str
    texts: tuple[int, ...]
    """A number for each text: equal exactly if the texts are equal, also beyond the context."""
    embeddings_ND: npt.NDArray[np.float32]


@dataclass(frozen=True)
class StepCache:
    """What `prepare` computes, by row key."""

    losses: Mapping[str, float]
    ranks: Mapping[str, int]
    gradients: Mapping[str, torch.Tensor]
    """Gradient of the sum of all losses with respect to each text of the row, float32 [texts, D]; empty in
    evaluations."""


class Contrastive:
    """InfoNCE over all rows of a step, averaged over the anchors; with metrics of retrieval."""

    def __init__(self, *, temperature: float, name: str) -> None:
        """Create the objective.

        Args:
            temperature: Divides the cosine similarities.
            name: Name of the output, before the names of the metrics.
        """
        self.temperature, self.name = temperature, name
        self.step = StepCache({}, {}, {})
        self.own_rows: list[RowTexts] = []
        """The rows of this rank in the step."""
        self.has_gradients = False
        """Whether the step is one of training."""

    def denominator(self, batch: Batch) -> float:
        """Return the number of rows, each with one anchor."""
        return batch.rows

    def prepare(self, context: ObjectiveContext, batches: Iterable[Batch]) -> None:
        """Compute the embeddings of all rows of this rank.

        In a training step, dropout is that of `loss`, so that the cached gradient is exact.
        """
        self.has_gradients, self.own_rows = torch.is_grad_enabled(), []
        own, vectors = list[Batch](), list[torch.Tensor]()
        with torch.no_grad(), context.lm.training() if context.noise_seed is not None else nullcontext():
            for batch in batches:
                if context.noise_seed is not None:
                    torch.manual_seed(context.noise_seed(batch))
                own.append(batch)
                vectors.append(embeddings(context, batch).float())
        self.own_rows = row_texts(own, vectors)

    def exchange(self, context: ObjectiveContext) -> None:
        """Compute the gradient of the loss with respect to the embeddings of all rows of the step."""
        of_ranks = context.process_group.all_gather_object(self.own_rows, "the embeddings of a step")
        # In one order on all ranks, so that rounding is the same for any number of them.
        rows = sorted((row for of_rank in of_ranks for row in of_rank), key=lambda row: row.key)
        self.step = compare_rows(rows, temperature=self.temperature, gradients=self.has_gradients)

    def loss(self, context: ObjectiveContext, batch: Batch) -> tuple[torch.Tensor, Mapping[str, WeightedMean]]:
        """Return the sum of the anchors' losses, with the cached gradient, and metrics of the ranks of the positives.

        `mrr` is the mean reciprocal rank, `recall_at_K` the share of positives among the first K texts.
        """
        embeddings_ND, step = embeddings(context, batch), self.step
        loss = torch.tensor(sum(step.losses[key] for key in batch.keys), dtype=embeddings_ND.dtype)
        total = to_device(loss, embeddings_ND.device)
        if step.gradients:
            gradients_ND = to_device(torch.cat([step.gradients[key] for key in batch.keys]), embeddings_ND.device)
            product = (embeddings_ND * gradients_ND).sum()
            total = total + (product - product.detach())
        return total, self.metrics([step.ranks[key] for key in batch.keys])

    def objective_rows(self, batch: Batch) -> list[ObjectiveRow]:
        """Return the loss of each row, and the rank of its positive, from 1."""
        return [ObjectiveRow(self.step.losses[key], {"rank": self.step.ranks[key]}) for key in batch.keys]

    def metrics(self, ranks: Sequence[int]) -> dict[str, WeightedMean]:
        """Return the metrics of the ranks of positives."""
        metrics = {"mrr": sum(1 / rank for rank in ranks)}
        metrics |= {f"recall_at_{depth}": float(sum(rank <= depth for rank in ranks)) for depth in DEPTHS}
        return {f"{self.name}.{metric}": WeightedMean(total, len(ranks)) for metric, total in metrics.items()}


def embeddings(context: ObjectiveContext, batch: Batch) -> torch.Tensor:
    """Return the embeddings of the texts of a batch, float32 [N, D]."""
    return cast(EmbeddingModel, context.lm).embeddings(context.module, batch)


def text_ends(batch: Batch) -> list[list[int]]:
    """Return for each row of a batch where its texts end: after each loss token.

    A batch without targets measures the worst case: as many texts as loss tokens, at least two, of equal lengths.
    """
    is_loss_BT = batch.labels_BT != -100
    if batch.targets_NK is not None:
        return [[index + 1 for index in row.nonzero()[:, 0].tolist()] for row in is_loss_BT]
    counts = is_loss_BT.sum(1).clamp(min=2).tolist()
    return [
        [length * (index + 1) // count for index in range(count)]
        for length, count in zip(batch.lengths_B.tolist(), counts, strict=True)
    ]


def row_texts(batches: Sequence[Batch], vectors: Sequence[torch.Tensor]) -> list[RowTexts]:
    """Return the texts of all rows of the batches with their embeddings, copied from the device at once."""
    if not batches:
        return []
    vectors_ND, result, first = torch.cat(list(vectors)).cpu().numpy(), list[RowTexts](), 0
    for batch in batches:
        of_rows = text_ends(batch)
        numbers = iter(text_numbers(batch, sum(map(len, of_rows))))
        for key, ends in zip(batch.keys, of_rows, strict=True):
            texts = tuple(islice(numbers, len(ends)))
            result.append(RowTexts(key, texts, vectors_ND[first : first + len(ends)]))
            first += len(ends)
    return result


def text_numbers(batch: Batch, count: int) -> list[int]:
    """Return a number for each of the `count` texts of a batch; all differ in a batch that measures the worst case."""
    return list(range(count)) if batch.targets_NK is None else numbers_of(batch.targets_NK).tolist()


def compare_rows(rows: Sequence[RowTexts], *, temperature: float, gradients: bool) -> StepCache:
    """Compare the anchor of each row with the other texts of all rows.

    Args:
        rows: All rows of the step.
        temperature: Divides the similarities.
        gradients: Whether to compute gradients.
    """
    if not rows:
        return StepCache({}, {}, {})
    embeddings_ND = torch.from_numpy(np.concatenate([row.embeddings_ND for row in rows]))
    roles_N = torch.tensor([role for row in rows for role in range(len(row.texts))])
    texts_N = torch.tensor([text for row in rows for text in row.texts])
    is_anchor_N = roles_N == 0
    result = contrast(
        Embeddings(
            embeddings_ND[is_anchor_N],
            embeddings_ND[~is_anchor_N],
            positives_A=(roles_N[~is_anchor_N] == 1).nonzero()[:, 0],
            texts_C=texts_N[~is_anchor_N],
        ),
        temperature=temperature,
        gradients=gradients,
    )
    keys = [row.key for row in rows]
    return StepCache(
        losses=dict(zip(keys, result.losses_A.tolist(), strict=True)),
        ranks=dict(zip(keys, result.ranks_A.tolist(), strict=True)),
        gradients=dict(zip(keys, gradients_by_row(rows, result, is_anchor_N), strict=True)) if gradients else {},
    )


def gradients_by_row(rows: Sequence[RowTexts], result: Contrast, is_anchor_N: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the gradients with respect to the texts of each row, float32 [texts, D]."""
    assert result.gradients is not None
    anchors_AD, candidates_CD = result.gradients
    gradients_ND = anchors_AD.new_empty(len(is_anchor_N), anchors_AD.shape[1])
    gradients_ND[is_anchor_N], gradients_ND[~is_anchor_N] = anchors_AD, candidates_CD
    return torch.split_with_sizes(gradients_ND, [len(row.texts) for row in rows])
