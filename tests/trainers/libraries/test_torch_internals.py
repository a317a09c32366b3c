"""Tests of the private parts of torch that partita uses: they still exist and work the same."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from partita_trainers.libraries import torch_internals
from partita_trainers.libraries.torch_internals import FSDP_MARKS, HOOKS


@contextmanager
def reported_as_change(what: str) -> Iterator[None]:
    """Turn an error into a failure that names the function that does not work with this version of torch."""
    try:
        yield
    except (AttributeError, ImportError, AssertionError, TypeError, KeyError) as error:
        pytest.fail(
            f"torch {torch.__version__} changed what {what} of trainers/partita_trainers/libraries/torch_internals.py "
            f"relies on ({type(error).__name__}: {error}): change that function",
            pytrace=False,
        )


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_missing_attribute_is_reported_with_its_function_and_file() -> None:
    with pytest.raises(pytest.fail.Exception) as failure, reported_as_change("has_hooks"):
        nn.Linear(2, 2)._no_such_hooks  # noqa: B018 - this is what a change of torch looks like
    assert f"torch {torch.__version__} changed what has_hooks of trainers/" in str(failure.value)


def test_hooks_of_a_module_are_detected() -> None:
    with reported_as_change("has_hooks"):
        layer = nn.Linear(2, 2)
        assert all(hasattr(layer, name) for name in HOOKS)
        for register in (layer.register_forward_hook, layer.register_forward_pre_hook):
            assert not torch_internals.has_hooks(layer)
            handle = register(lambda *given: None)
            assert torch_internals.has_hooks(layer)
            handle.remove()


def test_a_failed_capture_of_a_graph_is_left_with_the_function_that_torch_declares() -> None:
    with reported_as_change("leave_failed_capture"):  # builds for CPUs have the declaration only
        declared = Path(torch.__file__).with_name("_C").joinpath("__init__.pyi").read_text(encoding="utf8")
        assert "def _cuda_endAllocateToPool(device: _int, mempool_id: tuple[_int, _int])" in declared


def test_the_allocator_of_gpus_reads_the_environment_once_and_then_takes_other_settings() -> None:
    code = """
import os
from partita_trainers.libraries.torch_internals import allocator_settings, set_allocator_settings
print(allocator_settings())
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
print(allocator_settings())
set_allocator_settings("expandable_segments:True")
print(allocator_settings())
"""
    with reported_as_change("allocator_settings and set_allocator_settings"):
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.stdout.split() == ["max_split_size_mb:64"] * 2 + ["expandable_segments:True"], done.stderr


def test_a_torch_without_allocator_settings_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    assert torch_internals.allocator_settings() is None


@pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines or not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="this build of torch lacks FBGEMM or oneDNN",
)
def test_both_libraries_multiply_integers_exactly() -> None:
    with reported_as_change("the functions for int8 weights"):
        assert torch_internals.has_fbgemm_int8_linear()
        assert torch_internals.has_onednn_int8_linear()
        weight_OI = torch.tensor([[2.0, -4.0, 6.0], [3.0, 0.0, -3.0]])
        scale_O = torch.tensor([2.0, 3.0], dtype=torch.double)
        x_NI = torch.tensor([[1.0, 2.0, 3.0], [-7.0, 5.0, 0.0]])
        expected = x_NI @ weight_OI.t()
        fbgemm = torch_internals.pack_int8_for_fbgemm(weight_OI, scale_O)
        onednn = torch_internals.pack_int8_for_onednn(weight_OI, scale_O)
        assert torch.equal(torch_internals.fbgemm_int8_linear(x_NI, fbgemm), expected)
        assert torch.equal(torch_internals.onednn_int8_linear(x_NI.to(torch.int8), onednn), expected)
        assert torch.equal(torch_internals.onednn_int8_linear((x_NI + 128).to(torch.uint8), onednn), expected)
        assert torch_internals.has_amx() in (False, True)
        assert torch.equal(torch_internals.unpack_int8_from_fbgemm(fbgemm), weight_OI)
        assert torch.equal(torch_internals.unpack_int8_from_onednn(onednn), weight_OI)


@pytest.mark.usefixtures("one_rank")
def test_the_store_of_the_process_group_counts() -> None:
    with reported_as_change("default_store"):
        store = torch_internals.default_store()
        assert [store.add("rows", 2), store.add("rows", 3)] == [2, 5]


def test_onednn_multiplies_with_packed_weights_and_any_number_of_rows() -> None:
    with reported_as_change("pack_for_onednn and version"):
        weight = nn.Parameter(torch.randn(48, 40))
        packed = torch_internals.pack_for_onednn(weight, rows=64)
        assert not packed.requires_grad
        for rows in (1, 5, 64, 300):
            x = torch.randn(rows, 40)
            torch.testing.assert_close(torch_internals.onednn_linear(x, packed, None), x @ weight.detach().t())
        before = torch_internals.version(weight)
        with torch.no_grad():
            weight.mul_(2)
        assert torch_internals.version(weight) > before


def test_onednn_multiplies_with_plain_weights() -> None:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("this build of torch has no oneDNN")
    with reported_as_change("onednn_linear"):
        assert torch_internals.has_onednn_linear()
        layer, x = nn.Linear(32, 48), torch.randn(8, 32)
        with torch.no_grad():
            torch.testing.assert_close(torch_internals.onednn_linear(x, layer.weight, layer.bias), layer(x))


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_module_can_be_unsharded_and_sharded_again() -> None:
    with reported_as_change("remove_fsdp_hooks, add_fsdp_hooks, fsdp_marks or forget_fsdp_state"):
        module = nn.Sequential(nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (1,))
        before = set(vars(module))
        for _ in range(2):
            sharded = fully_shard(module, mesh=mesh)
            assert isinstance(sharded, FSDPModule)
            marks = torch_internals.fsdp_marks(module)
            assert all(set(values) == set(FSDP_MARKS) for values in marks.values())
            assert torch_internals.has_hooks(module)
            torch_internals.remove_fsdp_hooks(module)
            assert not torch_internals.has_hooks(module)
            torch_internals.add_fsdp_hooks(module)
            assert module(torch.ones(2, 4)).shape == (2, 4)
            torch_internals.remove_fsdp_hooks(module)
            sharded.reshard()
            torch_internals.forget_fsdp_state(module)
            module.__class__ = nn.Sequential
            for name in set(vars(module)) - before:
                del vars(module)[name]
            module[0] = nn.Linear(4, 4)
