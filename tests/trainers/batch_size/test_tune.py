"""Tests of the tuner on a device whose memory and time are given by formulas."""

import itertools
import logging
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch

from partita.distributed.thread_group import ThreadGroup
from partita_schema.errors import OutOfMemory
from partita_trainers.batch_size import tune as tune_module
from partita_trainers.batch_size.memory import Peak
from partita_trainers.batch_size.probe import BatchSize, Purpose, Timing, Volume
from partita_trainers.batch_size.probe_runner import ProbeRunner
from partita_trainers.batch_size.tune import capped, tune, verify

from ...properties import ends

GB = 10**9


@dataclass
class Device:
    """A fake device: memory of a batch, and a clock advanced only by its work."""

    free: int = 10 * GB
    budget_bytes: int = 9 * GB
    bytes_a_row: int = 50_000_000
    taken: int = 0
    clock: float = 0.0

    identity = "a formula"
    slows_work = False

    def budget(self) -> int:
        return self.budget_bytes

    def describe(self) -> str:
        return "9.0 GB said"

    @contextmanager
    def measure(self) -> Iterator[Peak]:
        peak = Peak()
        self.taken = 0
        try:
            yield peak
        finally:
            peak.used_bytes = peak.taken_bytes = self.taken

    @contextmanager
    def guard(self, *, exact: bool = False) -> Iterator[None]:
        yield

    def clear(self) -> None:
        self.taken = 0


@dataclass
class Work:
    """Prompts of one length; a decode step takes a constant time plus a time per row."""

    device: Device
    num_rows: int = 10_000
    prompt_tokens: int = 400
    new_tokens: int = 100
    seconds_a_token: float = 0.0001
    step_constant: float = 0.02
    step_a_row: float = 0.0001
    purpose: Purpose = "generation"
    ran: list[int] = field(default_factory=list)
    stepped: list[int] = field(default_factory=list)

    @property
    def max_rows(self) -> int:
        return self.num_rows

    def warm_up(self) -> None:
        self.device.taken = 0

    def run(self, rows: int) -> Timing:
        self.ran.append(rows)
        needed = rows * self.device.bytes_a_row
        if needed > self.device.free:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        self.device.taken = max(self.device.taken, needed)
        seconds = 0.001 + rows * self.prompt_tokens * self.seconds_a_token
        self.device.clock += seconds
        return Timing(prefill_seconds=seconds, decode_seconds=self.step_constant + self.step_a_row * rows)

    def estimated_bytes(self, rows: int) -> int:
        return rows * self.device.bytes_a_row

    def decode_step(self, rows: int) -> float:
        self.stepped.append(rows)
        seconds = self.step_constant + self.step_a_row * rows
        self.device.clock += 5 * seconds
        return seconds

    def volume(self, rows: int) -> Volume:
        return Volume(batches=math.ceil(self.num_rows / rows), tokens=self.num_rows * self.prompt_tokens)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(tune_module.time, "perf_counter", lambda: made.clock)
    return made


def test_the_largest_and_the_best_size_are_both_found(device: Device) -> None:
    work = Work(device, seconds_a_token=0.000001, step_a_row=0.02)
    size = tune(ProbeRunner(work, device), device="cuda:0")
    assert size.max_fitting == 180, "9 GB at 50 MB per row"
    speed = {rows: work.num_rows / time_of(work, rows) for rows in range(1, 181)}
    assert speed[size.rows] >= 0.96 * max(speed.values())
    assert size.rows == size.best < size.max_fitting
    assert [probe.rows for probe in size.probes] == [1, 4, 180]
    assert all(probe.verdict == "fits" for probe in size.probes)
    assert (size.origin, size.device, size.prompt_tokens, size.new_tokens) == ("tuned", "cuda:0", 400, 100)
    assert size.budget_bytes == 9 * GB
    assert size.seconds == pytest.approx(device.clock)


def time_of(work: Work, rows: int) -> float:
    volume = work.volume(rows)
    full, rest = divmod(work.num_rows, rows)
    steps = [work.step_constant + work.step_a_row * size for size in [rows] * full + [rest] * (rest > 0)]
    return volume.batches * 0.001 + work.new_tokens * sum(steps) + volume.tokens * work.seconds_a_token


