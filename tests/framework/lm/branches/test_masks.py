"""Tests of rows with branches: log-probabilities and gradients equal those of rows with one answer each."""

import json
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from partita.lm.branches.masks import branch_inputs, ends_of_sight, probe_rows, seen_tokens, separate_rows
from partita.lm.losses.loss import predecessors
from partita_schema.sections.model import Architecture
from partita_trainers.base import Batch
from partita_trainers.checkpoints.file_sums import FILE as SUMS
from partita_trainers.steps.micro_batches import split_batch

from ..conftest import gradients

PREFIXES = {"type": "prompt_tuning", "num_virtual_tokens": 3}


def random_forest(rng: torch.Generator, *, tokens: int) -> tuple[list[int], list[int]]:
    """Return the parent of each token in depth-first order, -1 for roots, and the position of each."""

    def draw(end: int) -> int:
        return int(torch.randint(end, (), generator=rng))

    parents, positions, path = list[int](), list[int](), list[int]()
    for token in range(tokens):
        if path and draw(4) == 0:
            path = path[: draw(len(path))]
        parents.append(path[-1] if path else -1)
        positions.append(len(path))
        path = [*path, token]
    return parents, positions


@pytest.mark.parametrize("seed", range(40))
def test_positions_alone_say_what_a_token_of_a_forest_sees(seed: int) -> None:
    forests = [random_forest(torch.Generator().manual_seed(seed + 100 * line), tokens=24) for line in range(3)]
    positions_BT = torch.tensor([positions for _, positions in forests])
    expected = torch.zeros(3, 24, 24, dtype=torch.bool)
    for line, (parents, _) in enumerate(forests):
        for token in range(24):
            ancestor = token
            while ancestor >= 0:
                expected[line, token, ancestor] = True
                ancestor = parents[ancestor]
    assert torch.equal(seen_tokens(ends_of_sight(positions_BT)), expected)
    before_BT = predecessors(positions_BT)
    for line, (parents, positions) in enumerate(forests):
        for token, (parent, position) in enumerate(zip(parents, positions, strict=True)):
            assert before_BT[line, token] == parent or position == 0


def test_packed_rows_end_where_the_next_row_begins() -> None:
    positions_BT = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 0]])
    assert ends_of_sight(positions_BT).tolist() == [[3, 3, 3, 5, 5, 6, 7, 8], [7, 7, 7, 7, 7, 7, 7, 8]]


def rows(lm: Any, *, shift: int = 0) -> Batch:
    """Return rows with two branches of various lengths: two packed in one line, one alone, with padding."""
    batch = probe_rows(lm.token_ids[shift:])
    assert batch.has_branches
    assert batch.loss_token_branches.tolist() == [0] * 4 + [1] * 6 + [0] * 3 + [1] + [0] * 4 + [1] * 6
    assert batch.loss_token_rows.tolist() == [0] * 10 + [1] * 4 + [2] * 10
    return batch


def assert_same_as_alone(lm: Any) -> None:
    together, alone = rows(lm), separate_rows(rows(lm))
    assert alone.lengths_B.tolist() == [9, 11, 6, 4, 9, 11]
    assert alone.loss_tokens == together.loss_tokens
    weights_N = torch.linspace(-1, 2, together.loss_tokens)
    a, b = (lm.token_log_probs(lm.module, batch) for batch in (together, alone))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    got, wanted = gradients((weights_N * a).sum(), lm.module), gradients((weights_N * b).sum(), lm.module)
    assert wanted.norm() > 0
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("architecture", typing.get_args(Architecture))
def test_branches_have_the_log_probabilities_and_gradients_of_rows_alone(
    small: Any, architecture: str, attention: str
) -> None:
    lm = small.load(small.config(architecture=architecture, model_parameters={"attention": attention}))
    assert_same_as_alone(lm)
    assert lm.branch_support.reason is None


