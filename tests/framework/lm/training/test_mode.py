"""Tests of switching between training and evaluation mode in each step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from partita.lm.training.mode import ModeSwitch


class Listening(nn.Linear):
    """A layer that does more than to set an attribute when its mode changes."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.heard: list[bool] = []

    def train(self, mode: bool = True) -> "Listening":
        """Note the mode."""
        self.heard.append(mode)
        return super().train(mode)


def modes(module: nn.Module) -> set[bool]:
    return {part.training for part in module.modules()}


def test_all_parts_are_switched_as_by_train(small: Any, base_folder: Path) -> None:
    lm = small.load(small.config(base_model=str(base_folder), adapter={"type": "lora"}))
    switch = ModeSwitch(lm.module)
    assert not switch.needs_calls
    for training in (True, False, True):
        switch(training)
        assert modes(lm.module) == {training}


def test_a_part_with_its_own_train_is_called() -> None:
    module = nn.Sequential(nn.Dropout(), Listening())
    ModeSwitch(module)(False)
    assert (module[1].heard, modes(module)) == ([False], {False})


@pytest.mark.parametrize("adapter", [{"type": "lora"}, {"type": "lora", "use_dora": True}], ids=["lora", "dora"])
def test_steps_leave_the_model_in_evaluation_mode(
    small: Any, base_folder: Path, adapter: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = small.load(small.config(base_model=str(base_folder), adapter=adapter))
    seen: list[set[bool]] = []
    loss: Callable[..., torch.Tensor] = lm.loss
    monkeypatch.setattr(lm, "loss", lambda *arguments: seen.append(modes(lm.module)) or loss(*arguments))
    lm.module.eval()
    lm.prepare_training(2)
    assert isinstance(lm._switch_mode, ModeSwitch)
    small.take_steps(lm, steps=2)
    assert seen == [{True}, {True}]
    assert modes(lm.module) == {False}


@pytest.mark.parametrize("trainer", [{"type": "finetune", "compile": True}, {"type": "custom", "target": "a:B"}])
def test_a_module_that_may_be_compiled_is_switched_by_torch(small: Any, trainer: dict[str, Any]) -> None:
    lm = small.load(small.config(trainer=trainer))
    lm.prepare_training(2)
    assert lm._switch_mode == lm.module.train
