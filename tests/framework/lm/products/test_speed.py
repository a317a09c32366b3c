"""Tests of the choice of an implementation of products: by a measurement, once per machine and cached."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from partita.lm.products.fast_linear import LEAST, MOST_COPIED, FastLinear, PackedLinear, choose_products
from partita.lm.products.measurement_cache import save_first
from partita.lm.products.product import Implementation, Product
from partita.lm.products.speed import (
    DECODING,
    TRAINING,
    WORTH,
    Measurement,
    faster_for_training,
    fastest_for_decoding,
    largest_shapes,
)
from partita_schema.common.checksums import sealed, unsealed
from partita_trainers.libraries import torch_internals


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        pytest.skip("this build of torch has no MKL or no oneDNN")
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))


def layers(*shapes: tuple[int, int]) -> list[nn.Linear]:
    return [nn.Linear(inputs, outputs, bias=False) for outputs, inputs in shapes]


def fastest(*shapes: tuple[int, int], may_copy: bool = True) -> Implementation:
    allowed = [one for one in Implementation if may_copy or not one.copies_weights]
    return fastest_for_decoding(layers(*shapes), allowed)


def recorded(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "matrix_products").iterdir())


def keep(path: Path, **seconds: float) -> None:
    """Replace the cached measurement of outputs in a file; all shapes get the same seconds."""
    key = unsealed(path.read_bytes())["key"]
    seconds = {"packed": seconds["onednn"], Implementation.BY_COLUMN: seconds["torch"]} | seconds
    content = [{Product.OUTPUT: seconds} for _ in key["shapes"]]
    path.write_text(json.dumps(sealed({"key": key, "seconds": content})))


def test_a_measurement_is_cached_with_all_that_it_depends_on(tmp_path: Path) -> None:
    fastest((256, 128), (128, 256), (128, 256))
    [path] = recorded(tmp_path)
    document = unsealed(path.read_bytes(), required=True)
    assert [list(shape) for shape in document["seconds"]] == [[Product.OUTPUT]] * 2
    for shape in document["seconds"]:
        assert set(shape[Product.OUTPUT]) == set(Implementation)
        assert all(seconds > 0 for seconds in shape[Product.OUTPUT].values())
    assert document["key"]["shapes"] == [[128, 256], [256, 128]]
    assert document["key"]["threads"] == torch.get_num_threads()
    assert document["key"]["torch"] == torch.__version__


@pytest.mark.parametrize(("seconds", "faster"), [(0.5, True), (0.95, False), (2.0, False)])
def test_a_cached_measurement_decides_for_all_later_models(tmp_path: Path, seconds: float, faster: bool) -> None:
    fastest((128, 128), (128, 128))
    [path] = recorded(tmp_path)
    keep(path, torch=1.0, onednn=seconds)
    before = path.read_bytes()
    for _ in range(2):
        module = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
        assert choose_products(module, trainable=False, free_bytes=0).decoding == faster
        assert {type(part) for part in module} == {FastLinear if faster else nn.Linear}
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("seconds", "chosen", "chosen_plain"),
    [
        ({"torch": 2.0, "onednn": 1.5, "packed": 1.0}, Implementation.PACKED, Implementation.ONEDNN),
        ({"torch": 2.0, "onednn": 1.0, "packed": 1.1}, Implementation.ONEDNN, Implementation.ONEDNN),
        ({"torch": 1.5, "onednn": 1.4, "packed": 1.0}, Implementation.PACKED, Implementation.TORCH),
        ({"torch": 1.05, "onednn": 1.1, "packed": 1.0}, Implementation.TORCH, Implementation.TORCH),
        ({"torch": 2.0, "onednn": 1.5, "by column": 1.0}, Implementation.BY_COLUMN, Implementation.ONEDNN),
        ({"torch": 1.2, "onednn": 1.2, "by column": 1.0}, Implementation.BY_COLUMN, Implementation.TORCH),
    ],
)
def test_weights_are_copied_where_that_is_fastest_and_allowed(
    tmp_path: Path, seconds: dict[str, float], chosen: Implementation, chosen_plain: Implementation
) -> None:
    fastest((128, 128))
    [path] = recorded(tmp_path)
    keep(path, **seconds)
    assert fastest((128, 128)) is chosen
    assert fastest((128, 128), may_copy=False) is chosen_plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("trainable", "missing"), [(False, 0), (False, 1), (True, 0)])
def test_only_a_model_that_is_not_trained_copies_weights_and_only_in_a_small_part_of_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, trainable: bool, missing: int
) -> None:
    monkeypatch.setattr("partita.lm.products.fast_linear.onednn_has_bfloat16", lambda: True)
    model = nn.Sequential(nn.Linear(128, 128).to(dtype), nn.Linear(128, 128).to(dtype))
    monkeypatch.setattr(
        "partita.lm.products.speed.measure",
        lambda layers, measurement: [
            {
                product: {"torch": 2.0, "onednn": 1.9, "packed": 1.0, "by column": 2.0}
                for product in measurement.products
            }
        ],
    )
    needed = round(2 * model[0].weight.nbytes / MOST_COPIED)
    use = choose_products(model, trainable=trainable, free_bytes=needed - missing)
    packs = not trainable and not missing
    assert use.decoding == (packs and dtype == torch.float32)
    kinds = {torch.float32: FastLinear, torch.bfloat16: PackedLinear}
    assert [type(layer) for layer in model] == [kinds[dtype] if packs else nn.Linear] * 2
    if packs and dtype == torch.float32:
        assert [layer.implementation for layer in model] == [Implementation.PACKED] * 2


def test_few_rows_are_measured_in_bfloat16_because_single_rows_use_packed_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = {}

    def measure(layers: list[nn.Linear], measurement: Measurement) -> list[dict[Product, dict[str, float]]]:
        rows[layers[0].weight.dtype] = measurement.rows
        return [{Product.OUTPUT: dict.fromkeys(Implementation, 1.0)}]

    monkeypatch.setattr("partita.lm.products.speed.measure", measure)
    fastest((128, 128))
    fastest_for_decoding([layer.bfloat16() for layer in layers((128, 128))], [Implementation.PACKED])
    assert rows == {torch.float32: 256, torch.bfloat16: 64}


@pytest.mark.skipif(not torch_internals.onednn_has_bfloat16(), reason="oneDNN has no bfloat16 on this processor")
def test_the_dtype_of_the_weights_is_part_of_the_measurement(tmp_path: Path) -> None:
    fastest((128, 128))
    fastest_for_decoding([layer.bfloat16() for layer in layers((128, 128))], [Implementation.PACKED])
    dtypes = {unsealed(path.read_bytes())["key"]["dtype"] for path in recorded(tmp_path)}
    assert dtypes == {"torch.float32", "torch.bfloat16"}


def test_the_number_of_measured_layers_is_part_of_the_measurement(tmp_path: Path) -> None:
    for count in (1, 2, DECODING.layers, DECODING.layers + 1):
        fastest(*[(128, 128)] * count)
    assert len(recorded(tmp_path)) == 3


@pytest.mark.parametrize("missing", [*Implementation, Product.OUTPUT])
def test_a_measurement_with_a_missing_number_is_repeated(
    tmp_path: Path, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    fastest((128, 128))
    [path] = recorded(tmp_path)
    document = unsealed(path.read_bytes())
    [by_product] = document["seconds"]
    (by_product if missing in by_product else by_product[Product.OUTPUT]).pop(missing)
    path.write_text(json.dumps(sealed({key: document[key] for key in ("key", "seconds")})))
    with caplog.at_level("INFO"):
        fastest((128, 128))
    assert "is repeated" in caplog.text
    assert set(unsealed(path.read_bytes())["seconds"][0][Product.OUTPUT]) == set(Implementation)


def test_row_counts_of_small_models_only_are_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = 128 * 128
    assert weights >= LEAST.weights
    fastest((128, 128), (128, 128))
    keep(recorded(tmp_path)[0], torch=2.0, onednn=1.0)
    for least, few in ((2 * weights + 1, True), (2 * weights, False)):
        monkeypatch.setattr("partita.lm.products.fast_linear.LARGE_MODEL_WEIGHTS", least)
        module = nn.Sequential(*layers((128, 128), (128, 128)))
        assert choose_products(module, trainable=False, free_bytes=0).few_kernels == few


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("supported", [True, False])
def test_row_counts_in_bfloat16_are_rounded_if_torch_calls_onednn(
    monkeypatch: pytest.MonkeyPatch, trainable: bool, supported: bool
) -> None:
    monkeypatch.setattr("partita.lm.products.fast_linear.onednn_has_bfloat16", lambda: supported)
    module = nn.Sequential(*layers((128, 128), (128, 128))).bfloat16()
    assert choose_products(module, trainable=trainable, free_bytes=0) == (False, supported)


def test_row_counts_are_not_rounded_for_weights_by_column(tmp_path: Path) -> None:
    fastest((128, 128), (128, 128))
    [path] = recorded(tmp_path)
    keep(path, **{"torch": 2.0, "onednn": 2.0, "by column": 1.0})
    module = nn.Sequential(*layers((128, 128), (128, 128)))
    assert choose_products(module, trainable=False, free_bytes=10**9) == (True, False)
    assert [layer.implementation for layer in module] == [Implementation.BY_COLUMN] * 2


def test_the_first_of_several_measuring_processes_decides_for_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "one.json"
    for number in range(3):
        save_first(path, {"seconds": number}, fallback="nothing is recorded")
    assert unsealed(path.read_bytes())["seconds"] == 0
    assert list(path.parent.iterdir()) == [path]


def test_other_shapes_and_thread_counts_are_measured_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest((128, 128))
    fastest((128, 256))
    assert len(recorded(tmp_path)) == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    fastest((128, 128))
    assert len(recorded(tmp_path)) == 3


@pytest.mark.parametrize("content", [b"", b"{}", b'{"key": 1, "checksum": "0"}', b"\xff"])
def test_a_damaged_measurement_is_repeated(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    fastest((128, 128))
    [path] = recorded(tmp_path)
    path.write_bytes(content)
    with caplog.at_level("INFO"):
        fastest((128, 128))
    assert "is damaged and is repeated" in caplog.text
    assert unsealed(recorded(tmp_path)[0].read_bytes(), required=True)["seconds"]


def test_torch_is_used_if_nothing_can_be_cached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    with caplog.at_level("INFO"):
        assert fastest((128, 128)) is Implementation.TORCH
    assert "matrix products stay with torch" in caplog.text


def test_only_a_clear_gain_selects_onednn_and_the_log_has_the_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fastest((128, 128))
    [path] = recorded(tmp_path)
    keep(path, torch=WORTH, onednn=1.0)
    with caplog.at_level("DEBUG"):
        assert fastest((128, 128)) is Implementation.TORCH
        keep(path, torch=2 * WORTH, onednn=1.0)
        assert fastest((128, 128)) is not Implementation.TORCH
    assert str(path) in caplog.text


def test_a_model_without_suitable_layers_is_not_measured(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(256, 256).bfloat16())
    assert not choose_products(module, trainable=True, free_bytes=10**9).decoding
    assert not (tmp_path / "cache").exists()


def test_the_shapes_with_the_most_weights_are_measured() -> None:
    shapes: list[Any] = [(64, 256)] * 5 + [(512, 64), (128, 128), (32, 16)]
    assert largest_shapes(layers(*shapes), DECODING.shapes) == [(64, 256), (512, 64), (128, 128)]


def test_training_is_measured_separately_and_decided_by_shape_and_product(tmp_path: Path) -> None:
    both = layers((256, 128), (128, 256))
    faster_for_training(both)
    [path] = recorded(tmp_path)
    document = unsealed(path.read_bytes(), required=True)
    assert document["key"]["rows"] == TRAINING.rows
    assert [set(shape) for shape in document["seconds"]] == [set(Product)] * 2
    fast, slow = {"torch": 2.0, "onednn": 1.0}, {"torch": 1.0, "onednn": 1.0}
    document["seconds"] = [
        {Product.OUTPUT: fast, Product.INPUT_GRADIENT: slow, Product.WEIGHT_GRADIENT: fast},
        {Product.OUTPUT: slow, Product.INPUT_GRADIENT: slow, Product.WEIGHT_GRADIENT: slow},
    ]
    path.write_text(json.dumps(sealed({key: document[key] for key in ("key", "seconds")})))
    wanted = {(128, 256): {Product.OUTPUT, Product.WEIGHT_GRADIENT}, (256, 128): set()}
    assert faster_for_training(both) == wanted
    assert document["key"]["shapes"] == [[128, 256], [256, 128]]

    choose_products(module := nn.Sequential(*both), trainable=True, free_bytes=10**9)
    assert [getattr(layer, "training_products", None) for layer in module] == [set(), wanted[128, 256]]
    assert {type(layer) for layer in module} == {FastLinear}
