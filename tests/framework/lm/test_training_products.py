"""Tests of training with products by oneDNN: gradients, where it is used, and equal runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from partita import Model
from partita.lm.adapters.lora_linear import fuse_lora
from partita.lm.products import fast_linear
from partita.lm.products.fast_linear import FastLinear, Least, LinearProducts, enable_fast_products
from partita.lm.products.product import Product

from ...json_lines import read_json_lines
from .adapters.test_lora_linear import adapted, layers, outcome
from .products.test_fast_linear import Watch

ALL = frozenset(Product)


@pytest.fixture(scope="module", autouse=True)
def one_dnn() -> None:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("this build of torch has no oneDNN")


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let oneDNN compute the smallest products."""
    monkeypatch.setattr(fast_linear, "LEAST_IN_TRAINING", 0)


def trained_layer(*, bias: bool = True, onednn: frozenset[Product] = ALL) -> Any:
    torch.manual_seed(1)
    layer: Any = nn.Linear(128, 160, bias=bias)
    assert enable_fast_products(layer) == 1
    layer.training_products = onednn
    return layer


def gradients(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the outputs, and the gradients of the inputs and of all trained parameters."""
    x = x.detach().requires_grad_()
    y = layer(x)
    learned = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *learned])]


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 128), (3, 11, 128), (1, 1, 128)])
def test_outputs_and_gradients_equal_those_in_float64(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = trained_layer(bias=bias), torch.randn(shape)
    with Watch() as seen:
        found = gradients(layer, x)
    assert len(seen.rows) == 3
    wanted = gradients(layer.double(), x.double())
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other).norm() <= 1e-6 * other.norm()


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("onednn", [frozenset[Product](), *[frozenset([one]) for one in Product]])
def test_only_the_chosen_products_use_onednn(onednn: frozenset[Product]) -> None:
    with Watch() as seen:
        gradients(trained_layer(onednn=onednn), torch.randn(40, 128))
    assert len(seen.rows) == len(onednn)


@pytest.mark.usefixtures("any_size")
def test_frozen_weights_and_inputs_without_gradient_need_no_further_products() -> None:
    frozen = trained_layer()
    frozen.requires_grad_(False)
    with Watch() as seen:
        gradients(frozen, torch.randn(40, 128))
    assert len(seen.rows) == 2
    first = trained_layer()
    with Watch() as seen:
        first(torch.randn(40, 128)).sum().backward()
    assert len(seen.rows) == 2
    assert first.weight.grad is not None


def test_torch_computes_small_products_bit_for_bit() -> None:
    x = torch.randn(40, 128)
    with Watch() as seen:
        found = gradients(trained_layer(), x)
    assert not seen.rows
    assert all(torch.equal(*pair) for pair in zip(found, gradients(trained_layer(onednn=frozenset()), x), strict=True))


@pytest.mark.usefixtures("any_size")
def test_torch_computes_autocast_16_bits_and_passes_without_gradients() -> None:
    layer, x = trained_layer(), torch.randn(64, 128)
    with Watch() as seen:
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with torch.no_grad():
            layer(x)
        layer.bfloat16()(x.bfloat16()).sum().backward()
    assert not seen.rows


@pytest.mark.usefixtures("any_size")
def test_a_model_may_change_the_output_of_a_layer_in_place() -> None:
    # OLMo with clip_qkv does.
    layer, x = trained_layer(), torch.randn(2, 3, 128)
    with Watch() as seen:
        layer(x).clamp_(-0.1, 0.1).sum().backward()
    assert seen.rows
    assert layer.weight.grad is not None


@pytest.mark.usefixtures("any_size")
def test_compiled_layers_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fast_linear, "LinearProducts")
    layer = trained_layer()
    torch.compile(layer, backend="eager")(torch.randn(64, 128)).sum().backward()
    with pytest.raises(NameError):
        layer(torch.randn(64, 128))


def test_gradients_in_float64_equal_numerical_gradients() -> None:
    draw = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    assert torch.autograd.gradcheck(LinearProducts.apply, (tensor(6, 5), tensor(4, 5), tensor(4), ()))


@pytest.mark.usefixtures("any_size")
def test_lora_layers_use_the_products_of_their_base_layers() -> None:
    x = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(3))
    own = outcome(adapted(), x=x)
    module = adapted()
    fuse_lora(module)
    enable_fast_products(module, least=Least(weights=0))
    for layer in layers(module):
        layer.get_base_layer().training_products = ALL
    with Watch() as seen:
        found = outcome(module, x=x)
    assert len(seen.rows) == 4
    for one, other in zip(found, own, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def settings(adapter: bool) -> dict[str, Any]:
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300}
    return {
        "base_model": {"type": "scratch", "context_length": 64, "tokenizer": "byte"} | size,
        "input_features": [{"name": "text", "type": "text"}],
        "output_features": [{"name": "reply", "type": "text"}],
        "adapter": {"type": "lora", "r": 4} if adapter else None,
        "data": {"batching": {"type": "token_budget", "max_tokens": 200}},
        "trainer": {
            "type": "finetune",
            "learning_rate": 1e-3,
            "learning_rate_scheduler": {"decay": "constant", "warmup_steps": 0},
            "steps_per_checkpoint": 1,
            "skip_all_evaluation": True,
        },
    }


ROWS = [{"text": f"{number} red balls" + " and more" * (number % 3), "reply": f"blue {number}"} for number in range(40)]


def trained(folder: Path, adapter: bool, *steps: int) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Train up to each number of steps in turn; return the log and the weights."""
    for number in steps:
        config = settings(adapter)
        config["trainer"] |= {"max_steps": number}
        Model(config, quiet=True).train(ROWS, run=folder)
    name = "adapter_model.safetensors" if adapter else "model.safetensors"
    return read_json_lines(folder / "log.jsonl"), load_file(folder / "model" / name)


@pytest.fixture
def onednn_everywhere(monkeypatch: pytest.MonkeyPatch, any_size: None) -> Iterator[list[int]]:
    """Compute all products of training by oneDNN; yield a list with the number of rows of each product."""

    def choose(found: Any) -> dict[Any, frozenset[Product]]:
        return {tuple(layer.weight.shape): ALL for layer in found}

    monkeypatch.setattr(fast_linear, "faster_for_training", choose)
    monkeypatch.setattr(fast_linear, "LEAST", Least(weights=0))
    with Watch() as seen:
        yield seen.rows


@pytest.mark.long
@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
def test_runs_have_the_losses_of_torch_and_resume_bit_for_bit(
    tmp_path: Path, request: pytest.FixtureRequest, adapter: bool
) -> None:
    usual, _ = trained(tmp_path / "usual", adapter, 4)
    products: list[int] = request.getfixturevalue("onednn_everywhere")
    log, weights = trained(tmp_path / "whole", adapter, 4)
    assert products
    assert [line["batch_hash"] for line in log] == [line["batch_hash"] for line in usual]
    assert [line["loss"] for line in log] == pytest.approx([line["loss"] for line in usual], rel=1e-5)
    resumed_log, resumed = trained(tmp_path / "parts", adapter, 2, 4)
    assert [line["loss"] for line in resumed_log] == [line["loss"] for line in log]
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


@pytest.mark.usefixtures("onednn_everywhere")
@pytest.mark.parametrize("trainable", [True, False])
def test_only_models_that_are_trained_get_products_for_training(small: Any, trainable: bool) -> None:
    lm = small.load(small.config(), trainable=trainable)
    linear = [part for part in lm.module.modules() if isinstance(part, nn.Linear)]
    assert {getattr(part, "training_products", frozenset()) for part in linear} == {ALL if trainable else frozenset()}
    assert not trainable or {type(part) for part in linear} == {FastLinear}