@pytest.mark.parametrize("disturbed", [4, 8, 16, 32])
def test_a_single_slow_timing_does_not_end_the_search(device: Device, disturbed: int) -> None:
    class HeldUp(Work):
        """One timing takes five times as long."""

        def decode_step(self, rows: int) -> float:
            first = rows not in self.stepped
            return super().decode_step(rows) * (5 if first and rows == disturbed else 1)

    work = HeldUp(device, seconds_a_token=0.000001)
    size = tune(ProbeRunner(work, device), device="cuda:0")
    assert size.rows == tune(ProbeRunner(Work(device, seconds_a_token=0.000001), device), device="cuda:0").rows > 32


def test_the_last_batch_is_counted_with_its_number_of_rows(device: Device) -> None:
    work = Work(device, num_rows=180, seconds_a_token=0.000001, step_a_row=0.001)
    size = tune(ProbeRunner(work, device), device="cuda:0")
    speed = dict(size.throughputs)
    assert speed[128] == pytest.approx(work.num_rows / time_of(work, 128), rel=0.02)
    assert speed[128] > 0.95 * speed[96], "batches of 128 and 52 rows are as much work as 96 and 84"


def test_the_predicted_speed_equals_that_of_the_formula(device: Device) -> None:
    work = Work(device, seconds_a_token=0.000001)
    size = tune(ProbeRunner(work, device), device="cuda:0")
    for rows, speed in size.throughputs:
        assert speed == pytest.approx(work.num_rows / time_of(work, rows), rel=0.02)
    for probe in size.probes:
        assert probe.rows_per_second == pytest.approx(work.num_rows / time_of(work, probe.rows), rel=0.02)


def test_the_largest_size_is_predicted_if_probes_are_expensive_and_memory_is_plentiful(device: Device) -> None:
    device.bytes_a_row = 1_000_000
    work = Work(device, num_rows=600, seconds_a_token=0.01)
    size = tune(ProbeRunner(work, device), device="cpu")
    assert max(work.ran) <= 4, "a probe of hundreds of rows would take longer than the work"
    assert size.max_fitting == 600
    assert size.rows <= 24, "the prefill takes as long with any batch size"
    assert size.seconds <= 0.1 * time_of(work, size.rows) * 1.2


def test_a_size_is_probed_at_any_cost_if_memory_is_scarce(device: Device) -> None:
    device.bytes_a_row = 900_000_000
    work = Work(device, num_rows=64, seconds_a_token=0.002, step_constant=3.0)
    size = tune(ProbeRunner(work, device), device="cpu")
    assert size.max_fitting == 10
    assert max(work.ran) >= size.rows > 4


@pytest.mark.parametrize("scarce", [False, True])
def test_all_rows_at_a_time_are_probed_only_if_memory_is_scarce(device: Device, scarce: bool) -> None:
    device.bytes_a_row = 90_000_000 if scarce else 1_000_000
    work = Work(device, num_rows=64, seconds_a_token=0.01, step_constant=1.0)
    size = tune(ProbeRunner(work, device), device="cpu")
    assert (size.rows, size.max_fitting) == (64, 64)
    assert (64 in work.ran) == scarce


# A decode step is timed over five steps.


def test_steps_of_more_rows_are_timed_if_that_saves_more_than_it_takes(device: Device) -> None:
    work = Work(device, num_rows=16, prompt_tokens=5, new_tokens=5, step_constant=0.3)
    size = tune(ProbeRunner(work, device), device="cpu")
    assert work.stepped[-1] == 16, "three more seconds save four and a half"
    assert size.rows == 16


def test_steps_of_more_rows_are_not_timed_if_that_takes_longer_than_it_saves(device: Device) -> None:
    work = Work(device, num_rows=4, prompt_tokens=5, new_tokens=3, step_constant=0.2)
    size = tune(ProbeRunner(work, device), device="cpu")
    assert work.stepped == [1], "two more seconds for work of two and a half seconds"
    assert (size.rows, size.max_fitting) == (1, 4)


def test_steps_are_timed_for_any_work_if_that_takes_at_most_half_a_second(device: Device) -> None:
    work = Work(device, num_rows=4, prompt_tokens=5, new_tokens=3, step_constant=0.02)
    size = tune(ProbeRunner(work, device), device="cpu")
    assert (work.stepped, size.rows) == ([1, 4], 4)
    assert size.seconds < tune_module.ALWAYS_ALLOWED_SECONDS
    assert size.seconds > 0.5 * time_of(work, 1), "the search takes more than half of the work"


