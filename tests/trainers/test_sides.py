import dataclasses

import pytest
import torch

from partita_trainers.base import Batch
from partita_trainers.sides import split_sides
from partita_trainers.steps.micro_batches import split_batch

ROWS = [([5, 6, 7], [8, 9]), ([5], [6, 7, 8, 9, 10]), ([4, 5, 6, 7, 8], [9])]
PAD = 3


def two_sided(rows: list[tuple[list[int], list[int]]]) -> Batch:
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), PAD)
    labels = torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in rows])
    return Batch(ids, labels, lengths, tuple(map(str, range(len(rows)))), two_sided=True)


def test_rows_are_split_at_their_first_label_and_each_side_is_padded_on_the_right() -> None:
    sides = split_sides(two_sided(ROWS))
    assert sides.input_ids_BS.tolist() == [[5, 6, 7, 0, 0], [5, 0, 0, 0, 0], [4, 5, 6, 7, 8]]
    assert sides.attention_mask_BS.tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert sides.labels_BT.tolist() == [[8, 9, -100, -100, -100], [6, 7, 8, 9, 10], [9, -100, -100, -100, -100]]


def test_a_row_without_labels_is_a_prompt() -> None:
    batch = two_sided(ROWS[:2])
    batch.labels_BT[0] = -100
    sides = split_sides(batch)
    assert sides.input_ids_BS[0].tolist() == [5, 6, 7, 8, 9]
    assert sides.labels_BT[0].tolist() == [-100] * 5


def test_model_inputs_of_an_encoder_decoder_are_its_sides() -> None:
    batch = two_sided(ROWS)
    sides, inputs = split_sides(batch), batch.model_inputs("cpu")
    assert set(inputs) == {"input_ids", "attention_mask", "labels"}
    assert torch.equal(inputs["input_ids"], sides.input_ids_BS)
    assert torch.equal(inputs["attention_mask"], sides.attention_mask_BS)
    assert torch.equal(inputs["labels"], sides.labels_BT)
    assert dataclasses.replace(batch, two_sided=False).model_inputs()["labels"].shape == batch.labels_BT.shape


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_batch_that_ran_out_of_memory_have_the_same_sides(parts: int) -> None:
    batch = two_sided(ROWS)
    found = [
        (ids[mask.bool()].tolist(), labels[labels != -100].tolist())
        for part in split_batch(batch, parts)
        for ids, mask, labels in zip(*part.model_inputs().values(), strict=True)
    ]
    assert found == ROWS
