"""Tests of out-of-memory errors, of memory freed after failed calls, and of the budget of a device."""

import json
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from partita_trainers.batch_size import linux
from partita_trainers.batch_size.device_errors import attempt, is_broken_device, is_out_of_memory, is_too_large
from partita_trainers.batch_size.device_memory import device_memory
from partita_trainers.batch_size.host_memory import HostMemory

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured through Linux's procfs")
GB = 10**9


def numpy_failure() -> MemoryError:
    with pytest.raises(MemoryError) as caught:
        np.empty(1 << 50, dtype=np.int64)
    return caught.value


def torch_failure() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    return caught.value


FULL: list[BaseException] = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"),
    MemoryError(),
    MemoryError("Unable to allocate 8.00 PiB for an array with shape (1125899906842624,) and data type int64"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1125899906842624 bytes."),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.98 GB, other allocations: 124.39 MB, max: 18.13 GB)"),
    RuntimeError("XPU out of memory. Tried to allocate 20.00 GiB (GPU 0; 15.93 GiB total capacity)"),
    RuntimeError("Native API failed. Native API returns: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
    RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    RuntimeError("HIP out of memory. Tried to allocate 256.00 MiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
    torch.distributed.DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    ),
    RuntimeError('handles_.at(i) INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":396'),
    RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1016'),
    RuntimeError("CUDA driver error: out of memory"),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("could not create a primitive"),
]

SOMETHING_ELSE: list[BaseException] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x5 and 6x7)"),
    RuntimeError("The size of tensor a (5) must match the size of tensor b (6) at non-singleton dimension 1"),
    RuntimeError("expected scalar type Float but found Half"),
    RuntimeError("Expected A to be torch.int8, got torch.int32"),
    RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1269, unhandled system error"),
    RuntimeError("probability tensor contains either `inf`, `nan` or element < 0"),
    RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn"),
    RuntimeError("Trying to backward through the graph a second time"),
    RuntimeError("DataLoader worker (pid 42) is killed by signal: Killed."),
    IndexError("index out of range in self"),
    KeyError("out of memory"),
    ValueError("the answer was: out of memory"),
    OSError(28, "No space left on device"),
    FileNotFoundError(2, "No such file or directory"),
    TimeoutError("not enough memory of what happened"),
    AssertionError("can't allocate memory"),
    pickle.PicklingError("Can't pickle local object"),
    TypeError("forward() got an unexpected keyword argument 'oom'"),
]


@pytest.mark.parametrize("error", FULL, ids=str)
def test_out_of_memory_errors_are_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)
    assert not is_too_large(error)
    assert not is_broken_device(error)


@pytest.mark.parametrize("fail", [numpy_failure, torch_failure])
def test_out_of_memory_errors_of_libraries_are_recognised(fail: Callable[[], BaseException]) -> None:
    assert is_out_of_memory(fail())


@pytest.mark.parametrize("error", SOMETHING_ELSE, ids=str)
def test_other_errors_are_not_out_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)
    assert not is_too_large(error)


def test_at_least_twenty_other_errors_are_tested() -> None:
    assert len(SOMETHING_ELSE) >= 20


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: invalid configuration argument",
        "canUse32BitIndexMath(input) INTERNAL ASSERT FAILED",
        "integer out of range",
        "nonzero is not supported for tensors with more than INT_MAX elements",
        "Expected tensor.numel() < 2^31 to be true",
        "parameter tensor is too large to be indexed with int32",
        "value cannot be converted to type int32_t without overflow",
        "input tensor must fit into 32-bit index math",
        "Invalid buffer size: 20.00 GiB",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ],
)
def test_errors_that_fewer_rows_may_avoid_are_too_large_and_not_out_of_memory(message: str) -> None:
    assert is_too_large(RuntimeError(message))
    assert not is_out_of_memory(RuntimeError(message))


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "CUDA error: misaligned address",
        "CUDA error: unspecified launch failure",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: the launch timed out and was terminated",
        "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    ],
)
def test_a_device_that_no_longer_responds_is_never_tried_again(message: str) -> None:
    assert is_broken_device(RuntimeError(message))
    assert is_broken_device(torch.AcceleratorError(message))
    with pytest.raises(RuntimeError, match=re.escape(message)):
        attempt(lambda: fail(RuntimeError(message)))


def test_an_unknown_error_of_the_device_counts_as_broken() -> None:
    assert is_broken_device(torch.AcceleratorError("CUDA error: something new"))
    assert not is_broken_device(RuntimeError("something new"))
    assert not is_broken_device(torch.AcceleratorError("CUDA error: invalid configuration argument"))


def fail(error: BaseException) -> None:
    raise error