@pytest.mark.parametrize("architecture", ["mistral", "gemma2"])
def test_branches_longer_than_a_sliding_window_equal_rows_alone(small: Any, architecture: str, tmp_path: Path) -> None:
    small.load(small.config(architecture=architecture)).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 4}))
    (tmp_path / SUMS).unlink()
    lm = small.load(small.config(base_model=str(tmp_path)))
    assert lm.base.config.sliding_window == 4
    assert lm.branch_support.reason is None
    assert_same_as_alone(lm)
    positions_BT = rows(lm).position_ids_BT
    mask = branch_inputs(positions_BT, ends_of_sight(positions_BT), model=lm.base)["attention_mask"]
    kinds = sorted(mask) if isinstance(mask, dict) else None
    assert kinds == (["full_attention", "sliding_attention"] if architecture == "gemma2" else None)


@pytest.mark.parametrize(
    ("kind", "window", "reason"),
    [
        ("gemma3_text", 4, None),
        ("qwen3", 4, None),
        ("mamba", None, "MambaForCausalLM takes no mask of pairs of tokens"),
        ("bloom", None, "BloomForCausalLM takes no mask of pairs of tokens"),
        ("xlm", None, "XLMWithLMHeadModel takes no mask of pairs of tokens"),
        ("mpt", None, "a mask of pairs of tokens changes the logits of MptForCausalLM by 11%"),
    ],
)
def test_other_architectures_get_masks_by_type_of_layer_or_a_row_for_each_branch(
    architectures: ModuleType, kind: str, window: int | None, reason: str | None, tmp_path: Path
) -> None:
    lm = architectures.saved_and_loaded(kind, tmp_path, window=window)
    batch = rows(lm)
    assert lm.branch_support.reason == reason
    with torch.no_grad(), lm.evaluating():
        together, alone = (lm.token_log_probs(lm.module, one) for one in (batch, separate_rows(batch)))
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "adapter", [{"type": "lora", "init": "gaussian"}, {"type": "ia3"}, PREFIXES], ids=lambda adapter: adapter["type"]
)
def test_branches_with_an_adapter_equal_rows_alone(small: Any, adapter: dict[str, Any]) -> None:
    lm = small.load(small.config(adapter=adapter))
    small.take_steps(lm, steps=2)
    assert_same_as_alone(lm)
    reason = lm.branch_support.reason
    assert reason == ("prompt_tuning puts virtual tokens before each row" if adapter is PREFIXES else None)


def test_branches_with_activation_checkpointing_equal_rows_alone(small: Any) -> None:
    trainer = {"type": "finetune", "gradient_checkpointing": True}
    lm = small.load(small.config(trainer=trainer, adapter={"type": "lora", "init": "gaussian"}))
    with lm.training():
        assert_same_as_alone(lm)


def test_a_split_batch_keeps_the_branches_of_a_row_together(small: Any) -> None:
    lm = small.load(small.config())
    batch = rows(lm)
    whole = lm.token_log_probs(lm.module, batch)
    for parts in (2, 4):
        split = split_batch(batch, parts)
        assert sum(part.rows for part in split) == 3
        found = torch.cat([lm.token_log_probs(lm.module, part) for part in split])
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


def test_the_reference_is_the_starting_policy(small: Any) -> None:
    lm = small.load(small.config(adapter={"type": "lora", "init": "gaussian"}))
    small.take_steps(lm, steps=1)
    batch = rows(lm)
    with torch.no_grad():
        first = lm.token_log_probs(lm.module, batch)
    lm.keep_reference()
    small.take_steps(lm, steps=2)
    with lm.training():
        trained = lm.token_log_probs(lm.module, batch)
        assert not torch.allclose(trained, first, atol=1e-4)
        with lm.reference():
            reference = lm.token_log_probs(lm.module, batch)
            assert not lm.module.training
        assert lm.module.training
    assert torch.equal(reference, first)
    assert not reference.requires_grad
    assert torch.equal(lm.token_log_probs(lm.module, batch), trained)
    lm.drop_reference()
    with pytest.raises(AssertionError, match="keep_reference was not called"), lm.reference():
        pass
