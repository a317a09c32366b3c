"""Batch size tuning: probe the worst case, predict the time for the whole data, choose a size.

The cost is bounded. A probe that would take more than a tenth of the work itself, and more than half a second, is made
only if memory is the limit. Decode steps of larger batches are then timed only if they promise to save much more time.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from partita_schema.common.text import counted
from partita_schema.errors import OutOfMemory
from partita_trainers.batch_size.memory import gigabytes
from partita_trainers.batch_size.probe import BatchSize, Probe, ProbeResult, Volume
from partita_trainers.batch_size.probe_runner import ProbeRunner
from partita_trainers.batch_size.search import (
    between,
    candidate_sizes,
    is_comfortable,
    largest_fitting,
    line,
    next_rows,
    predicted_rows,
    smallest_near_best,
)

logger = logging.getLogger(__name__)

MAX_ROWS = 65_535
"""Attention kernels fail for more rows: a grid dimension has 16 bits."""
SHARE_OF_THE_WORK = 0.1
"""Maximum tuning time as a fraction of the time of the work."""
ALWAYS_ALLOWED_SECONDS = 0.5
"""Tuning time in seconds that is always allowed."""
SHORT_SECONDS = 0.25
"""Runs shorter than this are timed once more, without measuring memory."""
MANY_ROWS = 64
"""Timed sizes grow by a factor of 4 below this number of rows, and by 2 from there on."""
MAX_GROWTH = 8
"""If this multiple of the chosen size fits, the exact maximum does not matter."""
UNPROVEN = 0.97
"""Fraction of the predicted maximum that is reported if it was not probed."""
SLOW_PROBE_SECONDS = 5.0
"""Probes that take longer than this, in seconds, are logged at level INFO."""
MORE_MEMORY = 1.25
"""A cached size that was limited by memory is tuned again if the budget grew by this factor."""

Sizes = Callable[[int], Iterable[int]]
"""sizes(largest): sizes that may be chosen, in ascending order, none above `largest`."""


def tune(
    runner: ProbeRunner,
    *,
    device: str,
    max_rows: int | None = None,
    sizes: Sizes = candidate_sizes,
) -> BatchSize:
    """Return the batch size for the work of a probe runner: one that fits in memory and is fastest on the data.

    Args:
        runner: Runs the probes.
        device: Name of the device, for the result.
        max_rows: Limit set by the user.
        sizes: Sizes that may be chosen.

    Raises:
        OutOfMemory: Not even one row fits.
    """
    started, work_probe = time.perf_counter(), runner.work_probe
    search = BatchSizeSearch(runner, cap=capped(work_probe, max_rows), sizes=sizes)
    search.probe_memory()
    best, fits = search.best(), search.max_fitting
    looked_at = sorted({*(rows for rows in sizes(fits) if rows <= 4 * best), best})
    result = BatchSize(
        rows=best,
        origin="tuned",
        device=device,
        max_fitting=fits,
        best=best,
        probes=tuple(replace(probe, rows_per_second=search.speed(probe.rows)) for probe in search.probes),
        throughputs=tuple((rows, search.speed(rows)) for rows in looked_at),
        out_of_memory=any(probe.verdict == "out of memory" for probe in search.probes),
        prompt_tokens=work_probe.prompt_tokens,
        new_tokens=work_probe.new_tokens,
        budget_bytes=search.budget,
        seconds=time.perf_counter() - started,
    )
    logger.info("%s", summary_line(result, work_probe))
    return result


def verify(
    runner: ProbeRunner,
    known: BatchSize,
    *,
    max_rows: int | None = None,
    sizes: Sizes = candidate_sizes,
) -> BatchSize | None:
    """Probe a cached batch size once; return None if it must be tuned again.

    If the size was far from filling memory and therefore never probed, the largest probed size is used instead. If the
    work now allows fewer rows, the largest of `sizes` that it allows is taken. The size must be tuned again if its
    probe does not fit, or if it was limited by memory and more memory is available now.

    Args:
        runner: Runs the probes.
        known: Cached size.
        max_rows: Limit set by the user.
        sizes: Sizes that may be chosen.

    Raises:
        OutOfMemory: Not even the warm-up fits.
    """
    started, work_probe = time.perf_counter(), runner.work_probe
    cap = capped(work_probe, max_rows)
    rows = max(sizes(min(known.rows, cap)))
    warm_up(runner)
    budget = runner.budget()
    if known.budget_bytes is None or known.max_fitting is None:
        return None
    if budget > MORE_MEMORY * known.budget_bytes and 2 * known.rows > max(sizes(known.max_fitting)):
        return None
    evidence = [with_verdict(earlier, budget) for earlier in known.probes]
    tried = rows
    if not known.out_of_memory and is_comfortable(evidence, rows, budget=budget):
        tried = min(rows, max(earlier.rows for earlier in evidence))
    probe = with_verdict(runner.probe(tried), budget)
    if probe.verdict != "fits":
        return None
    fits = known.max_fitting
    if budget < known.budget_bytes:
        evidence = [earlier for earlier in evidence if earlier.rows != tried]
        fits = min(fits, predicted_rows([*evidence, probe], budget=budget))
    result = replace(
        known,
        rows=rows,
        origin="cached",
        max_fitting=max(rows, min(fits, cap)),
        best=rows,
        probes=(replace(probe, rows_per_second=dict(known.throughputs).get(tried)),),
        out_of_memory=False,
        prompt_tokens=work_probe.prompt_tokens,
        new_tokens=work_probe.new_tokens,
        budget_bytes=budget,
        seconds=time.perf_counter() - started,
    )
    logger.info("%s", summary_line(result, work_probe))
    return result


def warm_up(runner: ProbeRunner) -> None:
    """Allocate what stays on the device once work has begun, such as optimizer state. Raises OutOfMemory."""
    if not runner.warm_up():
        probe = ProbeResult(1, "out of memory", used_bytes=None, taken_bytes=None)
        raise OutOfMemory(too_large(runner, probe, budget=runner.budget()))


def capped(probe: Probe, max_rows: int | None) -> int:
    """Return the most rows that are worth trying."""
    return min(probe.max_rows, max_rows or MAX_ROWS, MAX_ROWS)


class BatchSizeSearch:
    """One search: the probes so far and the predictions from them."""

    def __init__(self, runner: ProbeRunner, *, cap: int, sizes: Sizes) -> None:
        self.runner, self.work_probe, self.cap, self.sizes = runner, runner.work_probe, cap, sizes
        self.probes: list[ProbeResult] = []
        self.prefills: dict[int, float] = {}
        """Prefill seconds at the maximum prompt length, by rows."""
        self.steps: dict[int, float] = {}
        """Seconds of a decode step at the usual length, by rows."""
        self.confirmed: set[int] = set()
        """Sizes that were timed twice."""
        self.step_cost = 0.0
        """Time that the latest decode timing took, in seconds."""
        self.volumes: dict[int, Volume] = {}
        self.num_rows = self.volume(1).rows or self.volume(1).batches
        self.started = time.perf_counter()
        warm_up(runner)
        self.budget = runner.budget()

    def probe_memory(self) -> None:
        """Probe sizes until the largest that fits is known, or until every useful size is known to fit.

        Raises OutOfMemory if a single row does not fit.
        """
        while (rows := self.next_rows()) is not None:
            probe = with_verdict(self.runner.probe(rows), self.budget)
            if rows == 1 and probe.verdict != "fits":
                raise OutOfMemory(too_large(self.runner, probe, budget=self.budget))
            self.probes.append(self.timed(probe))
            level = logging.INFO if probe.seconds > SLOW_PROBE_SECONDS else logging.DEBUG
            taken = gigabytes(probe.taken_bytes) if probe.taken_bytes is not None else "refused"
            logger.log(level, "tried %s rows: %s, %s in %.1f s", f"{rows:,}", probe.verdict, taken, probe.seconds)

    def timed(self, probe: ProbeResult) -> ProbeResult:
        """Add times that were not slowed down by measuring memory, for the first probe and for all short ones.

        If measuring does not slow the work down, the measured times are used.
        """
        if probe.prefill_seconds is None:
            return probe
        if self.probes and probe.prefill_seconds >= SHORT_SECONDS:
            if not self.runner.memory.slows_work:
                self.prefills[probe.rows] = probe.prefill_seconds
            return probe
        started = time.perf_counter()
        timing = self.runner.time(probe.rows)
        if timing is None:  # does not fit without exact allocations
            self.prefills[probe.rows] = probe.prefill_seconds
            return probe
        self.prefills[probe.rows] = timing.prefill_seconds
        return replace(
            probe,
            prefill_seconds=timing.prefill_seconds,
            decode_seconds=timing.decode_seconds,
            seconds=probe.seconds + time.perf_counter() - started,
        )

    def next_rows(self) -> int | None:
        """Return the size to probe next, or None.

        If a probe is too expensive, sizes above the one that would be chosen need no proof. The largest size that fits
        is then predicted if it is far above the chosen one, and probed otherwise.
        """
        rows = next_rows(self.probes, cap=self.cap, budget=self.budget)
        if rows is None or not self.probes or self.is_affordable(rows):
            return rows
        wanted = self.best()
        if self.max_fitting <= wanted < self.cap:
            return rows  # memory is the limit, so every row counts
        if not is_comfortable(self.probes, wanted, budget=self.budget):
            return next_rows(self.probes, cap=min(wanted, self.cap), budget=self.budget)
        return None if self.max_fitting >= min(self.cap, MAX_GROWTH * wanted) else rows

    def is_affordable(self, rows: int) -> bool:
        """Return whether a probe stays within the tuning time."""
        constant, each = self.prefill
        predicted = constant + each * rows * self.work_probe.prompt_tokens
        before = self.probes[-1]
        expected = max(predicted, before.seconds * rows / before.rows if before.rows > 1 else 0.0)
        best = self.best()
        return self.allows(expected, rows=best)

    def allows(self, seconds: float, *, rows: int) -> bool:
        """Return whether `seconds` more stay within the tuning time for work in batches of `rows`."""
        spent = time.perf_counter() - self.started
        return spent + seconds <= max(ALWAYS_ALLOWED_SECONDS, SHARE_OF_THE_WORK * self.seconds_of_work(rows))

    def pays(self, seconds: float, *, rows: int, larger: int) -> bool:
        """Return whether larger batches promise to save more than `seconds`."""
        return self.seconds_of_work(rows) - self.seconds_of_work(larger) > seconds

    @property
    def prefill(self) -> tuple[float, float]:
        """Seconds per batch, and seconds per token in it."""
        return line([(rows * self.work_probe.prompt_tokens, seconds) for rows, seconds in self.prefills.items()])

    @property
    def max_fitting(self) -> int:
        """The largest size that fits, as far as known."""
        proven = largest_fitting(self.probes, cap=self.cap, budget=self.budget)
        if next_rows(self.probes, cap=self.cap, budget=self.budget) is None:
            return proven
        return min(self.cap, max(proven, int(UNPROVEN * predicted_rows(self.probes, budget=self.budget))))

    def best(self) -> int:
        """Return the smallest size within 2 % of the fastest that fits."""
        largest = self.max_fitting
        if self.work_probe.new_tokens:
            largest = self.time_decoding(largest)
        return smallest_near_best([rows for rows in self.sizes(largest) if rows <= largest], self.speed)

    def time_decoding(self, largest: int) -> int:
        """Time decode steps of growing batches until more rows promise nothing. Return the last size."""
        rows = 1
        self.time_step(rows)
        while rows < largest:
            seen = [size for size in self.sizes(largest) if size <= rows]
            ahead = [size for size in self.sizes(largest) if size > rows]
            if len(self.steps) > 1 and rows >= 4 and smallest_near_best([*seen, *ahead], self.speed) <= rows:
                if rows in self.confirmed or self.step_cost >= SHORT_SECONDS:
                    break
                # A step delayed by other programs would end the search far too early.
                self.time_step(rows, again=True)
                continue
            larger = min(largest, (4 if rows < MANY_ROWS else 2) * rows)
            cost = 2 * self.step_cost
            if not (larger in self.steps or self.allows(cost, rows=rows) or self.pays(cost, rows=rows, larger=larger)):
                break
            rows = larger
            self.time_step(rows)
        return rows

    def time_step(self, rows: int, *, again: bool = False) -> None:
        """Time a decode step; with `again`, keep the shorter of two times."""
        if rows in self.steps and not again:
            return
        started = time.perf_counter()
        seconds = self.runner.step(rows)
        self.step_cost = time.perf_counter() - started
        # A size whose decode step does not fit is infinitely slow; the memory search notices it too.
        measured = math.inf if seconds is None else seconds
        self.steps[rows] = min(measured, self.steps.get(rows, math.inf))
        if again:
            self.confirmed.add(rows)

    def volume(self, rows: int) -> Volume:
        """Return batches and tokens of the data at this size, computed once."""
        if rows not in self.volumes:
            self.volumes[rows] = self.work_probe.volume(rows)
        return self.volumes[rows]

    def seconds_of_work(self, rows: int) -> float:
        """Return the time for all data in batches of `rows`; infinite if a step does not fit."""
        speed = self.speed(rows)
        return self.num_rows / speed if speed else math.inf

    def speed(self, rows: int) -> float:
        """Return the rows of the data per second in batches of `rows`."""
        volume = self.volume(rows)
        constant, each = self.prefill
        return self.num_rows / (volume.batches * constant + volume.tokens * each + self.seconds_of_decoding(rows))

    def seconds_of_decoding(self, rows: int) -> float:
        """Return the time of all decode steps in batches of `rows`; the last batch may be smaller."""
        if not self.work_probe.new_tokens:
            return 0.0
        steps = list(self.steps.items())
        full, rest = divmod(self.num_rows, rows)
        return self.work_probe.new_tokens * (full * between(steps, rows) + (between(steps, rest) if rest else 0.0))


def with_verdict(probe: ProbeResult, budget: int) -> ProbeResult:
    """Return the probe with the verdict for a budget.

    Nothing fits where nothing is left, even if the probe reused memory that the process holds and took none.
    """
    if probe.taken_bytes is None:
        return probe
    return replace(probe, verdict="fits" if probe.taken_bytes <= budget and budget > 0 else "too large")


def summary_line(result: BatchSize, probe: Probe) -> str:
    """Return a line for the log."""
    new = f" and {counted(probe.new_tokens, 'new token')}" if probe.new_tokens else ""
    probes = f"{counted(len(result.probes), 'probe')} in {result.seconds:.1f} s"
    return (
        f"batch size for {probe.purpose}: {counted(result.rows, 'row')} of at most "
        f"{counted(probe.prompt_tokens, 'token')}{new} on {result.device}, up to {result.max_fitting:,} fit; "
        f"{probes if result.origin == 'tuned' else 'cached size, checked again'}"
    )


def too_large(runner: ProbeRunner, probe: ProbeResult, *, budget: int) -> str:
    """Return the error message for work that does not fit on this device, with what would help."""
    work_probe = runner.work_probe
    new = f" and {counted(work_probe.new_tokens, 'new token')}" if work_probe.new_tokens else ""
    if probe.taken_bytes is None:
        needs = "takes more than the device has; "
    elif probe.taken_bytes > budget:
        needs = f"takes {gigabytes(probe.taken_bytes)}, {gigabytes(probe.taken_bytes - budget)} too much; "
    else:
        needs = "needs memory; "
    shorter = "preprocessing.global_max_sequence_length"
    if work_probe.new_tokens:
        shorter += " or generation.max_new_tokens"
    less = ", trainer.gradient_checkpointing: true" if work_probe.purpose == "training" else ""
    sum_of_it = runner.memory.describe()
    more = "a larger trainer.memory_budget, " if sum_of_it.startswith("memory_budget") else ""
    return (
        f"not even one row fits for {work_probe.purpose}: one of {counted(work_probe.prompt_tokens, 'token')}{new} "
        f"{needs}{gigabytes(budget)} may be taken ({sum_of_it}). Write {more}a smaller {shorter}{less}, "
        "quantization: {bits: 4}, or a smaller base_model"
    )
