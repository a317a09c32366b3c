"""Tests of the choice between oneDNN and torch: by a measurement, once per machine and cached."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from partita.lm.measurement_cache import save_first
from partita.lm.onednn_linear import OneDnnLinear, use_onednn
from partita.lm.product_speed import (
    DECODING,
    TRAINING,
    WORTH,
    Product,
    faster_for_decoding,
    faster_for_training,
    largest,
)
from partita_schema.common.checksums import sealed, unsealed


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        pytest.skip("this build of torch has no MKL or no oneDNN")
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))


def layers(*shapes: tuple[int, int]) -> list[nn.Linear]:
    return [nn.Linear(inputs, outputs, bias=False) for outputs, inputs in shapes]


def recorded(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "matrix_products").iterdir())


def keep(path: Path, **seconds: float) -> None:
    """Replace the cached measurement of outputs in a file; all shapes get the same seconds."""
    key = unsealed(path.read_bytes())["key"]
    content = [{Product.OUTPUT: seconds} for _ in key["shapes"]]
    path.write_text(json.dumps(sealed({"key": key, "seconds": content})))


def test_a_measurement_is_cached_with_all_that_it_depends_on(tmp_path: Path) -> None:
    faster_for_decoding(layers((256, 128), (128, 256), (128, 256)))
    [path] = recorded(tmp_path)
    document = unsealed(path.read_bytes(), required=True)
    assert [list(shape) for shape in document["seconds"]] == [[Product.OUTPUT]] * 2
    for shape in document["seconds"]:
        assert set(shape[Product.OUTPUT]) == {"torch", "onednn"}
        assert all(seconds > 0 for seconds in shape[Product.OUTPUT].values())
    assert document["key"]["shapes"] == [[128, 256], [256, 128]]
    assert document["key"]["threads"] == torch.get_num_threads()
    assert document["key"]["torch"] == torch.__version__


@pytest.mark.parametrize(("seconds", "faster"), [(0.5, True), (0.95, False), (2.0, False)])
def test_a_cached_measurement_decides_for_all_later_models(tmp_path: Path, seconds: float, faster: bool) -> None:
    faster_for_decoding(layers((128, 128)))
    [path] = recorded(tmp_path)
    keep(path, torch=1.0, onednn=seconds)
    before = path.read_bytes()
    for _ in range(2):
        module = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
        assert use_onednn(module, trainable=False) == faster
        assert {type(part) for part in module} == {OneDnnLinear if faster else nn.Linear}
    assert path.read_bytes() == before


def test_the_first_of_several_measuring_processes_decides_for_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "one.json"
    for number in range(3):
        save_first(path, {"seconds": number}, fallback="nothing is recorded")
    assert unsealed(path.read_bytes())["seconds"] == 0
    assert list(path.parent.iterdir()) == [path]


def test_other_shapes_and_thread_counts_are_measured_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster_for_decoding(layers((128, 128)))
    faster_for_decoding(layers((128, 256)))
    assert len(recorded(tmp_path)) == 2
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    faster_for_decoding(layers((128, 128)))
    assert len(recorded(tmp_path)) == 3


@pytest.mark.parametrize("content", [b"", b"{}", b'{"key": 1, "checksum": "0"}', b"\xff"])
def test_a_damaged_measurement_is_repeated(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    faster_for_decoding(layers((128, 128)))
    [path] = recorded(tmp_path)
    path.write_bytes(content)
    with caplog.at_level("INFO"):
        faster_for_decoding(layers((128, 128)))
    assert "is damaged and is repeated" in caplog.text
    assert unsealed(recorded(tmp_path)[0].read_bytes(), required=True)["seconds"]


def test_torch_is_used_if_nothing_can_be_cached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    with caplog.at_level("INFO"):
        assert not faster_for_decoding(layers((128, 128)))
    assert "matrix products stay with torch" in caplog.text


def test_only_a_clear_gain_selects_onednn_and_the_log_has_the_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faster_for_decoding(layers((128, 128)))
    [path] = recorded(tmp_path)
    keep(path, torch=WORTH, onednn=1.0)
    with caplog.at_level("DEBUG"):
        assert not faster_for_decoding(layers((128, 128)))
        keep(path, torch=2 * WORTH, onednn=1.0)
        assert faster_for_decoding(layers((128, 128)))
    assert str(path) in caplog.text


def test_a_model_without_suitable_layers_is_not_measured(tmp_path: Path) -> None:
    assert not use_onednn(nn.Sequential(nn.Linear(16, 16), nn.Linear(256, 256).bfloat16()), trainable=True)
    assert not (tmp_path / "cache").exists()


def test_the_shapes_with_the_most_weights_are_measured() -> None:
    shapes: list[Any] = [(64, 256)] * 5 + [(512, 64), (128, 128), (32, 16)]
    assert [tuple(layer.weight.shape) for layer in largest(layers(*shapes), DECODING.shapes)] == [
        (64, 256),
        (512, 64),
        (128, 128),
    ]


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

    use_onednn(module := nn.Sequential(*both), trainable=True)
    assert [getattr(layer, "training_products", None) for layer in module] == [set(), wanted[128, 256]]
    assert {type(layer) for layer in module} == {OneDnnLinear}