def test_a_call_that_fits_returns_its_result() -> None:
    assert attempt(lambda: 7) == (7, None)


def test_memory_of_a_failed_call_is_free_when_it_is_reported() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def forward() -> None:
        hidden = torch.zeros(1000)
        held.append(weakref.ref(hidden))
        try:
            raise ValueError("first")
        except ValueError:
            fail(torch.OutOfMemoryError("CUDA out of memory"))

    result, failure = attempt(forward)
    assert result is None
    assert isinstance(failure, torch.OutOfMemoryError)
    assert failure.__traceback__ is None
    assert held[0]() is None, "the tensor of the failed pass still exists"


def test_memory_in_reference_cycles_is_freed_too() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def forward() -> None:
        cycle: list[Any] = [torch.zeros(10)]
        cycle.append(cycle)
        held.append(weakref.ref(cycle[0]))
        fail(MemoryError())

    attempt(forward)
    assert held[0]() is None


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(KeyError) as caught:
        attempt(lambda: {}["x"])
    assert caught.traceback[-1].name == "<lambda>"


# A machine


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return a folder with a fake /proc and /sys/fs/cgroup."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "cgroup").mkdir()
    return tmp_path


def write_group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n", encoding="ascii")


def limits(machine: Path) -> tuple[int | None, int | None]:
    places = {"proc": machine / "proc", "root": machine / "cgroup"}
    return linux.cgroup_free_bytes(**places), linux.cgroup_total(**places)


def test_the_tightest_group_of_version_2_counts_without_cached_files(machine: Path) -> None:
    (machine / "proc" / "cgroup").write_text("0::/slice/job\n", encoding="ascii")
    write_group(
        machine / "cgroup" / "slice" / "job",
        memory__max=8 * GB,
        memory__current=3 * GB,
        memory__stat=f"anon 5\ninactive_file {GB}",
    )
    write_group(
        machine / "cgroup" / "slice", memory__max=9 * GB, memory__current=8 * GB, memory__stat="inactive_file 0"
    )
    assert limits(machine) == (GB, 8 * GB)


def test_in_a_container_the_root_of_version_2_is_the_group(machine: Path) -> None:
    (machine / "proc" / "cgroup").write_text("0::/\n", encoding="ascii")
    write_group(machine / "cgroup", memory__max=4 * GB, memory__current=GB, memory__stat="inactive_file 0")
    assert limits(machine) == (3 * GB, 4 * GB)


def test_a_path_of_the_host_missing_in_the_container_means_the_root(machine: Path) -> None:
    (machine / "proc" / "cgroup").write_text("0::/docker/0123\n", encoding="ascii")
    write_group(machine / "cgroup", memory__max=4 * GB, memory__current=GB, memory__stat="inactive_file 0")
    assert limits(machine) == (3 * GB, 4 * GB)


def test_version_1_of_control_groups_is_read(machine: Path) -> None:
    (machine / "proc" / "cgroup").write_text("5:cpu:/\n4:memory:/job\n0::/\n", encoding="ascii")
    write_group(
        machine / "cgroup" / "memory" / "job",
        memory__limit_in_bytes=6 * GB,
        memory__usage_in_bytes=5 * GB,
        memory__stat=f"cache 1\ntotal_inactive_file {2 * GB}",
    )
    write_group(
        machine / "cgroup" / "memory",
        memory__limit_in_bytes=9223372036854771712,
        memory__usage_in_bytes=5 * GB,
        memory__stat="total_inactive_file 0",
    )
    assert limits(machine) == (3 * GB, 6 * GB)


@pytest.mark.parametrize("limit", ["max", 9223372036854771712])
def test_no_limit_is_none(machine: Path, limit: object) -> None:
    (machine / "proc" / "cgroup").write_text("0::/\n", encoding="ascii")
    write_group(machine / "cgroup", memory__max=limit, memory__current=GB, memory__stat="inactive_file 0")
    assert limits(machine) == (None, None)


def test_without_procfs_there_are_no_limits(tmp_path: Path) -> None:
    assert limits(tmp_path) == (None, None)
    assert linux.status("VmRSS", proc=tmp_path) is None
    assert linux.available_memory(proc=tmp_path) is None
    assert not linux.reset_peak(proc=tmp_path / "absent")


def host(
    monkeypatch: pytest.MonkeyPatch, allowed: str | int | float | None, *, free: int, held: int, processes: int = 1
) -> HostMemory:
    monkeypatch.setattr(linux, "cgroup_total", lambda: None)
    monkeypatch.setattr(linux, "meminfo", lambda field: 100 * GB)
    made = device_memory(torch.device("cpu"), memory_budget=allowed, processes=processes)
    assert isinstance(made, HostMemory)
    monkeypatch.setattr(made, "free_bytes", lambda: {"available": free, "of the control group": 2 * free})
    monkeypatch.setattr(made, "held", lambda: held)
    return made


