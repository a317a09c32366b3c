"""Tests of the search for linear layers with the same inputs."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from partita.lm.checks.shared_inputs import shared_inputs


class Block(nn.Module):
    """Three layers that are called with inputs from `choose`."""

    def __init__(self, choose: Any) -> None:
        super().__init__()
        self.choose = choose
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.choose(self, x)
        return total


class Model(nn.Module):
    def __init__(self, choose: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.block = Block(choose)
        self.last = nn.Linear(4, 3)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        return SimpleNamespace(logits=self.last(self.block(self.embedding(input_ids))))


def plain(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.one(x) + block.two(x) + block.three(x)


def in_place(block: Block, x: torch.Tensor) -> torch.Tensor:
    total = block.one(x)
    x += total
    return block.two(x) + block.three(x)


def copied(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.one(x) + block.two(x.clone()) + block.three(x)


def repeated(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.one(x) + block.two(x) + block.two(x) + block.three(x)


def left_out(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.three(x) + block.one(x)


def failing(block: Block, x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no input")


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (plain, [["one", "two", "three"]]),
        (in_place, [["one"], ["two", "three"]]),
        (copied, [["one"], ["two"], ["three"]]),
        (repeated, [["one"], ["two"], ["three"]]),
        (left_out, [["three", "one"], ["two"]]),
        (failing, [["one"], ["two"], ["three"]]),
    ],
)
def test_layers_are_joined_that_get_the_same_unmodified_tensor(
    choose: Any, expected: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(choose)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    with caplog.at_level(logging.DEBUG):
        found = shared_inputs(model, layers)
    assert sorted(found) == sorted([[f"block.{name}" for name in group] for group in expected] + [["last"]])
    assert not any(layer._forward_pre_hooks for layer in layers.values())
    assert ("no layers with the same inputs were found: ValueError('no input')" in caplog.text) == (choose is failing)


def test_layers_of_different_modules_are_not_joined() -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.ModuleDict({"one": nn.Linear(4, 4)})})
    x = torch.ones(1, 4)
    model.forward = lambda input_ids, use_cache: (model["one"](x), model["two"]["one"](x))  # type: ignore[method-assign, assignment]
    assert shared_inputs(model, {"one": model["one"], "two.one": model["two"]["one"]}) == [["one"], ["two.one"]]  # type: ignore[dict-item, index]


def test_attention_and_feed_forward_layers_of_a_model_are_found(small: Any) -> None:
    base = small.load(small.config(), trainable=False).base
    layers = {name: layer for name, layer in base.named_modules() if type(layer) is nn.Linear}
    groups = shared_inputs(base, layers)
    assert sorted(name for group in groups for name in group) == sorted(layers)
    for number in range(base.config.num_hidden_layers):
        attention, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        assert [f"{attention}.{name}_proj" for name in "qkv"] in groups
        assert [f"{mlp}.gate_proj", f"{mlp}.up_proj"] in groups
        assert [f"{mlp}.down_proj"] in groups
