"""A sparse classifier: a linear layer over the mean of the embeddings of what stands in a text.

As fastText (Joulin et al. 2016, "Bag of Tricks for Efficient Text Classification", section 2): a bag holds the tokens
of a text and its sequences of 2 to n tokens. Sequences share a fixed number of embeddings by their hash.

Shapes: N texts, K entries of all bags, D numbers of an embedding, C labels.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

MIX = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: a product with it spreads what is added over the upper bits (Knuth, 6.4)."""
UPPER = np.uint64(32)


class EmbeddingBagClassifier(nn.Module):
    """Ids [K] and the starts of bags [N] to logits [N, C]. The gradient of the embedding is sparse."""

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
        """The same, slower: a product of matrices has other last digits for each number of rows, and this has not."""
        means_ND = self.embedding(ids_K, starts_N)
        logits_NC: torch.Tensor = (means_ND[:, None] * self.output.weight).sum(-1) + self.output.bias
        return logits_NC


def bags_of(
    texts: Sequence[Sequence[int]], *, ngrams: int, vocabulary: int, buckets: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [K] of the bags of texts that are tokens, and where each starts, with the end [N + 1].

    Ids below `vocabulary` are tokens, those from there on are sequences of up to `ngrams` tokens by their bucket.
    """
    parts = [bag(np.asarray(text, dtype=np.int64), ngrams, vocabulary, buckets) for text in texts]
    starts_N1 = np.cumsum([0, *map(len, parts)])
    ids_K = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return torch.from_numpy(ids_K), torch.from_numpy(starts_N1)


def bag(tokens_T: np.ndarray, ngrams: int, vocabulary: int, buckets: int) -> np.ndarray:
    """The tokens, then the buckets of their sequences of 2, 3 ... tokens."""
    found, hashes = [tokens_T], tokens_T.astype(np.uint64)
    for length in range(2, min(ngrams, len(tokens_T)) + 1):
        # The hash of a sequence is that of all its tokens but the last, mixed with the last one.
        hashes = (hashes[:-1] + np.uint64(1)) * MIX + tokens_T[length - 1 :].astype(np.uint64)
        places = ((hashes * MIX) >> UPPER) % np.uint64(buckets)
        found.append(places.astype(np.int64) + vocabulary)
    return np.concatenate(found)
