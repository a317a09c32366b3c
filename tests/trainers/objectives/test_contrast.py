import pytest
import torch
from torch.nn import functional

from partita_trainers.objectives import contrast as module
from partita_trainers.objectives.contrast import Embeddings, contrast

ANCHORS, CANDIDATES, SIZE = 7, 11, 5


def random_embeddings() -> Embeddings:
    noise = torch.Generator().manual_seed(3)
    anchors = functional.normalize(torch.randn(ANCHORS, SIZE, generator=noise), dim=1)
    candidates = functional.normalize(torch.randn(CANDIDATES, SIZE, generator=noise), dim=1)
    positives = torch.tensor([3, 0, 9, 1, 7, 10, 5])
    return Embeddings(anchors, candidates, positives, torch.arange(CANDIDATES))


def test_losses_and_gradients_are_those_of_autograd() -> None:
    embeddings = random_embeddings()
    anchors, candidates = embeddings.anchors_AD.clone(), embeddings.candidates_CD.clone()
    for tensor in (anchors, candidates):
        tensor.requires_grad_()
    losses = functional.cross_entropy(anchors @ candidates.T / 0.05, embeddings.positives_A, reduction="none")
    losses.sum().backward()
    result = contrast(embeddings, temperature=0.05)
    torch.testing.assert_close(result.losses_A, losses.detach())
    torch.testing.assert_close(result.gradients, (anchors.grad, candidates.grad))
    without = contrast(embeddings, temperature=0.05, gradients=False)
    assert without.gradients is None
    assert torch.equal(without.losses_A, result.losses_A)


def test_similarities_in_small_parts_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = contrast(random_embeddings(), temperature=0.1)
    monkeypatch.setattr(module, "MAX_SIMILARITIES", 2 * CANDIDATES)
    parts = contrast(random_embeddings(), temperature=0.1)
    for name in ("losses_A", "ranks_A", "gradients"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))


def test_another_row_with_the_same_positive_text_is_no_negative() -> None:
    vectors = functional.normalize(torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]), dim=1)
    positives = torch.tensor([0, 1])
    shared = contrast(Embeddings(vectors[:2], vectors, positives, torch.tensor([5, 6, 5])), temperature=0.5)
    without = contrast(Embeddings(vectors[:1], vectors[:2], positives[:1], torch.tensor([5, 6])), temperature=0.5)
    torch.testing.assert_close(shared.losses_A[:1], without.losses_A)
    assert shared.gradients is not None
    assert without.gradients is not None
    torch.testing.assert_close(shared.gradients[0][:1], without.gradients[0])


def test_the_rank_counts_the_candidates_that_are_at_least_as_similar() -> None:
    anchor = torch.tensor([[1.0, 0.0]])
    candidates = torch.tensor([[0.5, 0.0], [0.9, 0.0], [0.5, 0.1], [0.1, 0.0]])
    ranks = [
        int(contrast(Embeddings(anchor, candidates, torch.tensor([index]), torch.arange(4)), temperature=1.0).ranks_A)
        for index in range(4)
    ]
    assert ranks == [3, 1, 3, 4]


def test_copies_of_a_text_count_once_in_ranks() -> None:
    """The texts 0 and 1 are more similar than the positive of text 2, and each of them has several copies."""
    anchor = torch.tensor([[1.0, 0.0]])
    candidates = torch.tensor([[0.9, 0.0], [0.5, 0.0], [0.9, 0.0], [0.8, 0.0], [0.8, 0.0], [0.5, 0.0], [0.1, 0.0]])
    texts = torch.tensor([0, 2, 0, 1, 1, 2, 3])
    ranks = [
        int(contrast(Embeddings(anchor, candidates, torch.tensor([index]), texts), temperature=1.0).ranks_A)
        for index in range(7)
    ]
    assert ranks == [1, 3, 1, 2, 2, 3, 4]


def test_the_positives_of_a_diverged_model_come_last() -> None:
    vectors = torch.full((3, 2), torch.nan)
    result = contrast(Embeddings(vectors, vectors, torch.arange(3), torch.tensor([0, 1, 1])), temperature=1.0)
    assert result.ranks_A.tolist() == [2, 2, 2]
    assert result.losses_A.isnan().all()
