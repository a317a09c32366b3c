"""Tests of quantized base models, and of the wrong gradients of bitsandbytes on CPUs with AVX512-BF16."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from partita.lm.adapters.merging import merged_model
from partita.lm.base import GenerationOptions
from partita.lm.precision import plain_weight, quantized_layers
from partita_schema.errors import ModelError
from partita_schema.sections.quantization import BitsandbytesQuantization
from partita_trainers.libraries.bitsandbytes_import import import_bitsandbytes

from ...properties import ends

GREEDY = GenerationOptions({"do_sample": False, "num_beams": 1})
ADAPTER = {"type": "lora", "r": 4, "init": "gaussian"}


def packs_here() -> bool:
    """Return whether bitsandbytes repacks 4-bit weights on this machine."""
    import_bitsandbytes()  # without the compiler, whose import takes seconds
    from bitsandbytes.functional import has_avx512bf16

    return bool(has_avx512bf16())


def quantized(small, base_folder: Path, *, bits: int, trainable: bool = True, **sections: Any):
    given = {"adapter": ADAPTER} | sections
    config = small.config(base_model=str(base_folder), quantization={"bits": bits}, **given)
    return small.load(config, trainable=trainable)


def plain_twin(small, lm) -> nn.Module:
    """Return the same model with dequantized weights, computed independently of the code under test."""
    twin = copy.deepcopy(lm.module)
    for name, layer in quantized_layers(lm.module):
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        with torch.no_grad():
            plain.weight.copy_(plain_weight(layer))
        plain.requires_grad_(False)
        twin.set_submodule(name, plain)
    return twin


def gradient(lm, module: nn.Module, batch) -> torch.Tensor:
    module.train()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    loss = module(input_ids=batch.input_ids_BT, labels=batch.labels_BT).loss
    return torch.cat([found.flatten() for found in torch.autograd.grad(loss, parameters)])


@pytest.mark.parametrize("bits", [4, 8])
def test_gradients_are_correct_after_generation_and_evaluation(small, base_folder: Path, bits: int) -> None:
    lm, batch = quantized(small, base_folder, bits=bits), small.batch(lengths=(16, 16))
    small.take_steps(lm, steps=2)
    twin = plain_twin(small, lm)
    expected = gradient(lm, twin, batch)
    for look in ("nothing", "generate", "evaluate"):
        if look == "generate":
            lm.generate(small.requests((5, 4)), GREEDY, seed=0)
        if look == "evaluate":
            small.held_out_loss(lm)
        found = gradient(lm, lm.module, batch)
        assert torch.cosine_similarity(found, expected, dim=0) > 0.9999, look
        assert (found - expected).norm() < 0.01 * expected.norm(), look
        lm.module.eval()


@pytest.mark.skipif(not packs_here(), reason="bitsandbytes repacks 4-bit weights on AVX512-BF16 only")
def test_the_library_alone_gives_wrong_gradients_after_an_evaluation(small, base_folder: Path) -> None:
    """Show the bug that the previous test guards against; when this test fails, choose_kernels can be removed."""
    lm, batch = quantized(small, base_folder, bits=4), small.batch(lengths=(16, 16))
    small.take_steps(lm, steps=2)
    expected = gradient(lm, plain_twin(small, lm), batch)
    for _, layer in quantized_layers(lm.module):
        layer.support_avx512bf16_for_cpu = True
    small.held_out_loss(lm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gradient(lm, lm.module, batch)
    assert torch.cosine_similarity(found, expected, dim=0) < 0.99


def test_gradients_are_correct_after_an_init_that_runs_the_model(small, base_folder: Path) -> None:
    adapter = {"type": "lora", "r": 1, "init": "eva", "eva": {"rho": 1.0, "tau": 0.5}}
    lm, batch = quantized(small, base_folder, bits=4, adapter=adapter), small.batch(lengths=(16, 16))
    small.take_steps(lm, steps=2)
    expected = gradient(lm, plain_twin(small, lm), batch)
    assert torch.cosine_similarity(gradient(lm, lm.module, batch), expected, dim=0) > 0.9999


def test_widths_that_are_no_multiple_of_32_generate_without_training(small, tmp_path: Path) -> None:
    scratch = {"type": "scratch", "tokenizer": "byte", "size": "nano", "hidden_size": 48, "num_attention_heads": 2}
    small.load(small.config(base_model=scratch | {"intermediate_size": 100})).save(tmp_path)
    config = small.config(base_model=str(tmp_path), quantization={"bits": 4}, trainer={"type": "none"})
    lm = small.load(config, trainable=False)
    assert len(lm.generate(small.requests((5, 4)), GREEDY, seed=0)[0].ids) <= 4


@pytest.mark.skipif(not packs_here(), reason="bitsandbytes repacks 4-bit weights on AVX512-BF16 only")
def test_a_model_that_is_never_trained_uses_the_packed_kernel_if_possible(small, base_folder: Path) -> None:
    sections = {"base_model": str(base_folder), "quantization": {"bits": 4}}
    never = small.load(small.config(**sections, trainer={"type": "none"}), trainable=False)
    trained = small.load(small.config(**sections, adapter=ADAPTER))
    for lm, packed in ((never, {True}), (trained, {False})):
        lm.generate(small.requests((5, 4)), GREEDY, seed=0)
        layers = [layer for _, layer in quantized_layers(lm.module)]
        assert {getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in layers} == packed


@pytest.mark.parametrize("bits", ends([4, 8]))
@pytest.mark.parametrize(
    "adapter",
    ends(
        [
            ADAPTER,
            {"type": "adalora"},
            {"type": "ia3"},
            {"type": "vera", "r": 8},
            {"type": "oft"},
            {"type": "prompt_tuning"},
        ]
    ),
    ids=lambda adapter: adapter["type"],
)
def test_an_adapter_on_a_quantized_base_is_restored_from_its_files(
    small, base_folder: Path, adapter: dict[str, Any], bits: int, tmp_path: Path
) -> None:
    lm = quantized(small, base_folder, bits=bits, adapter=adapter)
    lm.prepare_training(4)
    small.take_steps(lm, steps=2)
    lm.save(tmp_path)
    read = small.load(lm.config, saved=tmp_path, trainable=False)
    assert small.held_out_loss(read) == small.held_out_loss(lm)
    assert read.fingerprint == lm.fingerprint


def test_quantization_changes_the_fingerprint(small, base_folder: Path) -> None:
    config = {"base_model": str(base_folder), "trainer": {"type": "none"}}
    found = [
        small.load(small.config(**config, quantization=quantization), trainable=False).fingerprint
        for quantization in (None, {"bits": 4}, {"bits": 8}, {"bits": 4, "bnb_4bit_quant_type": "fp4"})
    ]
    assert len(set(found)) == 4


@pytest.mark.parametrize(("bits", "use_dora"), [(4, False), (4, True), (8, False)])
def test_a_merged_quantized_model_is_plain_and_computes_the_same(
    small, base_folder: Path, bits: int, use_dora: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = ADAPTER | {"use_dora": use_dora, "postprocessor": {"merge_adapter_into_base_model": True}}
    lm = quantized(small, base_folder, bits=bits, adapter=adapter)
    start = small.held_out_loss(lm)
    small.take_steps(lm, steps=3)
    learned, fingerprint = small.held_out_loss(lm), lm.fingerprint
    with caplog.at_level("INFO"):
        lm.save(tmp_path)
    assert "the quantized base is saved in float32, with the adapter merged into it" in caplog.text
    assert (small.held_out_loss(lm), lm.fingerprint) == (learned, fingerprint)
    read = small.load(lm.config, saved=tmp_path, trainable=False)
    assert not quantized_layers(read.module)
    assert read.adapted is None
    assert abs(small.held_out_loss(read) - learned) < 0.05 * abs(learned - start)


def test_a_packed_layer_can_be_merged(small, base_folder: Path) -> None:
    lm = quantized(small, base_folder, bits=4)
    expected = merged_model(lm.adapted).state_dict()
    for _, layer in quantized_layers(lm.module):
        layer.support_avx512bf16_for_cpu = packs_here()
    small.held_out_loss(lm)
    for name, weight in merged_model(lm.adapted).state_dict().items():
        torch.testing.assert_close(weight, expected[name], atol=2e-3, rtol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_loftq_on_a_quantized_base_is_closer_to_the_original_weights(small, base_folder: Path, bits: int) -> None:
    original = small.load(small.config(base_model=str(base_folder)))
    adapter = {"type": "lora", "r": 8, "init": "loftq"}
    lm = quantized(small, base_folder, bits=bits, adapter=adapter)
    layers = {name: layer for name, layer in lm.base.named_modules() if hasattr(layer, "lora_A")}
    assert len(layers) == 7 * lm.base.config.num_hidden_layers
    for name, layer in layers.items():
        weight = original.base.get_submodule(name).weight
        rounded = plain_weight(layer.get_base_layer())
        update = layer.get_delta_weight("default")
        assert (weight - rounded - update).norm() < 0.9 * (weight - rounded).norm()


@pytest.mark.parametrize(
    ("adapter", "bits", "text"),
    [
        ({"init": "pissa"}, 4, "pissa changes the base weights, and quantized ones cannot be changed"),
        ({"init": "orthogonal"}, 8, "orthogonal does not work on a quantized base; write init: default or loftq"),
        ({"init": "loftq", "loftq_iterations": 2}, 4, "a quantized base allows 1, its weights stay as they are"),
        ({"use_dora": True}, 8, r"adapter\.use_dora: it does not work on an 8-bit base on a CPU"),
    ],
)
def test_adapters_without_support_for_quantized_bases_are_refused(
    small, base_folder: Path, adapter: dict[str, Any], bits: int, text: str
) -> None:
    config = small.config(base_model=str(base_folder), adapter={"type": "lora", **adapter})
    # A checkpoint can be quantized itself, which the file does not show.
    config = config.model_copy(update={"quantization": BitsandbytesQuantization(bits=bits)})
    with pytest.raises(ModelError, match=text):
        small.load(config)


def test_an_adapter_that_fails_in_its_first_forward_pass_is_reported_when_it_is_made(small, base_folder: Path) -> None:
    with pytest.raises(ModelError, match="adapter: loha does not fit this model: "):
        quantized(small, base_folder, bits=4, adapter={"type": "loha"})
