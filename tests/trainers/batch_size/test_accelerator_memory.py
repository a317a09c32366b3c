"""Tests of the memory of a GPU and of the tuner on one, with the fake allocator of fake_cuda.py."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from partita_schema.errors import OutOfMemory
from partita_trainers.batch_size.accelerator_memory import AcceleratorMemory
from partita_trainers.batch_size.device_errors import attempt
from partita_trainers.batch_size.device_memory import device_memory
from partita_trainers.batch_size.probe import BatchSize, Purpose, Timing, Volume
from partita_trainers.batch_size.probe_runner import ProbeRunner
from partita_trainers.batch_size.tune import tune

from .fake_cuda import MIB, FakeCuda, Tensor

GB = 10**9
DEVICE = torch.device("cuda", 0)
NOT_SUPPORTED = (
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."
)


@pytest.fixture(params=[False, True], ids=["segments", "expandable segments"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Replace the functions of torch.cuda by those of a fake device of 40 GB."""
    fake = FakeCuda(40 * GB, expandable=request.param)
    fake.others["context"] = 500 * 10**6
    for name in FakeCuda.FUNCTIONS:
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


@dataclass
class Work:
    """A forward pass of 24 layers, with a cache per layer and logits at the end, next to weights of 2 GB."""

    cuda: FakeCuda
    num_rows: int = 200_000
    events: dict[int, Callable[[], object]] = field(default_factory=dict)
    """What happens in the first batch that has at least this number of rows."""
    other_kernels_from: int = 10**9
    """Rows from which the work takes four times the memory."""
    ran: list[int] = field(default_factory=list)

    purpose: Purpose = "evaluation"
    prompt_tokens: int = 500
    new_tokens: int = 0

    def __post_init__(self) -> None:
        self.weights = [Tensor(self.cuda, size) for size in [200 * MIB] * 10]

    @property
    def max_rows(self) -> int:
        return self.num_rows

    def warm_up(self) -> None:
        Tensor(self.cuda, MIB)

    def run(self, rows: int) -> Timing:
        self.ran.append(rows)
        for at_least in [first for first in self.events if rows >= first]:
            self.events.pop(at_least)()
        unit = (4 if rows >= self.other_kernels_from else 1) * MIB // 4 * rows
        hidden = Tensor(self.cuda, 4 * unit)
        caches: list[Tensor] = []
        for _ in range(24):
            caches += [Tensor(self.cuda, 3 * unit), Tensor(self.cuda, 3 * unit)]
            wide = Tensor(self.cuda, 16 * unit)
            hidden = Tensor(self.cuda, 4 * unit)
            del wide
        Tensor(self.cuda, 32 * unit)
        del hidden, caches
        return Timing(prefill_seconds=0.1 + 0.01 * rows)

    def estimated_bytes(self, rows: int) -> int:
        raise AssertionError("a GPU measures its memory")

    def decode_step(self, rows: int) -> float:
        return 0.0

    def volume(self, rows: int) -> Volume:
        return Volume(batches=math.ceil(self.num_rows / rows), tokens=self.num_rows * self.prompt_tokens)


def gpu_memory(budget: str | float | None = None) -> AcceleratorMemory:
    memory = device_memory(DEVICE, memory_budget=budget)
    assert isinstance(memory, AcceleratorMemory)
    return memory


def tuned(work: Work, memory: AcceleratorMemory) -> BatchSize:
    size = tune(ProbeRunner(work, memory), device="cuda:0")
    memory.clear()
    return size


def fitting(size: BatchSize) -> int:
    assert size.max_fitting is not None
    return size.max_fitting


def runs(work: Work, memory: AcceleratorMemory, rows: int) -> bool:
    """Return whether a job can run a batch of this size."""
    memory.clear()
    with memory.guard():
        _, failure = attempt(lambda: work.run(rows))
    return failure is None


