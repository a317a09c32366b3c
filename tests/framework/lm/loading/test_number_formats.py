"""Tests of the choice of number formats: by a measurement, once per machine and cached."""

import json
from pathlib import Path

import pytest
import torch

from partita.lm.loading import number_formats
from partita.lm.loading.chosen_formats import chosen_formats
from partita.lm.loading.number_formats import (
    INT8_DTYPES,
    NO_KERNEL,
    WORTH_ROUNDING,
    Int8Speed,
    dtype_name,
    faster_dtype,
    fastest_library,
    format_seconds,
    int8_speeds,
    mean_speedup,
)
from partita.lm.products.int8_linear import FBGEMM, ONEDNN, available_libraries
from partita_schema.common.checksums import sealed, unsealed
from partita_schema.config import Config

needs_both = pytest.mark.skipif(
    not (FBGEMM.is_available() and ONEDNN.is_available()), reason="this build of torch lacks FBGEMM or oneDNN"
)

CPU = torch.device("cpu")
FILE = {
    "base_model": "m",
    "input_features": [{"name": "a"}],
    "output_features": [{"name": "b", "type": "text"}],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CACHE", str(tmp_path / "cache"))


def recorded(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "number_formats").iterdir())


def keep(path: Path, seconds: object) -> None:
    """Replace the seconds of a cached measurement."""
    path.write_text(json.dumps(sealed({"key": unsealed(path.read_bytes())["key"], "seconds": seconds})))


@pytest.mark.parametrize(("bfloat16", "dtype"), [(0.5, torch.bfloat16), (1 / WORTH_ROUNDING + 0.01, torch.float32)])
def test_a_recorded_measurement_decides_for_the_dtype(
    tmp_path: Path, bfloat16: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    faster_dtype(CPU)
    [path] = recorded(tmp_path)
    assert set(unsealed(path.read_bytes(), required=True)["seconds"]) == {"float32", "bfloat16"}
    keep(path, {"float32": 1.0, "bfloat16": bfloat16})
    with caplog.at_level("INFO"):
        assert faster_dtype(CPU).dtype == dtype
    name = str(dtype).removeprefix("torch.")
    assert (
        f"dtype: {name}: matrix products are {1 / bfloat16:.2f} times as fast in bfloat16 as in float32" in caplog.text
    )
    config = Config.model_validate(FILE | {"model_parameters": {"dtype": "fastest", "device": "cpu"}})
    assert chosen_formats(config)["model_parameters.dtype"].startswith(f"{name}: matrix products are")


def test_float32_is_used_if_nothing_can_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    with caplog.at_level("INFO"):
        assert faster_dtype(CPU) == (torch.float32, None)
        assert int8_speeds([(64, 64)], torch.float32) == {}
    assert "dtype: fastest means float32, because the measurement cannot be recorded" in caplog.text
    if available_libraries():
        assert "linear layers stay in float32, because the measurement cannot be recorded" in caplog.text


@needs_both
@pytest.mark.parametrize("dtype", INT8_DTYPES, ids=dtype_name)
def test_shapes_are_measured_once_in_the_dtype_of_the_model_and_in_int8(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [(64, 32), (32, 64)]
    assert set(int8_speeds(shapes, dtype)) == set(shapes)
    [path] = recorded(tmp_path)
    few, many = (
        {dtype_name(dtype): plain, "FBGEMM": 2.0, "oneDNN": other} for plain, other in [(3.0, 3.0), (6.0, 1.0)]
    )
    keep(path, [[few, few], [few, many]])
    assert int8_speeds(shapes, dtype) == {
        (64, 32): Int8Speed(FBGEMM, 1.5),
        (32, 64): Int8Speed(ONEDNN, pytest.approx((1 * 6) ** 0.5)),
    }
    path.write_bytes(b"{}")
    assert set(int8_speeds(shapes, dtype)) == set(shapes)


@needs_both
def test_speeds_of_a_model_in_another_dtype_are_measured_separately(tmp_path: Path) -> None:
    for dtype in INT8_DTYPES:
        int8_speeds([(64, 32)], dtype)
    assert len(recorded(tmp_path)) == 2


@pytest.mark.parametrize(("speedups", "expected"), [((0.8, 3.2), 1.6), ((0.79, 3.2), 0.79), ((3.0, 0.5), 0.5)])
def test_a_format_that_is_slow_for_few_rows_or_for_many_is_not_fast_on_average(
    speedups: tuple[float, float], expected: float
) -> None:
    assert mean_speedup(speedups) == pytest.approx(expected)


@needs_both
def test_a_library_without_a_kernel_for_a_shape_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = format_seconds((64, 32), torch.float32, [FBGEMM, ONEDNN], rows=8)
    assert list(seconds) == ["float32", "FBGEMM", "oneDNN"]
    assert all(0 < one < 5 for one in seconds.values())

    def refuse(x_NI: torch.Tensor, packed: object) -> torch.Tensor:
        raise RuntimeError("no primitive")

    monkeypatch.setattr(ONEDNN, "multiply", refuse)
    with caplog.at_level("DEBUG"):
        seconds = format_seconds((64, 32), torch.float32, [FBGEMM, ONEDNN], rows=8)
    assert seconds["oneDNN"] == NO_KERNEL
    assert fastest_library([FBGEMM, ONEDNN], [seconds, seconds], torch.float32).library is FBGEMM
    assert "no int8 product of 8 rows with (64, 32) by oneDNN: no primitive" in caplog.text


def test_a_machine_without_int8_products_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number_formats, "available_libraries", list)
    assert int8_speeds([(64, 32)], torch.float32) == {}
    assert not (tmp_path / "cache").exists()


def test_explain_says_that_int8_is_measured_when_the_model_is_loaded() -> None:
    config = Config.model_validate(FILE | {"quantization": {"type": "int8_dynamic_activation_int8_weight"}})
    assert chosen_formats(config) == {
        "quantization.type": "measured when the model is loaded; layers that are not faster in int8 keep the "
        "dtype of the model"
    }
    assert chosen_formats(Config.model_validate(FILE)) == {}
