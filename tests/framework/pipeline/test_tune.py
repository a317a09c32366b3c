"""Tests of what happens on all ranks before the sizes of a run are found."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from partita.distributed.process_group import BUCKET_BYTES
from partita.pipeline.tune import run_sizes, warm_up_all_reduce
from partita_trainers.process_group import SingleProcess


class SumError(Exception):
    """Raised instead of a sum over the ranks."""


class RefusingGroup(SingleProcess):
    """A process group that cannot sum."""

    def all_reduce_sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        raise SumError([(tensor.device.type, tensor.nbytes) for tensor in tensors])


def test_ranks_on_a_gpu_sum_a_tensor_before_sizes_are_found_as_nccl_allocates_its_buffers_then() -> None:
    trainer = SimpleNamespace(batch_size="auto", eval_batch_size=None)
    # A tensor without memory: its device is not the CPU.
    pipeline: Any = SimpleNamespace(
        config=SimpleNamespace(trainer=trainer), lm=SimpleNamespace(device=torch.device("meta"))
    )
    tuner: Any = SimpleNamespace(process_group=RefusingGroup())
    shape: Any = object()
    nothing: Any = object()
    with pytest.raises(SumError) as summed:
        run_sizes(nothing, pipeline, tuner, shape=shape, eval_datasets={}, recorded={})
    assert summed.value.args == ([("meta", BUCKET_BYTES)],)


def test_ranks_on_a_cpu_sum_nothing_before_sizes_are_found() -> None:
    warm_up_all_reduce(RefusingGroup(), device=torch.device("cpu"))
