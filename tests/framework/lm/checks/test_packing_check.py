"""Tests of packed rows: loss and gradients equal those of single rows."""

import json
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.lm.checks import packing_check
from partita.lm.training.neftune import row_lengths
from partita_schema.errors import ModelError
from partita_schema.sections.model import Architecture
from partita_trainers.base import Batch
from partita_trainers.checkpoints.file_sums import FILE as SUMS

from ..conftest import gradients

LENGTHS = (24, 5, 17, 2, 30, 1, 12)
LINES = ((0, 2, 1), (4, 6), (3,), (5, 3))
"""Rows of each line; one line has a single row and much padding."""


def rows_and_lines(small: Any) -> tuple[Batch, Batch]:
    """Return the same rows with one line each, and packed; row 3 is in two lines."""
    rows = small.batch(lengths=LENGTHS)
    order = [row for line in LINES for row in line]
    lengths = torch.tensor([sum(LENGTHS[row] for row in line) for line in LINES])
    shape = len(LINES), int(lengths.max()) + 1
    ids, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, -100)
    for number, line in enumerate(LINES):
        start = 0
        for row in line:
            end = start + LENGTHS[row]
            ids[number, start:end] = rows.input_ids_BT[row, : LENGTHS[row]]
            labels[number, start:end] = rows.labels_BT[row, : LENGTHS[row]]
            labels[number, start] = -100
            positions[number, start:end] = torch.arange(LENGTHS[row])
            start = end
    chosen = torch.tensor(order)
    keys = tuple(rows.keys[row] for row in order)
    alone = Batch(rows.input_ids_BT[chosen], rows.labels_BT[chosen], rows.lengths_B[chosen], keys)
    return alone, Batch(ids, labels, lengths, keys, positions)


def logits(lm: Any, batch: Batch) -> torch.Tensor:
    """Return the logits of every token, row by row."""
    with torch.no_grad():
        found = lm.module(input_ids=batch.input_ids_BT, use_cache=False, **lm.more_inputs(lm.copy_inputs(batch))).logits
    real = torch.arange(batch.input_ids_BT.shape[1]) < batch.lengths_B[:, None]
    return found[real]


def assert_same_as_alone(lm: Any, small: Any) -> None:
    alone, packed = rows_and_lines(small)
    assert packed.loss_tokens == alone.loss_tokens > 0
    torch.testing.assert_close(logits(lm, packed), logits(lm, alone), rtol=1e-5, atol=1e-5)
    a, b = lm.loss(lm.module, packed), lm.loss(lm.module, alone)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=0)
    got, wanted = gradients(a, lm.module), gradients(b, lm.module)
    assert wanted.norm() > 0
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("architecture", typing.get_args(Architecture))
def test_packed_rows_give_the_logits_loss_and_gradients_of_rows_alone(small, architecture: str, attention: str) -> None:
    lm = small.load(small.config(architecture=architecture, model_parameters={"attention": attention}))
    assert_same_as_alone(lm, small)


@pytest.mark.parametrize("architecture", ["llama", "opt", "gemma2"])
def test_packed_rows_have_the_token_log_probs_of_rows_alone(small, architecture: str) -> None:
    lm = small.load(small.config(architecture=architecture))
    alone, packed = rows_and_lines(small)
    a, b = (lm.token_log_probs(lm.module, batch) for batch in (alone, packed))
    torch.testing.assert_close(b, a, rtol=0, atol=1e-5)
    assert torch.equal(packed.loss_token_rows, alone.loss_token_rows)
    assert torch.equal(gradients(-b.sum(), lm.module), gradients(lm.loss(lm.module, packed), lm.module))


@pytest.mark.parametrize(
    "adapter",
    [{"type": "lora", "init": "gaussian"}, {"type": "lora", "use_dora": True}, {"type": "ia3"}, {"type": "loha"}],
    ids=lambda adapter: "-".join(map(str, adapter.values())),
)
def test_packed_rows_with_an_adapter_equal_rows_alone(small, adapter: dict[str, Any]) -> None:
    lm = small.load(small.config(adapter=adapter))
    small.take_steps(lm, steps=2)
    assert_same_as_alone(lm, small)


def test_packed_rows_shorter_and_longer_than_a_sliding_window_equal_rows_alone(small, tmp_path: Path) -> None:
    small.load(small.config(architecture="mistral")).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 8}))
    (tmp_path / SUMS).unlink()
    lm = small.load(small.config(base_model=str(tmp_path)))
    assert lm.base.config.sliding_window == 8
    assert_same_as_alone(lm, small)


def test_packed_rows_with_activation_checkpointing_equal_rows_alone(small) -> None:
    trainer = {"type": "finetune", "gradient_checkpointing": True}
    lm = small.load(small.config(trainer=trainer, adapter={"type": "lora", "init": "gaussian"}))
    with lm.training():
        alone, packed = rows_and_lines(small)
        got, wanted = (gradients(lm.loss(lm.module, batch), lm.module) for batch in (packed, alone))
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()