def most_rows(work: Work, memory: AcceleratorMemory) -> int:
    """Return the most rows that a job can run, by bisection."""
    low, high = 1, 1000
    assert not runs(work, memory, high)
    while high - low > 4:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(work, memory, middle) else (low, middle)
    return low


def taken(work: Work, cuda: FakeCuda, rows: int) -> int:
    """Return the memory that a batch takes from the device, in addition to what is held."""
    cuda.empty_cache()
    held = cuda.allocated
    cuda.reset_peak_memory_stats(DEVICE)
    work.run(rows)
    return cuda.peak_reserved - held


# The budget


def test_the_budget_of_a_gpu_is_free_and_cached_memory(cuda: FakeCuda) -> None:
    cuda.others["another process"] = 9_500_000_000
    cached = Tensor(cuda, 12 * GB)
    del cached
    memory = gpu_memory()
    assert memory.budget() == int(0.98 * 30 * GB) - 256 * 10**6
    assert memory.describe() == "0.98 x 30.00 GB free less 256.0 MB"
    assert memory.identity == f"a fake GPU, {40 * GB} bytes"


@pytest.mark.parametrize("budget", ["24GB", 0.6])
def test_on_a_gpu_a_configured_budget_includes_the_model(cuda: FakeCuda, budget: str | float) -> None:
    model = Tensor(cuda, 10 * GB)
    memory = gpu_memory(budget)
    assert memory.budget() == pytest.approx(14 * GB, abs=2 * MIB)
    assert memory.describe() == "memory_budget 24.00 GB less 10.00 GB that the process holds"
    with memory.guard():
        assert cuda.fraction == pytest.approx(0.6)
        with memory.guard():
            pass
        assert cuda.fraction == pytest.approx(0.6), "the inner guard ended the outer one"
    assert cuda.fraction == 1.0
    del model


def test_a_limit_that_was_set_in_torch_is_a_limit_of_the_budget(cuda: FakeCuda) -> None:
    model = Tensor(cuda, 2 * GB)
    cuda.fraction = 0.25
    memory = gpu_memory()
    assert memory.budget() == pytest.approx(8 * GB, abs=2 * MIB)
    assert memory.describe() == "torch's memory fraction 10.00 GB less 2.00 GB that the process holds"
    assert gpu_memory("5GB").describe() == "memory_budget 5.00 GB less 2.00 GB that the process holds"
    wide = gpu_memory("20GB")
    assert wide.budget() == pytest.approx(8 * GB, abs=2 * MIB)
    with wide.guard():
        assert cuda.fraction == pytest.approx(0.25), "the limit that was set in torch is kept"
    del model


def test_on_a_gpu_used_is_allocated_memory_and_taken_is_reserved_memory(cuda: FakeCuda) -> None:
    model = Tensor(cuda, GB)
    memory = gpu_memory()
    unused = cuda.reserved - cuda.allocated
    with memory.measure() as peak:
        assert peak.used_bytes is None
        Tensor(cuda, 3 * MIB)
    assert peak.used_bytes == 3 * MIB
    assert peak.taken_bytes == cuda.peak_reserved - cuda.allocated
    assert peak.taken_bytes >= max(unused, 3 * MIB)
    del model


# The tuner


def test_the_size_that_is_found_is_close_to_the_largest_and_runs(cuda: FakeCuda) -> None:
    work, memory = Work(cuda), gpu_memory()
    size = tuned(work, memory)
    assert runs(work, memory, fitting(size))
    assert fitting(size) >= 0.85 * most_rows(work, memory)


