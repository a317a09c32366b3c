"""Tests of fused LoRA layers: the results of peft's forward."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from partita.lm.adapters.lora_linear import LoraLinear, fuse_lora, fused_class, plain_adapter, unmodified_adapter


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40, bias=True)
        self.second = nn.Linear(40, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def adapted(**options: Any) -> Any:
    """Return two layers under LoRA with B not zero; the same at each call."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(target_modules=["first", "second"], lora_alpha=16, **({"r": 4} | options))
    module = get_peft_model(Layers(), settings)
    for parameter in module.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return module


def outcome(module: Any, *, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return the result, then the gradients of the input and of all trained parameters."""
    if x is None:
        x = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(1))
    x = x.detach().requires_grad_()
    torch.manual_seed(2)
    y = module(x)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *trained])]


def layers(module: Any) -> list[Any]:
    return [module.base_model.model.first, module.base_model.model.second]


def is_plain(module: Any, *, x: torch.Tensor | None = None) -> bool:
    found = {plain_adapter(layer, torch.zeros(2, 24) if x is None else x) is not None for layer in layers(module)}
    assert len(found) == 1
    return found.pop()


def test_without_an_adapter_peft_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "peft", raising=False)

    assert fuse_lora(nn.Linear(2, 2)) == 0
    assert "peft" not in sys.modules


PROGRAM = """
import sys
from partita import Model

features = {"input_features": [{"name": "text"}], "output_features": [{"name": "answer", "type": "text"}]}
rows = [{"text": letter, "answer": letter} for letter in "abcdefgh"]
base = {"type": "scratch", "size": "nano", "tokenizer": "byte", "context_length": 32}
model = Model({"base_model": base, **features, "trainer": {"type": "finetune", "max_steps": 1}}, quiet=True)
model.train(rows, run="run")
model.predict(rows)
model.evaluate(rows)
print({"peft", "bitsandbytes"} & set(sys.modules))
"""


@pytest.mark.long
def test_no_verb_imports_peft_without_an_adapter(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"r": 1}, {"r": 16}, {"rank_pattern": {"first": 3}}, {"lora_dropout": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("shape", [(3, 7, 24), (5, 24), (1, 1, 24)])
def test_results_and_all_gradients_equal_those_of_peft(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    own = outcome(adapted(**options), x=x)
    module = adapted(**options)
    assert fuse_lora(module) == 2
    assert is_plain(module)
    for found, wanted in zip(outcome(module, x=x), own, strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()


def test_inputs_may_be_non_contiguous_and_need_no_gradient() -> None:
    x = torch.randn(24, 9, 3, generator=torch.Generator().manual_seed(3)).permute(2, 1, 0)
    found = []
    for fused in (False, True):
        module = adapted()
        if fused:
            fuse_lora(module)
        module(x).sum().backward()
        found.append([parameter.grad for parameter in module.parameters() if parameter.requires_grad])
    for fused, own in zip(found[1], found[0], strict=True):
        assert (fused - own).norm() <= 1e-5 * own.norm()


def test_a_model_may_change_the_output_of_a_layer_in_place() -> None:
    module = adapted()
    fuse_lora(module)
    layer = layers(module)[0]
    assert plain_adapter(layer, torch.zeros(2, 24)) is not None
    layer(torch.ones(2, 3, 24)).clamp_(-0.1, 0.1).sum().backward()
    assert layer.lora_B["default"].weight.grad is not None


def test_gradients_in_float64_equal_numerical_gradients() -> None:
    draw = torch.Generator().manual_seed(0)

    def tensor(*shape: int, learned: bool = True) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_(learned)

    frozen = (tensor(4, 5, learned=False), tensor(4, learned=False))
    inputs = (tensor(6, 5), *frozen, tensor(2, 5), tensor(4, 2), 1.7, ())
    assert torch.autograd.gradcheck(LoraLinear.apply, inputs)


def train_with_dropout(module: Any) -> None:
    module.train()


def switch_off(module: Any) -> None:
    module.base_model.disable_adapter_layers()


def add_second(module: Any) -> None:
    from peft import LoraConfig

    settings = LoraConfig(target_modules=["first", "second"], r=2, init_lora_weights=False)
    module.add_adapter("other", settings)
    module.base_model.set_adapter(["default", "other"])


def train_base(module: Any) -> None:
    for layer in layers(module):
        layer.get_base_layer().weight.requires_grad_()


def hook_base(module: Any) -> None:
    for layer in layers(module):
        layer.get_base_layer().register_forward_hook(lambda layer, inputs, output: output * 2)


@pytest.mark.parametrize(
    ("options", "prepare"),
    [
        ({"lora_dropout": 0.5}, train_with_dropout),
        ({"use_dora": True}, None),
        ({"lora_bias": True}, None),
        ({}, switch_off),
        ({}, add_second),
        ({}, train_base),
        ({}, hook_base),
    ],
    ids=["dropout", "dora", "bias", "off", "two", "base trained", "hook"],
)
def test_layers_that_cannot_be_fused_use_the_forward_of_peft_bit_for_bit(
    options: dict[str, Any], prepare: Callable[[Any], None] | None
) -> None:
    results = []
    for fused in (False, True):
        module = adapted(**options)
        if fused:
            fuse_lora(module)
        if prepare is not None:
            prepare(module)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            results.append([module(torch.ones(2, 24))])
            continue
        results.append(outcome(module))
    assert not is_plain(module)
    for found, wanted in zip(results[1], results[0], strict=True):
        assert torch.equal(found, wanted)


def test_layers_with_dropout_are_fused_in_evaluation_mode() -> None:
    module = adapted(lora_dropout=0.5)
    fuse_lora(module)
    module.eval()
    assert is_plain(module)


def test_merged_weights_are_applied_once_and_can_be_unmerged() -> None:
    module, x = adapted(), torch.ones(2, 24)
    before = module(x)
    fuse_lora(module)
    module.merge_adapter()
    assert not is_plain(module)
    torch.testing.assert_close(module(x), before, rtol=1e-5, atol=1e-5)
    module.unmerge_adapter()
    assert is_plain(module)
    torch.testing.assert_close(module(x), before, rtol=1e-5, atol=1e-5)
    merged = module.merge_and_unload()
    torch.testing.assert_close(merged(x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "prepare", "skips_peft"),
    [
        ({}, None, True),
        ({"use_rslora": True, "rank_pattern": {"first": 3}}, None, True),
        ({"lora_dropout": 0.5}, nn.Module.eval, True),
        ({"lora_bias": True}, None, True),
        ({}, hook_base, True),
        ({}, nn.Module.bfloat16, False),
        ({"lora_dropout": 0.5}, train_with_dropout, False),
        ({"use_dora": True}, None, False),
        ({}, switch_off, False),
        ({}, add_second, False),
        ({}, lambda module: module.merge_adapter(), False),
    ],
    ids=["plain", "rslora", "evaluated", "bias", "hook", "bfloat16", "dropout", "dora", "off", "two", "merged"],
)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_results_without_gradients_equal_those_of_peft_bit_for_bit(
    options: dict[str, Any], prepare: Callable[[Any], Any] | None, skips_peft: bool, context: Any
) -> None:
    results, x = [], torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    for fused in (False, True):
        module = adapted(**options)
        if fused:
            fuse_lora(module)
        if prepare is not None:
            prepare(module)
        torch.manual_seed(2)
        with context():
            results.append(module(x.to(layers(module)[0].base_layer.weight.dtype)))
            skipped = [unmodified_adapter(layer, x) is not None for layer in layers(module)]
    assert skipped == [skips_peft] * 2
    assert torch.equal(*results)


def test_peft_computes_under_autocast_and_in_16_bits() -> None:
    module = adapted()
    fuse_lora(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_plain(module)
    assert is_plain(module)
    assert not is_plain(module, x=torch.zeros(2, 24, dtype=torch.bfloat16))
    assert not is_plain(module.bfloat16(), x=torch.zeros(2, 24, dtype=torch.bfloat16))


class Widened(TorchDispatchMode):
    """Counts the copies of 16-bit activations to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and args[0].ndim == 3:
            self.count += (args[0].dtype, result.dtype) == (torch.bfloat16, torch.float32)
        return result


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_inputs_of_16_bits_are_not_converted_under_autocast(dropout: float) -> None:
    found, counts = [], []
    x = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    for fuses in (False, True):
        module = adapted(lora_dropout=dropout)
        for layer in layers(module):
            layer.base_layer.bfloat16()
        if fuses:
            fuse_lora(module)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with Widened() as widened:
                module(x)
            counts.append(widened.count)
            found.append(outcome(module, x=x))
    assert counts == [2, 0]
    if not dropout:  # its random numbers depend on the dtype
        assert all(map(torch.equal, *found))


def test_state_dict_and_module_names_equal_those_of_peft(tmp_path: Any) -> None:
    from peft import PeftModel

    module, plain = adapted(), adapted()
    fuse_lora(module)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in module.named_modules()] == [name for name, _ in plain.named_modules()]
    module.save_pretrained(tmp_path)
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(Layers(), tmp_path)
    x = torch.ones(2, 24)
    torch.testing.assert_close(loaded(x), module(x), rtol=1e-5, atol=1e-5)