@pytest.mark.parametrize(("rows", "tokens", "step"), [(20, 5, 0.3), (40, 2, 1.0), (100, 5, 0.3), (1000, 5, 0.3)])
def test_steps_are_timed_if_more_rows_may_save_much_more_time(
    device: Device, rows: int, tokens: int, step: float
) -> None:
    work = Work(device, num_rows=rows, prompt_tokens=50, new_tokens=tokens, step_constant=step)
    size = tune(ProbeRunner(work, device), device="cpu")
    assert size.rows >= 4
    assert size.seconds + time_of(work, size.rows) < 0.5 * time_of(work, 1)


@pytest.mark.parametrize("refused", ends([{1}, {1, 4}, {4}, {8, 16}, set(range(1, 200))]))
def test_a_size_whose_steps_are_refused_is_not_chosen(device: Device, refused: set[int]) -> None:
    work = Work(device, seconds_a_token=0.000001)
    plain = work.decode_step

    def decode_step(rows: int) -> float:
        if rows in refused:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return plain(rows)

    work.decode_step = decode_step  # type: ignore[method-assign]
    size = tune(ProbeRunner(work, device), device="cuda:0")
    assert size.max_fitting == 180
    assert size.rows not in refused or size.rows == 1


def test_the_size_respects_the_configured_limit(device: Device) -> None:
    size = tune(ProbeRunner(Work(device, seconds_a_token=0.000001), device), device="cuda:0", max_rows=24)
    assert size.rows <= 24
    assert size.max_fitting == 24


def test_the_size_is_limited_to_the_grid_size_of_kernels(device: Device) -> None:
    assert capped(Work(device, num_rows=1_000_000), None) == capped(Work(device, num_rows=1_000_000), 10**6) == 65_535
    assert capped(Work(device, num_rows=7), 24) == capped(Work(device, num_rows=24), 7) == 7


def test_only_given_sizes_are_chosen(device: Device) -> None:
    work = Work(device, num_rows=48, seconds_a_token=0.000001)
    size = tune(
        ProbeRunner(work, device), device="cuda:0", sizes=lambda largest: [n for n in (1, 3, 12, 48) if n <= largest]
    )
    assert size.rows in (12, 48)


def test_out_of_memory_of_the_device_limits_the_size(device: Device) -> None:
    device.free = device.budget_bytes = 2 * GB
    kink = Work(device, seconds_a_token=0.000001)
    plain = kink.run

    def run(rows: int) -> Timing:
        device.bytes_a_row = 10_000_000 if rows < 90 else 40_000_000
        return plain(rows)

    kink.run = run  # type: ignore[method-assign]
    size = tune(ProbeRunner(kink, device), device="cuda:0")
    assert size.out_of_memory
    assert size.max_fitting is not None
    assert 80 <= size.max_fitting < 90
    refused = [probe for probe in size.probes if probe.verdict == "out of memory"]
    assert all(probe.taken_bytes is None and probe.rows >= 90 for probe in refused)


def test_one_row_that_is_too_large_is_an_error_with_its_memory_use(device: Device) -> None:
    device.bytes_a_row = int(9.5 * GB)
    with pytest.raises(OutOfMemory) as error:
        tune(ProbeRunner(Work(device), device), device="cuda:0")
    assert str(error.value) == (
        "not even one row fits for generation: one of 400 tokens and 100 new tokens takes 9.50 GB, 500.0 MB too much; "
        "9.00 GB may be taken (9.0 GB said). Write a smaller preprocessing.global_max_sequence_length or "
        "generation.max_new_tokens, quantization: {bits: 4}, or a smaller base_model"
    )


