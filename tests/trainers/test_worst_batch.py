"""Tests of worst-case batches."""

import pytest
import torch

from partita_trainers.training_probe import worst_batch


def test_rows_have_the_given_length_and_the_last_tokens_are_in_the_loss() -> None:
    batch = worst_batch(5, tokens=40, loss_tokens=9, token_ids=range(3, 23))
    assert batch.input_ids_BT.shape == (5, 40)
    assert batch.loss_tokens == 5 * 9
    loss_tokens = batch.labels_BT != -100
    assert torch.equal(batch.labels_BT[loss_tokens], batch.input_ids_BT[loss_tokens])
    assert loss_tokens[0].nonzero().flatten().tolist() == list(range(31, 40))
    assert 3 <= int(batch.input_ids_BT.min()) <= int(batch.input_ids_BT.max()) < 23
    assert len(set(batch.keys)) == 5


def test_one_of_several_rows_is_a_token_shorter_with_as_many_loss_tokens() -> None:
    batch = worst_batch(5, tokens=40, loss_tokens=9, token_ids=range(3, 23))
    assert batch.lengths_B.tolist() == [40, 40, 40, 40, 39]
    assert (batch.labels_BT[4] != -100).nonzero().flatten().tolist() == list(range(30, 39))
    assert worst_batch(1, tokens=40, loss_tokens=9, token_ids=range(3, 23)).lengths_B.tolist() == [40]


@pytest.mark.parametrize(("tokens", "loss_tokens", "expected"), [(1, 1, 1), (6, 6, 5), (6, 0, 1), (2, 5, 1)])
def test_there_is_always_a_loss_token(tokens: int, loss_tokens: int, expected: int) -> None:
    assert worst_batch(1, tokens=tokens, loss_tokens=loss_tokens, token_ids=range(3, 23)).loss_tokens == expected


@pytest.mark.parametrize(("tokens", "loss_tokens", "expected"), [(1, 1, 1), (6, 6, 4), (6, 0, 1), (40, 9, 9)])
def test_packed_lines_start_with_a_row_of_one_token(tokens: int, loss_tokens: int, expected: int) -> None:
    batch = worst_batch(3, tokens=tokens, loss_tokens=loss_tokens, token_ids=range(3, 23), packed=True)
    width = max(3, tokens)
    assert batch.position_ids_BT is not None
    assert batch.position_ids_BT[:2].tolist() == [[0, *range(width - 1)]] * 2
    assert batch.position_ids_BT[2].tolist() == [0, *range(width - 2), 0]
    assert batch.lengths_B.tolist() == [width, width, width - 1]
    assert (batch.rows, batch.sequences) == (6, 3)
    assert batch.loss_tokens == int((batch.labels_BT != -100).sum())
    assert batch.loss_tokens == 3 * expected - (expected == width - 2)


@pytest.mark.parametrize(("packed", "second"), [(False, [31, 32, 33, 34]), (True, [30, 31, 32, 33])])
def test_branches_of_the_worst_case_continue_after_the_prompt(packed: bool, second: list[int]) -> None:
    batch = worst_batch(2, tokens=40, loss_tokens=9, token_ids=range(3, 23), packed=packed, branched=True)
    assert batch.position_ids_BT is not None
    positions = batch.position_ids_BT[0].tolist()
    assert positions[36:] == second
    assert positions[31:36] == [*second, second[-1] + 1]
    assert batch.loss_token_branches.tolist() == [0] * 5 + [1] * 4 + [0] * 6 + [1] * 3
    assert batch.has_branches
