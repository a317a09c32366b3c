"""Tests of Batch: the keyword arguments of a transformers model."""

import numpy as np
import pytest
import torch

from partita.data import PlannedBatch, TokenizedDataset, collate
from partita.data.rows import RowKeys
from partita_trainers import Batch

LENGTHS = (5, 3, 7)


@pytest.fixture(scope="module")
def rows() -> TokenizedDataset:
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    spans = np.array([[2, length] for length in LENGTHS], dtype=np.int32)
    return TokenizedDataset(
        ids_L=(np.arange(starts[-1]) * 7 % 50 + 1).astype(np.int32),
        starts_Nplus1=starts,
        loss_spans_S2=spans,
        span_starts_Nplus1=np.arange(len(LENGTHS) + 1),
        keys=RowKeys.counted("rows", len(LENGTHS)),
        indices_N=np.arange(len(LENGTHS)),
        fingerprint_inputs={},
    )


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=32, attn_implementation=request.param, **shape)
    return LlamaForCausalLM(config)  # in training mode, and with a cache unless the caller says otherwise


def batch_of(rows: TokenizedDataset, lines: list[int]) -> Batch:
    """Return the first rows as a batch that holds them in these lines."""
    planned = PlannedBatch(np.arange(len(lines)), np.array(lines, dtype=np.int64))
    return collate(rows, planned, pad_token_id=0)


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch.model_inputs(), num_items_in_batch=1).loss
    return loss


def test_padded_rows_have_a_mask(rows: TokenizedDataset) -> None:
    inputs = batch_of(rows, [0, 1, 2]).model_inputs()
    assert list(inputs) == ["input_ids", "labels", "attention_mask"]
    assert inputs["attention_mask"].tolist() == [[1] * length + [0] * (7 - length) for length in LENGTHS]
    assert all(tensor.dtype == torch.int64 for tensor in inputs.values())


def test_packed_rows_have_positions_and_neither_mask_nor_cache(rows: TokenizedDataset) -> None:
    inputs = batch_of(rows, [0, 0, 1]).model_inputs()
    assert list(inputs) == ["input_ids", "labels", "position_ids", "use_cache"]
    assert inputs["position_ids"].tolist()[0] == [*range(5), *range(3)]
    assert inputs["use_cache"] is False


@pytest.mark.parametrize("lines", [[0, 1, 2], [0, 0, 1], [0, 0, 0]], ids=str)
def test_the_loss_is_that_of_each_row_by_itself(
    rows: TokenizedDataset, model: torch.nn.Module, lines: list[int]
) -> None:
    alone = [
        loss_of(model, collate(rows, PlannedBatch(np.array([row]), np.array([0])), pad_token_id=0)) for row in range(3)
    ]
    torch.testing.assert_close(loss_of(model, batch_of(rows, lines)), torch.stack(alone).sum())


def test_a_batch_without_rows_has_a_loss_of_zero_and_gradients(rows: TokenizedDataset, model: torch.nn.Module) -> None:
    nothing = batch_of(rows, [])
    assert nothing.rows == 0
    loss = loss_of(model, nothing)
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_inputs_are_on_the_device_that_is_asked_for(rows: TokenizedDataset) -> None:
    for lines in ([0, 1], [0, 0], []):
        inputs = batch_of(rows, lines).model_inputs("meta")
        assert {tensor.device.type for tensor in inputs.values() if isinstance(tensor, torch.Tensor)} == {"meta"}
