"""Tests of linear layers with int8 weights against sums of integers in float64, and of models with such layers."""

from collections import Counter
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from partita.lm.base import GenerationOptions
from partita.lm.checks.logit_check import INT8_TOLERANCE, TOLERANCE, rounding_limit
from partita.lm.loading import number_formats
from partita.lm.loading.number_formats import Int8Speed
from partita.lm.products import int8_linear
from partita.lm.products.int8_linear import (
    FBGEMM,
    FEWEST_ROWS,
    ONEDNN,
    Int8Library,
    Int8Linear,
    available_libraries,
    int8_layers,
    packed,
    to_int8,
    weight_levels,
)
from partita.lm.slots.check import largest_error
from partita.lm.slots.slots import SlotSupport
from partita.lm.training.exporting import identity
from partita_schema.errors import ModelError

# No product is computed while tests are collected: oneDNN reads the size of its kernel cache at the first one.
INSTALLED = [library for library in (FBGEMM, ONEDNN) if library.is_available()]
pytestmark = pytest.mark.skipif(not INSTALLED, reason="this build of torch has no int8 products")
needs_both = pytest.mark.skipif(len(INSTALLED) < 2, reason="this build of torch lacks FBGEMM or oneDNN")
needs_onednn = pytest.mark.skipif(ONEDNN not in INSTALLED, reason="this build of torch lacks oneDNN")

TYPE = "int8_dynamic_activation_int8_weight"
GREEDY = GenerationOptions({"do_sample": False})


@pytest.fixture(params=INSTALLED, ids=lambda library: library.name)
def library(request: pytest.FixtureRequest) -> Int8Library:
    found: Int8Library = request.param
    return found


@pytest.fixture(autouse=True)
def int8_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert all layers, also those that are too small to be faster."""
    speed = Int8Speed(available_libraries()[-1], 2.0)
    monkeypatch.setattr(number_formats, "int8_speeds", lambda shapes, dtype: dict.fromkeys(shapes, speed))


def both(library: Int8Library, inputs: int, outputs: int, *, bias: bool = True) -> tuple[nn.Linear, Int8Linear]:
    """Return a layer and the same in int8."""
    torch.manual_seed(0)
    layer, int8 = nn.Linear(inputs, outputs, bias=bias), nn.Linear(inputs, outputs, bias=bias)
    int8.load_state_dict(layer.state_dict())
    to_int8([int8], library)
    assert isinstance(int8, Int8Linear)
    return layer.requires_grad_(False), int8.requires_grad_(False)


def reference(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return the output of a layer in float64, from a weight and inputs rounded to integers."""
    scale_O = layer.weight.abs().amax(1).double() / weight_levels()
    weight_OI = (layer.weight / scale_O[:, None]).round()
    scale_x = x.abs().amax(-1, keepdim=True) / 127
    y = (x / scale_x).round().double() @ weight_OI.double().t() * scale_O * scale_x
    return y if layer.bias is None else y + layer.bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (257, 33), (5, 1)])
def test_the_output_is_that_of_a_sum_of_integers(library: Int8Library, inputs: int, outputs: int, bias: bool) -> None:
    layer, int8 = both(library, inputs, outputs, bias=bias)
    x = torch.randn(3, 7, inputs) * torch.rand(3, 7, 1) * 20
    torch.testing.assert_close(int8(x).double(), reference(layer, x), rtol=1e-5, atol=1e-6)
    assert (int8(x) - layer(x)).norm() < 0.03 * layer(x).norm()
    assert int8(x.bfloat16()).dtype == torch.bfloat16


def test_no_sum_is_cut_off_for_the_largest_inputs_and_weights(library: Int8Library) -> None:
    layer, int8 = both(library, 512, 64, bias=False)
    layer.weight.fill_(1)
    with torch.no_grad():
        int8.product.packed = packed(layer.weight, library, levels=weight_levels())
    x = torch.ones(4, 512)
    x[1] = -1
    torch.testing.assert_close(int8(x), layer(x))


