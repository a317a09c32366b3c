"""Tests of the private parts of accelerate that partita uses: they still exist and work the same."""

import accelerate
import torch
from accelerate import Accelerator
from torch import nn

from partita_trainers.libraries.accelerate_internals import PREPARED, layer_class_names, reset_precision

FILE = "change trainers/partita_trainers/libraries/accelerate_internals.py"
CHANGED = f"accelerate {accelerate.__version__} changed"


def test_a_process_can_prepare_models_with_several_precisions() -> None:
    for precision in ("bf16", "no"):
        try:
            reset_precision()
        except AttributeError as error:
            raise AssertionError(f"{CHANGED} AcceleratorState._reset_state ({error}): {FILE}") from None
        accelerator = Accelerator(mixed_precision=precision, cpu=True, device_placement=False)
        assert accelerator.mixed_precision == precision, f"{CHANGED} how the precision is kept: {FILE}"


def test_all_attributes_written_by_preparing_a_model_are_known() -> None:
    reset_precision()
    module = nn.Linear(4, 4)
    before = set(vars(module))
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, device_placement=False)
    accelerator.prepare_model(module, device_placement=False, evaluation_mode=True)
    written = set(vars(module)) - before
    assert written == set(PREPARED), f"{CHANGED} the attributes of a prepared model to {sorted(written)}: {FILE}"
    for name in PREPARED:
        del vars(module)[name]
    assert module(torch.ones(2, 4)).dtype == torch.float32
    reset_precision()


def test_layers_are_collected_from_all_parts_of_a_model() -> None:
    class Part(nn.Module):
        _no_split_modules = ("Block",)

    assert layer_class_names(nn.Sequential(nn.Linear(2, 2), Part())) == {"Block"}
    assert layer_class_names(nn.Linear(2, 2)) == set()
