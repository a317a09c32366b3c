"""A sparse text classifier: a linear layer over the mean embedding of tokens and n-grams.

As in fastText (Joulin et al. 2016, "Bag of Tricks for Efficient Text Classification", section 2), a bag contains the
tokens of a text and its n-grams of 2 to n tokens. N-grams share a fixed number of embeddings by their hash.

Shapes: N texts, K entries of all bags, D embedding size, C labels.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

MIX = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio; multiplying by it spreads the hash over the upper bits (Knuth, 6.4)."""
UPPER = np.uint64(32)


class EmbeddingBagClassifier(nn.Module):
    """Maps ids [K] and starts of bags [N] to logits [N, C]. The gradient of the embedding is sparse."""

    def __init__(self, *, embeddings: int, dim: int, labels: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(embeddings, dim, mode="mean", sparse=True)
        nn.init.uniform_(self.embedding.weight, -1 / dim, 1 / dim)
        self.output = nn.Linear(dim, labels)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, ids_K: torch.Tensor, starts_N: torch.Tensor) -> torch.Tensor:
        logits_NC: torch.Tensor = self.output(self.embedding(ids_K, starts_N))
        return logits_NC

    def separate(self, ids_K: torch.Tensor, starts_N: torch.Tensor) -> torch.Tensor:
        """Compute the same logits, slower, but identical for any number of rows, unlike a matrix product."""
        means_ND = self.embedding(ids_K, starts_N)
        logits_NC: torch.Tensor = (means_ND[:, None] * self.output.weight).sum(-1) + self.output.bias
        return logits_NC


def bags_of(
    texts: Sequence[Sequence[int]], *, ngrams: int, vocabulary: int, buckets: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [K] of the bags of tokenized texts, and the start of each bag and the end [N + 1].

    Ids below `vocabulary` are tokens; those above are hash buckets of n-grams.

    Args:
        texts: Tokens of each text.
        ngrams: Maximum length of an n-gram in tokens.
        vocabulary: Number of tokens.
        buckets: Number of hash buckets.
    """
    parts = [bag(np.asarray(text, dtype=np.int64), ngrams, vocabulary, buckets) for text in texts]
    starts_Nplus1 = np.cumsum([0, *map(len, parts)])
    ids_K = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return torch.from_numpy(ids_K), torch.from_numpy(starts_Nplus1)


def bag(tokens_T: np.ndarray, ngrams: int, vocabulary: int, buckets: int) -> np.ndarray:
    """Return the tokens, then the hash buckets of n-grams of 2, 3 ... tokens.

    Args:
        tokens_T: Tokens of a text.
        ngrams: Maximum length of an n-gram in tokens.
        vocabulary: Number of tokens, added to the buckets.
        buckets: Number of hash buckets.
    """
    parts, hashes = [tokens_T], tokens_T.astype(np.uint64)
    for length in range(2, min(ngrams, len(tokens_T)) + 1):
        # The hash of an n-gram is that of all its tokens but the last, mixed with the last one.
        hashes = (hashes[:-1] + np.uint64(1)) * MIX + tokens_T[length - 1 :].astype(np.uint64)
        bucket_ids = ((hashes * MIX) >> UPPER) % np.uint64(buckets)
        parts.append(bucket_ids.astype(np.int64) + vocabulary)
    return np.concatenate(parts)