def test_memory_that_is_reserved_in_pieces_is_not_given_to_a_batch(cuda: FakeCuda) -> None:
    """Eight segments of 1 GB, of which each has 300 MB in use and 600 MB free, next to 100 MB."""
    work, memory = Work(cuda), gpu_memory()
    segments = [Tensor(cuda, GB) for _ in range(8)]
    del segments
    large = [Tensor(cuda, 600 * 10**6) for _ in range(8)]
    held = [Tensor(cuda, 300 * 10**6) for _ in range(8)]
    del large
    cuda.empty_cache()
    size = tuned(work, memory)
    assert taken(work, cuda, fitting(size)) <= memory.budget()
    assert runs(work, memory, fitting(size))
    assert fitting(size) >= 0.8 * most_rows(work, memory)
    del held


def test_probes_stay_within_the_configured_budget(cuda: FakeCuda) -> None:
    work, memory = Work(cuda, other_kernels_from=60), gpu_memory("12GB")
    size = tuned(work, memory)
    assert size.out_of_memory, "a size beyond 60 rows is tried, and takes four times the predicted memory"
    assert cuda.highest_reserved <= 12 * GB
    assert 50 <= fitting(size) < 60
    assert runs(work, memory, fitting(size))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("where", ["inside the allocator", "outside"])
def test_memory_that_is_taken_during_the_search_is_not_given_to_a_batch(cuda: FakeCuda, rows: int, where: str) -> None:
    """Workspaces of cuBLAS are inside, its kernels, buffers of NCCL and other processes outside."""
    work, memory = Work(cuda), gpu_memory()
    kept: list[Tensor] = []

    def take() -> None:
        if where == "outside":
            cuda.others["library"] = 3 * GB
        else:
            kept.append(Tensor(cuda, 3 * GB))

    work.events[rows] = take
    size = tuned(work, memory)
    assert not work.events
    assert not size.out_of_memory
    assert taken(work, cuda, fitting(size)) <= memory.budget(), "more than 98 % of what is free after the search"
    assert fitting(size) >= 0.85 * most_rows(work, memory)


def test_memory_of_other_processes_does_not_count_against_a_configured_budget(cuda: FakeCuda) -> None:
    work, memory = Work(cuda), gpu_memory("12GB")
    quiet = tuned(work, memory)

    def take() -> None:
        cuda.others["another process"] = 5 * GB

    work.events[4] = take
    assert fitting(tuned(work, memory)) == fitting(quiet)
    assert not work.events


def test_a_process_that_leaves_during_the_search_does_not_raise_the_budget(cuda: FakeCuda) -> None:
    cuda.others["another process"] = 10 * GB
    work, memory = Work(cuda, events={4: lambda: cuda.others.pop("another process")}), gpu_memory()
    size = tuned(work, memory)
    assert size.budget_bytes is not None
    assert taken(work, cuda, fitting(size)) <= size.budget_bytes


def test_a_refusal_without_a_reason_limits_the_rows_and_is_logged(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise RuntimeError(NOT_SUPPORTED)

    work = Work(cuda, events={200: refuse})
    size = tuned(work, gpu_memory())
    assert fitting(size) < max(work.ran)
    assert refusals(caplog) == [
        f"a batch of {max(work.ran)} rows does not run and counts as too large: {NOT_SUPPORTED}"
    ]


def test_a_refusal_of_a_single_row_is_logged_before_the_advice_on_memory(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    class Unsupported(Work):
        """Work with a layer for which cuDNN has no kernel."""

        def run(self, rows: int) -> Timing:
            raise RuntimeError(NOT_SUPPORTED)

    with pytest.raises(OutOfMemory, match="not even one row fits for evaluation"):
        tuned(Unsupported(cuda), gpu_memory())
    assert refusals(caplog) == [f"a batch of 1 row does not run and counts as too large: {NOT_SUPPORTED}"]


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "counts as too large" in message]


def test_a_refused_batch_leaves_no_memory_behind(cuda: FakeCuda) -> None:
    work, memory = Work(cuda, other_kernels_from=100), gpu_memory()
    held = cuda.allocated
    size = tuned(work, memory)
    assert size.out_of_memory
    assert cuda.allocated == held
    assert cuda.reserved < held + 40 * MIB