def test_the_levels_are_the_largest_with_which_sums_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.full((8, 64), 127.0), torch.full((2, 64), 127.0)
    sums = [library.multiply(x, packed(weight, library, levels=127)) for library in available_libraries()]
    exact = all(bool((one == 127 * 127 * 64).all()) for one in sums)
    assert weight_levels() == (127 if exact else 63)
    for library in available_libraries():
        with monkeypatch.context() as patch:
            patch.setattr(type(library), "multiply", lambda self, x, packed: torch.zeros(2, 32))
            assert weight_levels.__wrapped__() == 63


@needs_both
def test_a_library_that_cannot_multiply_on_this_processor_is_not_available(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(x_NI: torch.Tensor, packed: object) -> torch.Tensor:
        raise RuntimeError("no primitive")

    monkeypatch.setattr(ONEDNN, "multiply", refuse)
    with caplog.at_level("DEBUG"):
        assert available_libraries.__wrapped__() == [FBGEMM]
    assert "no int8 products by oneDNN: no primitive" in caplog.text


def test_a_library_with_a_reference_implementation_only_is_not_available(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, *others = available_libraries()
    multiply = first.multiply

    def multiply_many_times(x_NI: torch.Tensor, packed: Any) -> torch.Tensor:
        for _ in range(500):
            product = multiply(x_NI, packed)
        return product

    monkeypatch.setattr(first, "multiply", multiply_many_times)
    with caplog.at_level("DEBUG"):
        assert available_libraries.__wrapped__() == others
    assert f"int8 products by {first.name} take " in caplog.text


@needs_onednn
def test_inputs_of_onednn_are_unsigned_if_there_are_no_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, seen = int8_linear.onednn_int8_linear, []

    def record(x: torch.Tensor, weight: Any) -> torch.Tensor:
        seen.append(x.dtype)
        return multiply(x, weight)

    monkeypatch.setattr(int8_linear, "onednn_int8_linear", record)
    _, int8 = both(ONEDNN, 64, 48)
    x = torch.randn(5, 64)
    found = []
    for amx in (False, True):
        monkeypatch.setattr(int8_linear, "has_amx", lambda amx=amx: amx)
        found.append(int8(x))
    assert seen == [torch.uint8, torch.int8]
    assert torch.equal(*found)


@needs_both
@pytest.mark.parametrize("rows", [1, FEWEST_ROWS, 3, 16, 17, 100, 257])
def test_both_libraries_compute_the_same_bits(rows: int) -> None:
    fbgemm, onednn = (both(library, 96, 160)[1] for library in (FBGEMM, ONEDNN))
    x = torch.randn(rows, 96)
    x[0, 1:40] = (torch.arange(39) + 0.5 - 2e-7) * x[0].abs().max() / 127  # FBGEMM itself would round some of them up
    assert torch.equal(fbgemm(x), onednn(x))
    assert torch.equal(fbgemm.weight, onednn.weight)


def test_an_input_without_rows_has_an_output_without_rows(library: Int8Library) -> None:
    _, int8 = both(library, 64, 96)
    assert int8(torch.zeros(0, 64)).shape == (0, 96)
    assert int8(torch.zeros(2, 0, 64)).shape == (2, 0, 96)


@needs_onednn
def test_onednn_compiles_kernels_for_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply, seen = int8_linear.onednn_int8_linear, set()

    def count(x: torch.Tensor, weight: Any) -> torch.Tensor:
        seen.add(len(x))
        return multiply(x, weight)

    monkeypatch.setattr(int8_linear, "onednn_int8_linear", count)
    _, int8 = both(ONEDNN, 32, 48)
    for rows in range(1, 257):
        assert len(int8(torch.randn(rows, 32))) == rows
    assert min(seen) == FEWEST_ROWS
    assert len(seen) < 50


def three_layers(library: Int8Library) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """Return three layers in int8 that are computed together, and the same layers each for itself."""
    torch.manual_seed(0)
    sizes = {"query": 96, "key": 32, "value": 33}
    together = [nn.Linear(64, outputs, bias=name != "key") for name, outputs in sizes.items()]
    alone = deepcopy(together)
    to_int8(together, library)
    for layer in alone:
        to_int8([layer], library)
    return together, alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_the_same_inputs_are_computed_in_one_product(
    library: Int8Library, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, alone = three_layers(library)
    multiply, calls = library.multiply, []

    def count(x_NI: torch.Tensor, packed: Any) -> torch.Tensor:
        calls.append(len(x_NI))
        return multiply(x_NI, packed)

    xs = [torch.randn(2, 5, 64, dtype=dtype) for _ in range(3)]
    with torch.inference_mode():
        expected = [[layer(x) for layer in alone] for x in xs]
        monkeypatch.setattr(library, "multiply", count)
        for x, outputs in zip(xs, expected, strict=True):
            for layer, output in zip(together, outputs, strict=True):
                assert torch.equal(layer(x), output)
    assert calls == [10, 10, 10]
    assert all(layer.product.last is None for layer in together), "inputs and outputs of the last pass are kept"
    for layer, other in zip(together, alone, strict=True):
        assert torch.equal(layer.weight, other.weight)


def test_layers_in_one_product_do_not_depend_on_the_order_of_calls(library: Int8Library) -> None:
    together, alone = three_layers(library)
    one, other = torch.randn(2, 4, 64)
    calls = [(one, 0), (other, 1), (one, 1), (one, 2), (other, 0), (other.clone(), 1), (other, 2), (one, 1)]
    for x, part in [*calls, (one, 0), (one, 1), (one, 1), (one, 0), (one, 2)]:
        output = together[part](x)
        assert torch.equal(output, alone[part](x))
        output.zero_()
    x = one.clone()
    together[0](x)
    x.mul_(2)  # of the same identity in the next pass
    assert torch.equal(together[0](x), alone[0](x))


def test_a_layer_can_be_copied(library: Int8Library) -> None:
    _, int8 = both(library, 64, 96)
    x = torch.randn(3, 64)
    assert torch.equal(deepcopy(int8)(x), int8(x))


def test_the_inputs_are_not_changed(library: Int8Library) -> None:
    _, int8 = both(library, 64, 96)
    x = torch.randn(16, 64)
    before = x.clone()
    int8(x)
    assert torch.equal(x, before)


def test_a_row_does_not_depend_on_the_rows_next_to_it(library: Int8Library) -> None:
    _, int8 = both(library, 96, 160)
    x = torch.randn(33, 96) * torch.logspace(-3, 3, 33)[:, None]
    together = int8(x)
    for row in range(33):
        assert torch.equal(together[row], int8(x[row].clone()[None])[0])
    assert torch.equal(together[:5], int8(x[:5].clone()))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_and_alone(library: Int8Library, value: float) -> None:
    _, int8 = both(library, 32, 48)
    x = torch.randn(3, 32)
    expected = int8(x.clone())
    x[1, 5] = value
    found = int8(x)
    assert not found[1].isfinite().any()
    assert torch.equal(found[::2], expected[::2])


def test_a_row_of_zeros_is_the_bias(library: Int8Library) -> None:
    layer, int8 = both(library, 32, 48)
    assert torch.equal(int8(torch.zeros(2, 32)), layer.bias.expand(2, -1))


def test_the_layer_holds_no_float32_weight_and_computes_it_on_request(library: Int8Library) -> None:
    layer, int8 = both(library, 64, 96)
    assert [name for name, _ in int8.named_parameters()] == ["bias"]
    assert list(int8.state_dict()) == ["bias"]
    step = layer.weight.abs().amax(1, keepdim=True) / weight_levels()
    assert ((int8.weight - layer.weight).abs() <= 0.501 * step).all()
    assert (int8.in_features, int8.out_features) == (64, 96)


def loaded(small: Any, base: Path, **sections: Any) -> Any:
    quantization = {"type": TYPE} | sections.pop("quantization", {})
    config = small.config(base_model=str(base), trainer={"type": "none"}, quantization=quantization, **sections)
    return small.load(config, trainable=False)


def test_answers_in_slots_equal_those_of_generate_for_a_row_alone(small: Any, base_folder: Path) -> None:
    lm = loaded(small, base_folder)
    small.sharpen(lm.module)
    requests = small.slot_requests(*[(length, 8) for length in (3, 9, 14, 5, 11, 7)])
    found = small.answer_in_slots(lm, requests, slots=4)
    assert len(int8_layers(lm.module)) > 4
    for request in requests:
        assert found[request.row].generated.ids == small.greedy_alone(lm, request)


def test_a_model_computes_the_same_with_joined_products(
    small: Any, base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = loaded(small, base_folder)
    monkeypatch.setattr(number_formats, "shared_inputs", lambda base, layers: [[name] for name in layers])
    single = loaded(small, base_folder)
    products = [{id(layer.product) for _, layer in int8_layers(lm.module)} for lm in (joined, single)]
    assert len(products[0]) < len(products[1]) == len(int8_layers(single.module))
    ids = torch.tensor([[5, 6, 7, 8], [9, 4, 3, 2]])
    assert torch.equal(joined.module(ids).logits, single.module(ids).logits)


def test_layers_of_a_model_in_bfloat16_are_in_int8_and_the_others_are_not(
    small: Any, base_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_bfloat16 = {"model_parameters": {"dtype": "bfloat16"}, "trainer": {"type": "none"}}
    plain = small.load(small.config(base_model=str(base_folder), **in_bfloat16), trainable=False)
    with caplog.at_level("INFO"):
        lm = loaded(small, base_folder, model_parameters=in_bfloat16["model_parameters"])
    assert lm.base.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in lm.module.parameters()} == {torch.bfloat16}
    count = len(int8_layers(lm.module))
    assert count > 4
    assert f"quantization: {count} of {count} linear layers in int8" in caplog.text
    ids = torch.tensor([[5, 6, 7, 8]])
    found, expected = lm.module(ids).logits, plain.module(ids).logits
    assert found.dtype == torch.bfloat16
    assert 0 < (found - expected).norm() < 0.06 * expected.norm()
    requests = small.slot_requests(*[(length, 8) for length in (3, 9, 14, 5)])
    answers = small.answer_in_slots(lm, requests, slots=2)
    assert all(len(answers[request.row].generated.ids) == 8 for request in requests)


def test_layers_that_stay_in_bfloat16_are_named_as_such(
    small: Any, base_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(number_formats, "int8_speeds", lambda shapes, dtype: {})
    with caplog.at_level("INFO"):
        lm = loaded(small, base_folder, model_parameters={"dtype": "bfloat16"})
    assert not int8_layers(lm.module)
    assert "in bfloat16: its speed in int8 cannot be recorded on this machine" in caplog.text


def test_slots_are_used_although_last_digits_decide_how_inputs_are_rounded(small: Any, base_folder: Path) -> None:
    support, errors = SlotSupport(narrows_prefill=True, shares_prefix=True), []
    plain = small.load(small.config(base_model=str(base_folder), trainer={"type": "none"}), trainable=False)
    for lm in (plain, loaded(small, base_folder)):
        small.sharpen(lm.module)
        rng = torch.Generator().manual_seed(0)
        for name, layer in lm.module.named_modules():
            if name.endswith("o_proj"):  # the attention of another library, or of a larger model
                layer.register_forward_pre_hook(partial(change_last_digits, rng))
        errors.append(largest_error(lm, support=support))
        assert lm.slot_support == support
        assert rounding_limit(lm) == (TOLERANCE[torch.float32] if lm is plain else INT8_TOLERANCE)
    assert errors[1] > errors[0]


def change_last_digits(rng: torch.Generator, layer: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    # In a larger model, 1e-6 is enough to round a few of many inputs to another integer.
    return inputs[0] * (1 + 3e-5 * torch.randn(inputs[0].shape, generator=rng))


def test_named_modules_and_layers_that_are_not_faster_stay_in_float32(
    small: Any, base_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    all_names = {name for name, _ in int8_layers(loaded(small, base_folder).module)}
    lm = loaded(small, base_folder, quantization={"skip_modules": ["lm_head", "self_attn"]})
    names = {name for name, _ in int8_layers(lm.module)}
    assert names == {name for name in all_names if name != "lm_head" and "self_attn" not in name}
    assert names
    square = next(tuple(layer.weight.shape) for name, layer in int8_layers(lm.module) if "down_proj" in name)
    speeds = {True: Int8Speed(FBGEMM, 0.5), False: Int8Speed(FBGEMM, 1.5)}
    monkeypatch.setattr(
        number_formats, "int8_speeds", lambda shapes, dtype: {shape: speeds[shape == square] for shape in shapes}
    )
    with caplog.at_level("INFO"):
        slower = loaded(small, base_folder)
    assert {name for name, _ in int8_layers(slower.module)} == {name for name in all_names if "down_proj" not in name}
    count = len(all_names) - sum("down_proj" in name for name in all_names)
    assert f"quantization: {count} of {len(all_names)} linear layers in int8" in caplog.text
    assert f"of {square[1]} x {square[0]} in float32: not clearly faster in int8 on this machine" in caplog.text
    assert identity(lm) != identity(slower)


def test_without_int8_products_the_model_stays_in_float32(
    small: Any, base_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(number_formats, "available_libraries", list)
    with caplog.at_level("INFO"):
        lm = loaded(small, base_folder)
    assert not int8_layers(lm.module)
    assert "int8 products are not available on this machine" in caplog.text
    plain = small.load(small.config(base_model=str(base_folder), trainer={"type": "none"}), trainable=False)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(lm.module(ids).logits, plain.module(ids).logits)


def test_the_base_under_an_adapter_is_in_int8_and_the_adapter_is_not(
    small: Any, base_folder: Path, tmp_path: Path
) -> None:
    sections = {"base_model": str(base_folder), "adapter": {"type": "lora", "r": 4}}
    trained = small.load(small.config(**sections))
    small.take_steps(trained, steps=3)
    trained.save(tmp_path / "saved")
    config = small.config(**sections).model_copy(
        update={"quantization": number_formats.DynamicInt8Quantization(type=TYPE)}
    )
    lm = small.load(config, saved=tmp_path / "saved", trainable=False)
    kinds = Counter(type(layer).__name__ for name, layer in lm.module.named_modules() if "lora_" in name)
    assert "Int8Linear" not in kinds
    assert all(name.endswith(("base_layer", "proj", "lm_head")) for name, _ in int8_layers(lm.module))
    ids = torch.tensor([[5, 6, 7, 8]])
    trained.module.eval()
    expected = trained.module(ids).logits
    assert 0 < (lm.module(ids).logits - expected).norm() < 0.05 * expected.norm()


def test_int8_is_refused_in_training_and_in_files(small: Any, base_folder: Path, tmp_path: Path) -> None:
    config = small.config(base_model=str(base_folder)).model_copy(
        update={"quantization": number_formats.DynamicInt8Quantization(type=TYPE)}
    )
    with pytest.raises(ModelError, match=r"^quantization.type: int8 weights are not supported in training; remove"):
        small.load(config)
    message = f"quantization.type: weights in {TYPE} are not saved; remove quantization, or add"
    with pytest.raises(ModelError, match=message):
        loaded(small, base_folder).save(tmp_path / "copy")