def test_the_budget_is_four_fifths_of_the_tightest_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made = host(monkeypatch, None, free=10 * GB, held=GB)
    assert made.budget() == 8 * GB
    assert made.describe() == "0.8 x 10.00 GB available"


@pytest.mark.parametrize(("allowed", "budget"), [("6GB", 5 * GB), (6 * GB, 5 * GB), (0.06, 5 * GB), ("500MB", 0)])
def test_a_configured_budget_includes_all_memory_of_the_process(
    monkeypatch: pytest.MonkeyPatch, allowed: str | int | float, budget: int
) -> None:
    made = host(monkeypatch, allowed, free=10 * GB, held=GB)
    assert made.budget() == budget
    assert made.describe().startswith("memory_budget ")
    assert made.describe().endswith("less 1.00 GB that the process holds")


@pytest.mark.parametrize("allowed", ["9GB", 0.09])
def test_the_processes_of_a_machine_share_a_configured_budget(
    monkeypatch: pytest.MonkeyPatch, allowed: str | float
) -> None:
    made = host(monkeypatch, allowed, free=10 * GB, held=GB, processes=3)
    assert made.budget() == 2 * GB
    assert made.describe() == "memory_budget 9.00 GB / 3 processes less 1.00 GB that the process holds"


def test_the_budget_does_not_exceed_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    made = host(monkeypatch, "90GB", free=10 * GB, held=GB)
    assert made.budget() == 8 * GB
    assert made.describe() == "0.8 x 10.00 GB available"


@ON_LINUX
def test_the_budget_of_this_machine_is_plausible() -> None:
    made = device_memory(torch.device("cpu"))
    assert 50 * 10**6 < made.budget() < 0.8 * (linux.meminfo("MemTotal") or 0)
    assert str(linux.cgroup_total() or linux.meminfo("MemTotal")) in made.identity


# Measurements in separate processes

PEAKS = """
import json, torch
from transformers import LlamaConfig, LlamaForCausalLM
from partita_trainers.batch_size.device_memory import device_memory
torch.set_num_threads(1)
shape = dict(vocab_size=500, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
memory = device_memory(torch.device("cpu"))
def forward(rows):
    with torch.no_grad():
        model(input_ids=torch.ones(rows, 256, dtype=torch.long))
forward(1)
found = {}
for rows in (16, 32, 64, 128):
    with memory.measure() as peak:
        forward(rows)
    found[rows] = peak.taken_bytes
print(json.dumps(found))
"""

OVERSHOOT = """
import torch
from partita_trainers.batch_size.device_memory import device_memory
from partita_trainers.batch_size.device_errors import attempt
memory = device_memory(torch.device("cpu"), memory_budget=int({budget}))
with memory.guard(exact={exact}):
    fits, failure = attempt(lambda: torch.ones(int({inside}) // 4).sum().item())
    assert failure is None, failure
    _, failure = attempt(lambda: torch.ones(int({beyond}) // 4))
    assert failure is not None and "allocate memory" in str(failure), failure
torch.ones(int({beyond}) // 4)
print("alive")
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@ON_LINUX
@pytest.mark.long
def test_the_measured_peak_is_linear_in_the_rows() -> None:
    peaks = {int(rows): taken for rows, taken in json.loads(run(PEAKS)).items()}
    slopes = [(peaks[more] - peaks[less]) / (more - less) for less, more in ((16, 32), (32, 64), (64, 128))]
    assert max(slopes) <= 1.05 * min(slopes), peaks
    hidden, logits = 256 * 352 * 4, 256 * 500 * 4
    assert min(slopes) > max(hidden, logits), "the slope is at least the hidden states of one layer"
    assert max(slopes) < 8 * (hidden + logits)


@ON_LINUX
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.long
def test_work_beyond_the_budget_is_an_error_and_the_process_survives(exact: bool) -> None:
    code = OVERSHOOT.format(budget=2e9, inside=4e8, beyond=3e9, exact=exact)
    assert run(code) == "alive"


@ON_LINUX
@pytest.mark.long
def test_a_tighter_existing_limit_is_kept() -> None:
    code = """
import resource, torch
from partita_trainers.batch_size.device_memory import device_memory
resource.setrlimit(resource.RLIMIT_DATA, (2 * 10**9, resource.RLIM_INFINITY))
memory = device_memory(torch.device("cpu"))
assert memory.budget() < 2 * 10**9
with memory.guard():
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] <= 2 * 10**9
assert resource.getrlimit(resource.RLIMIT_DATA)[0] == 2 * 10**9
print("alive")
"""
    assert run(code) == "alive"
