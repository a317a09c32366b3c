"""Tests of the numbers that say which texts are equal."""

import torch

from partita_schema.common.hashing import hash_to_int
from partita_trainers.objectives.text_identity import identity_of, numbers_of


def test_the_numbers_of_texts_survive_float32() -> None:
    texts = [f"text {number}" for number in range(1000)] + ["", "text 1 "]
    targets_N2 = torch.tensor([identity_of(text) for text in texts], dtype=torch.float32)
    assert numbers_of(targets_N2).tolist() == [hash_to_int(text, num_bytes=6) for text in texts]
    assert len(set(numbers_of(targets_N2).tolist())) == len(texts)
    assert numbers_of(targets_N2[[3, 3]]).unique().numel() == 1