def test_a_configured_budget_that_is_too_small_is_reported_first(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.budget_bytes = 0
    monkeypatch.setattr(device, "describe", lambda: "memory_budget 300.0 MB less 437.9 MB that the process holds")
    with pytest.raises(OutOfMemory, match=r"holds\)\. Write a larger trainer\.memory_budget, a smaller preproc"):
        tune(ProbeRunner(Work(device), device), device="cpu")


def test_nothing_fits_in_no_memory_even_if_a_probe_takes_none(device: Device) -> None:
    device.budget_bytes = device.bytes_a_row = 0
    with pytest.raises(OutOfMemory) as error:
        tune(ProbeRunner(Work(device), device), device="cpu")
    assert str(error.value).startswith(
        "not even one row fits for generation: one of 400 tokens and 100 new tokens needs memory; 0.0 MB may be taken "
    )


def test_one_row_that_the_device_refuses_is_reported(device: Device) -> None:
    device.bytes_a_row = 11 * GB
    work = Work(device, new_tokens=0, purpose="training")
    with pytest.raises(OutOfMemory) as error:
        tune(ProbeRunner(work, device), device="cuda:0")
    assert str(error.value) == (
        "not even one row fits for training: one of 400 tokens takes more than the device has; 9.00 GB may be taken "
        "(9.0 GB said). Write a smaller preprocessing.global_max_sequence_length, trainer.gradient_checkpointing: "
        "true, quantization: {bits: 4}, or a smaller base_model"
    )


def test_a_device_without_measurements_uses_a_formula(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def silent() -> Iterator[Peak]:
        yield Peak()

    monkeypatch.setattr(device, "measure", silent)
    size = tune(ProbeRunner(Work(device, seconds_a_token=0.000001), device), device="mps")
    assert size.max_fitting == 180
    assert [probe.taken_bytes for probe in size.probes[:2]] == [50_000_000, 200_000_000]


def test_a_row_that_fits_only_during_the_measurement_is_timed_there(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(device, num_rows=1)
    plain = work.run

    def run(rows: int) -> Timing:
        if not measured:
            raise torch.OutOfMemoryError("full")
        return plain(rows)

    measured: list[bool] = []

    @contextmanager
    def measure() -> Iterator[Peak]:
        measured.append(True)
        yield Peak(10, 10)
        measured.clear()

    work.run = run  # type: ignore[method-assign]
    monkeypatch.setattr(device, "measure", measure)
    assert tune(ProbeRunner(work, device), device="cpu").rows == 1


def test_every_run_is_guarded(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []

    @contextmanager
    def guard(*, exact: bool = False) -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    work = Work(device, seconds_a_token=0.000001)
    plain = work.decode_step
    seen: list[bool] = []

    def decode_step(rows: int) -> float:
        seen.append(bool(inside))
        return plain(rows)

    work.decode_step = decode_step  # type: ignore[method-assign]
    monkeypatch.setattr(device, "guard", guard)
    tune(ProbeRunner(work, device), device="cpu")
    assert seen
    assert all(seen)


def test_errors_that_are_not_memory_are_passed_on(device: Device) -> None:
    work = Work(device)
    work.run = lambda rows: {}["key"]  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        tune(ProbeRunner(work, device), device="cuda:0")


def known(device: Device, **changes: object) -> BatchSize:
    size = tune(ProbeRunner(Work(device, seconds_a_token=0.000001), device), device="cuda:0")
    return replace(size, **changes)  # type: ignore[arg-type]


def test_a_cached_size_needs_one_probe(device: Device) -> None:
    earlier = known(device)
    work = Work(device, seconds_a_token=0.000001)
    size = verify(ProbeRunner(work, device), earlier)
    assert size is not None
    assert set(work.ran) == {earlier.rows}
    assert (size.rows, size.max_fitting, size.origin) == (earlier.rows, earlier.max_fitting, "cached")
    assert [probe.rows for probe in size.probes] == [earlier.rows]


def test_a_cached_size_far_below_the_budget_needs_no_expensive_probe(device: Device) -> None:
    device.bytes_a_row = 100_000
    work = Work(device, num_rows=64, seconds_a_token=0.01)
    earlier = tune(ProbeRunner(work, device), device="cpu")
    tried = max(work.ran)
    assert tried < earlier.rows, "a probe of as many rows would take as long as the work"
    again = Work(device, num_rows=64, seconds_a_token=0.01)
    size = verify(ProbeRunner(again, device), earlier)
    assert size is not None
    assert (size.rows, size.max_fitting, again.ran) == (earlier.rows, earlier.max_fitting, [tried])
    device.budget_bytes = earlier.rows * 150_000
    verify(ProbeRunner(again, device), earlier)
    assert again.ran == [tried, earlier.rows], "with less memory it has to be probed"
    device.budget_bytes = 9 * GB
    verify(ProbeRunner(again, device), replace(earlier, out_of_memory=True))
    assert again.ran[2:] == [earlier.rows]


def test_a_cached_size_that_no_longer_fits_is_discarded(device: Device) -> None:
    earlier = known(device)
    device.bytes_a_row = 9 * GB // (earlier.rows - 1)
    assert verify(ProbeRunner(Work(device), device), earlier) is None


def test_a_cached_size_limited_by_memory_is_searched_again_with_more_memory(device: Device) -> None:
    device.budget_bytes = 2 * GB
    earlier = known(device)
    assert earlier.max_fitting is not None
    assert 2 * earlier.rows > earlier.max_fitting
    device.budget_bytes = 9 * GB
    assert verify(ProbeRunner(Work(device), device), earlier) is None


def test_with_less_memory_fewer_rows_fit_and_the_record_is_updated(device: Device) -> None:
    device.bytes_a_row = 1_000_000
    earlier = known(device)
    assert earlier.max_fitting is not None
    device.budget_bytes = 5 * GB
    size = verify(ProbeRunner(Work(device, seconds_a_token=0.000001), device), earlier)
    assert size is not None
    assert size.max_fitting == 5000


def test_a_cached_size_is_limited_by_smaller_data_and_the_configuration(device: Device) -> None:
    earlier = known(device)
    small = verify(ProbeRunner(Work(device, num_rows=7, seconds_a_token=0.000001), device), earlier)
    limited = verify(ProbeRunner(Work(device, seconds_a_token=0.000001), device), earlier, max_rows=5)
    assert small is not None
    assert limited is not None
    assert (small.rows, limited.rows) == (7, 5)


def test_a_cached_size_that_the_data_no_longer_allows_is_replaced_by_a_given_one(device: Device) -> None:
    earlier = known(device, rows=6)
    work = Work(device, num_rows=5, seconds_a_token=0.000001)
    size = verify(
        ProbeRunner(work, device), earlier, sizes=lambda largest: [n for n in (1, 2, 3, 4, 6, 12) if n <= largest]
    )
    assert size is not None
    assert size.rows == 4


def test_the_log_reports_the_result(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    result = tune(ProbeRunner(Work(device, seconds_a_token=0.000001), device), device="cuda:0")
    line = f"batch size for generation: {result.rows} rows of at most 400 tokens and 100 new tokens on cuda:0, "
    assert caplog.messages == [f"{line}up to 180 fit; 3 probes in {result.seconds:.1f} s"]


@pytest.mark.parametrize(("rows", "tokens"), list(itertools.product((2, 3, 5, 64), (3, 4000))))
def test_data_with_fewer_rows_than_fit_limits_the_size(device: Device, rows: int, tokens: int) -> None:
    size = tune(
        ProbeRunner(Work(device, num_rows=rows, prompt_tokens=tokens, seconds_a_token=0.000001), device),
        device="cuda:0",
    )
    assert size.max_fitting == rows
    assert size.rows <= rows


def on_ranks(works: list[Work]) -> tuple[BatchSize, list[BatchSize | None]]:
    """Return the result of rank 0 and those of the others; each rank is a thread with a separate device."""
    benches = [
        ProbeRunner(work, work.device, process_group=process_group)
        for work, process_group in zip(works, ThreadGroup.of(len(works), timeout_seconds=20), strict=True)
    ]

    def lead() -> BatchSize:
        actual = None
        try:
            actual = tune(benches[0], device="cuda:0")
            return actual
        finally:
            benches[0].end(actual)

    with ThreadPoolExecutor(len(works)) as threads:
        followed = [threads.submit(bench.follow) for bench in benches[1:]]
        return lead(), [one.result() for one in followed]


def test_the_rank_with_the_least_memory_decides_for_all(device: Device) -> None:
    works = [
        Work(replace(device, budget_bytes=budget), seconds_a_token=0.000001) for budget in (9 * GB, 4 * GB, 8 * GB)
    ]

    result, others = on_ranks(works)

    assert result.budget_bytes == 4 * GB
    assert result.max_fitting == 4 * GB // device.bytes_a_row == 80
    assert others == [result, result]
    assert works[0].ran == works[1].ran == works[2].ran
    assert works[0].stepped == works[1].stepped == works[2].stepped


@pytest.mark.long
def test_out_of_memory_on_one_rank_is_out_of_memory_on_all(device: Device) -> None:
    works = [Work(replace(device, free=free), seconds_a_token=0.000001) for free in (10 * GB, 2 * GB)]

    result, others = on_ranks(works)

    assert result.max_fitting is not None
    assert result.max_fitting <= 2 * GB // device.bytes_a_row
    assert result.out_of_memory
    assert others == [result]


def test_an_error_on_one_rank_ends_the_search_on_all(device: Device) -> None:
    works = [Work(replace(device)), Work(replace(device))]

    def broken(rows: int) -> Timing:
        raise ValueError("a layer of rank 1 is broken")

    works[1].run = broken  # type: ignore[method-assign]

    with pytest.raises(ValueError, match="a layer of rank 1 is broken"):
        on_ranks(works)