def test_a_copy_computes_with_its_own_weights() -> None:
    from copy import deepcopy

    module, x = adapted(), torch.ones(2, 24)
    fuse_lora(module)
    copied = deepcopy(module)
    before = copied(x).detach()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(copied(x).detach(), before)
    assert not module(x).any()


@pytest.mark.parametrize("quantised", [False, True])
def test_a_language_model_trains_with_fused_lora_layers(small, base_folder: Any, quantised: bool) -> None:
    from peft.tuners.lora.layer import Linear

    sections = {"quantization": {"bits": 4}} if quantised else {}
    lm = small.load(small.config(base_model=str(base_folder), adapter={"type": "lora", "init": "gaussian"}, **sections))
    fused = [layer for layer in lm.module.modules() if isinstance(layer, fused_class())]
    assert len(fused) == (0 if quantised else 14)
    small.take_steps(lm, steps=2)
    batch = small.batch()
    with lm.training():
        found = gradients(lm, batch)
        for layer in fused:
            layer.__class__ = Linear
        wanted = gradients(lm, batch)
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    assert quantised or not torch.equal(found, wanted)


def gradients(lm: Any, batch: Any) -> torch.Tensor:
    trained = [parameter for parameter in lm.module.parameters() if parameter.requires_grad]
    return torch.cat([each.flatten() for each in torch.autograd.grad(lm.loss(lm.module, batch), trained)])
