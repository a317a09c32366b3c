"""Tests of the fake allocator: segments are reserved, kept and released as by torch's allocator for CUDA."""

import pytest
import torch

from .fake_cuda import MIB, FakeCuda, Tensor

GB = 10**9


@pytest.fixture(params=[False, True], ids=["segments", "expandable segments"])
def cuda(request: pytest.FixtureRequest) -> FakeCuda:
    """Return a fake device of 40 GB."""
    return FakeCuda(40 * GB, expandable=request.param)


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [(1, 512, 2 * MIB), (MIB, MIB, 2 * MIB), (3 * MIB, 3 * MIB, 20 * MIB), (11 * MIB, 12 * MIB, 12 * MIB)],
)
def test_a_tensor_reserves_a_segment_of_the_size_that_torch_takes(size: int, allocated: int, reserved: int) -> None:
    cuda = FakeCuda(GB, expandable=False)
    tensor = Tensor(cuda, size)
    assert (cuda.allocated, cuda.reserved) == (allocated, reserved)
    del tensor
    assert (cuda.allocated, cuda.reserved) == (0, reserved)
    cuda.empty_cache()
    assert cuda.reserved == 0


def test_a_small_rest_keeps_a_whole_segment_unless_segments_are_expandable(cuda: FakeCuda) -> None:
    whole = Tensor(cuda, GB)
    del whole
    rest = Tensor(cuda, 2 * MIB)
    cuda.empty_cache()
    assert cuda.reserved == (20 * MIB if cuda.expandable else pytest.approx(GB, rel=0.01))
    del rest


def test_unused_segments_are_released_before_memory_is_full(cuda: FakeCuda) -> None:
    unused = [Tensor(cuda, size * GB) for size in (10, 15)]
    del unused
    assert cuda.reserved > 24 * GB
    large = Tensor(cuda, 39 * GB)
    assert cuda.reserved < 39.1 * GB
    with pytest.raises(torch.OutOfMemoryError):
        Tensor(cuda, GB)
    del large