def test_packed_rows_in_bfloat16_are_close_to_rows_alone(small, base_folder: Path) -> None:
    lm = small.load(small.config(base_model=str(base_folder), model_parameters={"dtype": "bfloat16"}))
    alone, packed = rows_and_lines(small)
    assert lm.isolation == "positions"
    assert lm.loss(lm.module, packed).item() == pytest.approx(lm.loss(lm.module, alone).item(), rel=2e-3)


@pytest.mark.parametrize(("architecture", "way"), [("llama", "positions"), ("gemma2", "positions"), ("opt", "mask")])
def test_the_way_to_separate_packed_rows_is_tested_on_the_model(small, architecture: str, way: str) -> None:
    lm = small.load(small.config(architecture=architecture))
    assert lm.isolation == way
    assert not lm.module.training


def test_a_recurrent_model_is_refused(small, base_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": tokenizer.pad_token_id}
    MambaForCausalLM(MambaConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lm = small.load(small.config(base_model=str(tmp_path)))
    with pytest.raises(ModelError) as caught:
        lm.check_packing()
    text = str(caught.value)
    assert text.startswith("data.batching.type: rows cannot be packed: MambaForCausalLM ")
    assert text.endswith("if another row precedes it; write data.batching: {type: bucket}")


def test_a_model_that_takes_no_positions_is_refused(small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_check, "isolation_error", lambda lm, isolation: None)
    with pytest.raises(ModelError) as caught:
        packing_check.find_isolation(small.load(small.config()))
    assert str(caught.value) == (
        "data.batching.type: rows cannot be packed: LlamaForCausalLM takes no positions, which tell where a row "
        "begins; write data.batching: {type: bucket}"
    )


def test_a_model_that_attends_across_packed_rows_is_refused_before_and_during_training(small) -> None:
    lm = small.load(small.config())
    passed = lm.base.model.forward
    lm.base.model.forward = lambda *args, position_ids=None, attention_mask=None, **kwargs: passed(*args, **kwargs)
    with pytest.raises(
        ModelError, match=r"LlamaForCausalLM changes the logits of a row by \d+% if another row precedes it"
    ):
        lm.check_packing()
    with pytest.raises(ModelError, match="rows cannot be packed"):
        lm.loss(lm.module, rows_and_lines(small)[1])


@pytest.mark.parametrize("kind", ["prompt_tuning", "prefix_tuning"])
def test_virtual_tokens_and_packed_rows_are_refused(small, kind: str) -> None:
    lm = small.load(small.config(adapter={"type": kind, "num_virtual_tokens": 3}))
    with pytest.raises(ModelError) as caught:
        lm.check_packing()
    assert str(caught.value) == (
        f"data.batching.type: rows cannot be packed under the adapter {kind}: its virtual tokens would stand once in "
        "each sequence, not before each row; write data.batching: {type: bucket}"
    )


def test_unsupported_attention_and_packed_rows_are_refused(small) -> None:
    lm = small.load(small.config())
    lm.base.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError) as caught:
        lm.check_packing()
    assert str(caught.value) == (
        "data.batching.type: rows are packed with sdpa or eager attention only, and LlamaForCausalLM has "
        "flash_attention_2; write model_parameters.attention: sdpa, or write data.batching: {type: bucket}"
    )


def test_the_output_layer_computes_only_positions_of_packed_rows_that_predict_a_label(small) -> None:
    lm, seen = small.load(small.config()), []
    lm.check_packing()
    lm.base.get_output_embeddings().register_forward_hook(lambda layer, inputs, output: seen.append(output.shape))
    packed = rows_and_lines(small)[1]
    lm.loss(lm.module, packed)
    assert [tuple(shape[:2]) for shape in seen] == [(1, packed.loss_tokens)]


def test_neftune_noise_of_a_packed_row_depends_on_its_own_length(small) -> None:
    lm = small.load(small.config(model_parameters={"neftune_noise_alpha": 5.0}))
    packed = rows_and_lines(small)[1]
    lengths = row_lengths(packed)
    assert lengths[0, :46].tolist() == [24] * 24 + [17] * 17 + [5] * 5
    assert lengths[2, :4].tolist() == [2, 2, 1, 1]
    seen: list[torch.Tensor] = []
    lm.check_packing()
    lm.base.get_input_embeddings().register_forward_hook(lambda layer, inputs, output: seen.append(output.detach()))
    lm.loss(lm.module, packed)
    with lm.training():
        lm.loss(lm.module, packed)
    noise = (seen[1] - seen[0]).abs().amax(dim=-1)
    reach = 5.0 / (lengths * 64) ** 0.5
    assert (noise <= reach * 1.001).all()
    assert (noise >= reach * 0.8).all()
