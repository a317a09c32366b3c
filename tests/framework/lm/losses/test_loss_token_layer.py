"""Tests of the last layer for loss tokens only: loss and gradients equal those of a whole forward pass."""

import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from partita.lm.branches.masks import probe_rows, separate_rows
from partita.lm.losses.last_layer import last_layer
from partita_schema.sections.model import Architecture
from partita_trainers.base import Batch

from ....properties import ends

KINDS = ["gemma3_text", "qwen3", "phi3", "olmo2", "deepseek_v3", "mixtral", "granite", "gpt_neox", "opt", "cohere2"]


def prepared(lm: Any) -> Any:
    """Return the model as it is before training."""
    lm.check_loss()
    return lm


def plain_loss(lm: Any, batch: Batch) -> torch.Tensor:
    """Return the cross-entropy of the labels of rows that are not packed, from the logits of all tokens."""
    logits_BTV, labels_BT = lm.base(input_ids=batch.input_ids_BT, use_cache=False).logits, batch.labels_BT
    return cross_entropy(logits_BTV[:, :-1].float().flatten(0, 1), labels_BT[:, 1:].flatten(), reduction="sum")


def gradients(value: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(parameter) if gradient is None else gradient).flatten()
            for parameter, gradient in zip(parameters, found, strict=True)
        ]
    )


def assert_same_as_whole(lm: Any, batch: Batch, alone: Batch) -> None:
    """Compare a batch, through the layer for loss tokens, with the whole forward pass of rows alone."""
    a, b = lm.loss(lm.module, batch), plain_loss(lm, alone)
    torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    got, wanted = gradients(a, lm.module), gradients(b, lm.module)
    assert wanted.norm() > 0
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()


def watched_rows(lm: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the inputs of the last layer's feed-forward network, as they come."""
    shapes: list[tuple[int, ...]] = []
    layer, _ = last_layer(lm.base)
    layer.mlp.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(inputs[0].shape[:2])))
    return shapes


@pytest.mark.parametrize("architecture", ends(typing.get_args(Architecture)))
def test_a_loss_of_selected_tokens_equals_that_of_a_whole_forward_pass(small: Any, architecture: str) -> None:
    lm = prepared(small.load(small.config(architecture=architecture)))
    assert (lm.loss_token_layer is None) == (architecture in ("gpt2", "gemma2"))  # views of [B, T], and eager attention
    assert_same_as_whole(lm, small.batch(), small.batch())


@pytest.mark.parametrize("kind", ends(KINDS))
def test_other_architectures_and_windows_equal_a_whole_forward_pass(
    architectures: ModuleType, kind: str, tmp_path: Path
) -> None:
    window = 6 if kind in ("gemma3_text", "qwen3", "cohere2") else None
    lm = prepared(architectures.saved_and_loaded(kind, tmp_path, window=window))
    assert lm.loss_token_layer is not None
    lm.module.requires_grad_(True)
    batch = batch_of(lm)
    assert_same_as_whole(lm, batch, batch)


def batch_of(lm: Any) -> Batch:
    """Return three rows with a few loss tokens each, none in the second."""
    ordinary = torch.tensor(lm.token_ids)
    ids_BT = ordinary[torch.randint(len(ordinary), (3, 12), generator=torch.Generator().manual_seed(0))]
    labels_BT = torch.full_like(ids_BT, -100)
    labels_BT[0, 7:10], labels_BT[2, 10:] = ids_BT[0, 7:10], ids_BT[2, 10:]
    return Batch(ids_BT, labels_BT, torch.tensor([12, 12, 12]), ("0", "1", "2"))


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_packed_rows_with_branches_equal_rows_alone(small: Any, architecture: str) -> None:
    lm = prepared(small.load(small.config(architecture=architecture)))
    batch = probe_rows(lm.token_ids)
    labels_BT = batch.labels_BT.clone()
    labels_BT[:, :7] = -100
    batch = Batch(batch.input_ids_BT, labels_BT, batch.lengths_B, batch.keys, batch.position_ids_BT)
    assert_same_as_whole(lm, batch, separate_rows(batch))


def test_only_loss_tokens_reach_the_rest_of_the_last_layer(small: Any) -> None:
    lm = prepared(small.load(small.config(adapter={"type": "lora", "init": "gaussian"})))
    assert lm.loss_token_layer is not None
    shapes, batch = watched_rows(lm), small.batch()
    with lm.training():
        lm.loss(lm.module, batch).backward()
    assert shapes == [(1, batch.loss_tokens)]
    assert lm.base.config._attn_implementation == "sdpa"


def test_evaluations_and_log_probabilities_are_computed_whole(small: Any) -> None:
    lm = prepared(small.load(small.config()))
    shapes, batch = watched_rows(lm), small.batch()
    lm.token_log_probs(lm.module, batch)
    with torch.no_grad():
        lm.loss(lm.module, batch)
    assert shapes == [tuple(batch.input_ids_BT.shape)] * 2


def test_a_batch_of_which_most_tokens_are_learned_is_computed_whole(small: Any) -> None:
    lm = prepared(small.load(small.config()))
    assert lm.loss_token_layer is not None
    shapes, batch = watched_rows(lm), small.batch(lengths=(5, 5))
    learned = Batch(batch.input_ids_BT, batch.input_ids_BT, batch.lengths_B, batch.keys)
    lm.loss(lm.module, learned)
    assert shapes == [(2, 5)]


@pytest.mark.parametrize(
    "sections",
    [
        {"trainer": {"type": "finetune", "gradient_checkpointing": True}},
        {"adapter": {"type": "prompt_tuning", "num_virtual_tokens": 3}},
        {"model_parameters": {"attention": "eager"}},
        {"architecture": "gpt2"},
    ],
    ids=["checkpointing", "virtual tokens", "eager", "gpt2"],
)
def test_models_that_need_all_tokens_compute_them(small: Any, sections: dict[str, Any]) -> None:
    lm = prepared(small.load(small.config(**sections)))
    assert lm.loss_token_layer is None
    assert torch.isfinite(lm.loss(lm.module, small.batch()))


def test_the_attention_of_the_model_is_restored_after_an_error(small: Any) -> None:
    lm = prepared(small.load(small.config()))
    assert lm.loss_token_layer is not None
    layer, _ = last_layer(lm.base)

    def fail(*_: object) -> None:
        raise ValueError("failed")

    handle = layer.self_attn.q_proj.register_forward_hook(fail)
    with pytest.raises(ValueError, match="failed"):
        lm.loss(lm.module, small.batch())
    handle.remove()
    assert_same_as_whole(lm, small.batch(), small.batch())
