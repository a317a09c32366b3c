"""From a trial and a device to a batch size: probes at the worst case, the time of the whole data, a choice.

The cost is bounded: a probe that would take more than a tenth of the work itself, and more than half a second, is made
only where memory is short, and steps of larger batches are then timed only where these promise to save far more.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from partita_schema.counted import counted
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

MOST_ROWS = 65_535
"""Attention kernels refuse to start beyond: a dimension of their grid has 16 bits."""
SHARE_OF_THE_WORK = 0.1
"""What finding a size may take, as a share of the work it is found for."""
NOT_WORTH_SAVING = 0.5
"""Seconds that it may take whatever the work."""
SHORT_SECONDS = 0.25
"""A run that is shorter is timed once more, apart from the measuring of memory."""
MANY_ROWS = 64
"""Rows from which on the next size whose steps are timed is twice as large; before it is four times."""
FAR_ABOVE = 8
"""How many times the size that would be chosen has to fit for nobody to mind how many exactly."""
UNPROVEN = 0.97
"""Share of what is foretold to fit that is told, where it was not tried."""
WORTH_TELLING = 5.0
"""Seconds of a probe from which on a person would like to know what is going on."""
MORE_MEMORY = 1.25
"""How much more memory than when a size was found makes it worth finding again."""

Sizes = Callable[[int], Iterable[int]]
"""Sizes that may be chosen, in ascending order, none above a largest one."""


def tune(
    bench: ProbeRunner,
    *,
    device: str,
    max_rows: int | None = None,
    sizes: Sizes = candidate_sizes,
) -> BatchSize:
    """The batch size for the work of a bench: what fits the memory, and what is fastest on the data.

    `max_rows` is the user's limit; `sizes` are those that may be chosen. Raises OutOfMemory where not even one row
    fits.
    """
    started, trial = time.perf_counter(), bench.work_probe
    search = BatchSizeSearch(bench, cap=capped(trial, max_rows), sizes=sizes)
    search.probe_memory()
    best, fits = search.best(), search.max_fitting
    looked_at = sorted({*(rows for rows in sizes(fits) if rows <= 4 * best), best})
    found = BatchSize(
        rows=best,
        origin="tuned",
        device=device,
        max_fitting=fits,
        best=best,
        probes=tuple(replace(probe, rows_per_second=search.speed(probe.rows)) for probe in search.probes),
        throughputs=tuple((rows, search.speed(rows)) for rows in looked_at),
        out_of_memory=any(probe.verdict == "out of memory" for probe in search.probes),
        prompt_tokens=trial.prompt_tokens,
        new_tokens=trial.new_tokens,
        budget_bytes=search.budget,
        seconds=time.perf_counter() - started,
    )
    logger.info("%s", summary_line(found, trial))
    return found


def verify(
    bench: ProbeRunner,
    known: BatchSize,
    *,
    max_rows: int | None = None,
    sizes: Sizes = candidate_sizes,
) -> BatchSize | None:
    """A size that was found earlier, tried once more; None where it has to be found again.

    Where it was far from filling the memory, and so was never tried, the largest that was tried is. Where the work
    allows fewer rows now, it is the largest of `sizes` that it allows. It has to be found again where its probe does
    not fit, and where it was held down by memory of which there is more now. Raises OutOfMemory where not even the
    warm-up fits.
    """
    started, trial = time.perf_counter(), bench.work_probe
    cap = capped(trial, max_rows)
    rows = max(sizes(min(known.rows, cap)))
    warm_up(bench)
    budget = bench.budget()
    if known.budget_bytes is None or known.max_fitting is None:
        return None
    if budget > MORE_MEMORY * known.budget_bytes and 2 * known.rows > max(sizes(known.max_fitting)):
        return None
    evidence = [judged(earlier, budget) for earlier in known.probes]
    tried = rows
    if not known.out_of_memory and is_comfortable(evidence, rows, budget=budget):
        tried = min(rows, max(earlier.rows for earlier in evidence))
    probe = judged(bench.probe(tried), budget)
    if probe.verdict != "fits":
        return None
    fits = known.max_fitting
    if budget < known.budget_bytes:
        evidence = [earlier for earlier in evidence if earlier.rows != tried]
        fits = min(fits, predicted_rows([*evidence, probe], budget=budget))
    found = replace(
        known,
        rows=rows,
        origin="cached",
        max_fitting=max(rows, min(fits, cap)),
        best=rows,
        probes=(replace(probe, rows_per_second=dict(known.throughputs).get(tried)),),
        out_of_memory=False,
        prompt_tokens=trial.prompt_tokens,
        new_tokens=trial.new_tokens,
        budget_bytes=budget,
        seconds=time.perf_counter() - started,
    )
    logger.info("%s", summary_line(found, trial))
    return found


def warm_up(bench: ProbeRunner) -> None:
    """Make what stays on the device once work has begun, such as the state of optimizers. Raises OutOfMemory."""
    if not bench.warm_up():
        probe = ProbeResult(1, "out of memory", used_bytes=None, taken_bytes=None)
        raise OutOfMemory(too_large(bench, probe, budget=bench.budget()))


def capped(probe: Probe, max_rows: int | None) -> int:
    """Most rows that are worth trying."""
    return min(probe.max_rows, max_rows or MOST_ROWS, MOST_ROWS)


class BatchSizeSearch:
    """One search: what it has tried, and what that foretells."""

    def __init__(self, bench: ProbeRunner, *, cap: int, sizes: Sizes) -> None:
        self.bench, self.trial, self.cap, self.sizes = bench, bench.work_probe, cap, sizes
        self.probes: list[ProbeResult] = []
        self.prefills: dict[int, float] = {}
        """Seconds of reading prompts of the greatest length, by rows."""
        self.steps: dict[int, float] = {}
        """Seconds of a decode step at the usual length, by rows."""
        self.confirmed: set[int] = set()
        """Those that were timed twice."""
        self.step_cost = 0.0
        """Seconds that timing the last of them took."""
        self.volumes: dict[int, Volume] = {}
        self.num_rows = self.volume(1).rows or self.volume(1).batches
        self.started = time.perf_counter()
        warm_up(bench)
        self.budget = bench.budget()

    def probe_memory(self) -> None:
        """Try sizes until the largest that fits is known, or until what is of use is known to fit.

        Raises OutOfMemory where a single row does not fit.
        """
        while (rows := self.next_rows()) is not None:
            probe = judged(self.bench.probe(rows), self.budget)
            if rows == 1 and probe.verdict != "fits":
                raise OutOfMemory(too_large(self.bench, probe, budget=self.budget))
            self.probes.append(self.timed(probe))
            level = logging.INFO if probe.seconds > WORTH_TELLING else logging.DEBUG
            taken = gigabytes(probe.taken_bytes) if probe.taken_bytes is not None else "refused"
            logger.log(level, "tried %s rows: %s, %s in %.1f s", f"{rows:,}", probe.verdict, taken, probe.seconds)

    def timed(self, probe: ProbeResult) -> ProbeResult:
        """The probe with times that measuring has not stretched; those of the first, and of all that are short.

        Where measuring does not slow work down, times count as they are as well.
        """
        if probe.prefill_seconds is None:
            return probe
        if self.probes and probe.prefill_seconds >= SHORT_SECONDS:
            if not self.bench.memory.slows_work:
                self.prefills[probe.rows] = probe.prefill_seconds
            return probe
        started = time.perf_counter()
        timing = self.bench.time(probe.rows)
        if timing is None:  # without exact allocation it does not fit
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
        """The size to try next. Where a probe costs too much, none larger than what would be chosen needs proof.

        The largest that fits is then foretold where it is far above the one that would be chosen, and tried elsewhere.
        """
        rows = next_rows(self.probes, cap=self.cap, budget=self.budget)
        if rows is None or not self.probes or self.is_affordable(rows):
            return rows
        wanted = self.best()
        if wanted >= self.max_fitting:
            return rows  # memory decides, and every row counts
        if not is_comfortable(self.probes, wanted, budget=self.budget):
            return next_rows(self.probes, cap=min(wanted, self.cap), budget=self.budget)
        return None if self.max_fitting >= min(self.cap, FAR_ABOVE * wanted) else rows

    def is_affordable(self, rows: int) -> bool:
        """Whether a probe stays within its share of the work."""
        constant, each = self.prefill
        foretold = constant + each * rows * self.trial.prompt_tokens
        before = self.probes[-1]
        expected = max(foretold, before.seconds * rows / before.rows if before.rows > 1 else 0.0)
        best = self.best()
        return self.allows(expected, rows=best)

    def allows(self, seconds: float, *, rows: int) -> bool:
        """Whether so many seconds more stay within what finding a size may take of the work in batches of `rows`."""
        spent = time.perf_counter() - self.started
        return spent + seconds <= max(NOT_WORTH_SAVING, SHARE_OF_THE_WORK * self.seconds_of_work(rows))

    def pays(self, seconds: float, *, rows: int, larger: int) -> bool:
        """Whether larger batches promise to save more than twice as many seconds."""
        return self.seconds_of_work(rows) - self.seconds_of_work(larger) > 2 * seconds

    @property
    def prefill(self) -> tuple[float, float]:
        """Seconds of a batch, and of each token in it."""
        return line([(rows * self.trial.prompt_tokens, seconds) for rows, seconds in self.prefills.items()])

    @property
    def max_fitting(self) -> int:
        """The largest size that fits, as far as that is known."""
        proven = largest_fitting(self.probes, cap=self.cap, budget=self.budget)
        if next_rows(self.probes, cap=self.cap, budget=self.budget) is None:
            return proven
        return min(self.cap, max(proven, int(UNPROVEN * predicted_rows(self.probes, budget=self.budget))))

    def best(self) -> int:
        """The smallest size that comes within 2 % of the fastest of those that fit."""
        largest = self.max_fitting
        if self.trial.new_tokens:
            largest = self.time_decoding(largest)
        return smallest_near_best([rows for rows in self.sizes(largest) if rows <= largest], self.speed)

    def time_decoding(self, largest: int) -> int:
        """Time decode steps of growing batches, up to where more rows promise nothing; the last size comes back."""
        rows = 1
        self.time_step(rows)
        while rows < largest:
            seen = [size for size in self.sizes(largest) if size <= rows]
            ahead = [size for size in self.sizes(largest) if size > rows]
            if len(self.steps) > 1 and rows >= 4 and smallest_near_best([*seen, *ahead], self.speed) <= rows:
                if rows in self.confirmed or self.step_cost >= SHORT_SECONDS:
                    break
                # A step that something else held up would end the search at a fraction of what is best.
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
        """Time a decode step; `again`, the shorter of two counts."""
        if rows in self.steps and not again:
            return
        started = time.perf_counter()
        seconds = self.bench.step(rows)
        self.step_cost = time.perf_counter() - started
        # A size that cannot even decode is as slow as can be; the search for memory finds it out as well.
        found = math.inf if seconds is None else seconds
        self.steps[rows] = min(found, self.steps.get(rows, math.inf))
        if again:
            self.confirmed.add(rows)

    def volume(self, rows: int) -> Volume:
        if rows not in self.volumes:
            self.volumes[rows] = self.trial.volume(rows)
        return self.volumes[rows]

    def seconds_of_work(self, rows: int) -> float:
        """What all the data takes in batches of this size; without end where a step does not fit."""
        speed = self.speed(rows)
        return self.num_rows / speed if speed else math.inf

    def speed(self, rows: int) -> float:
        """Rows of the data a second in batches of this size."""
        volume = self.volume(rows)
        constant, each = self.prefill
        return self.num_rows / (volume.batches * constant + volume.tokens * each + self.seconds_of_decoding(rows))

    def seconds_of_decoding(self, rows: int) -> float:
        """What all steps take in batches of this size, the last of which may be smaller."""
        if not self.trial.new_tokens:
            return 0.0
        steps = list(self.steps.items())
        full, rest = divmod(self.num_rows, rows)
        return self.trial.new_tokens * (full * between(steps, rows) + (between(steps, rest) if rest else 0.0))


def judged(probe: ProbeResult, budget: int) -> ProbeResult:
    """The probe with the verdict that a budget gives it."""
    if probe.taken_bytes is None:
        return probe
    return replace(probe, verdict="fits" if probe.taken_bytes <= budget else "too large")


def summary_line(found: BatchSize, probe: Probe) -> str:
    """A line for the log."""
    new = f" and {counted(probe.new_tokens, 'new one')}" if probe.new_tokens else ""
    how = (
        f"{counted(len(found.probes), 'probe')}, {found.seconds:.1f} s"
        if found.origin == "tuned"
        else "known, tried again"
    )
    return (
        f"batch size for {probe.purpose}: {counted(found.rows, 'row')} (up to {found.max_fitting:,} fit) of at most "
        f"{counted(probe.prompt_tokens, 'token')}{new}, on {found.device}; {how}"
    )


def too_large(bench: ProbeRunner, probe: ProbeResult, *, budget: int) -> str:
    """Why nothing can be done on this device, and what would help."""
    trial = bench.work_probe
    new = f" and {counted(trial.new_tokens, 'new token')}" if trial.new_tokens else ""
    needs = "more than the device has" if probe.taken_bytes is None else gigabytes(probe.taken_bytes)
    short = f", {gigabytes(probe.taken_bytes - budget)} too much" if probe.taken_bytes is not None else ""
    shorter = "preprocessing.global_max_sequence_length"
    if trial.new_tokens:
        shorter += " or generation.max_new_tokens"
    less = ", trainer.gradient_checkpointing: true" if trial.purpose == "training" else ""
    sum_of_it = bench.memory.describe()
    more = "a larger trainer.memory_budget, " if sum_of_it.startswith("memory_budget") else ""
    return (
        f"not even one row fits for {trial.purpose}: one of {counted(trial.prompt_tokens, 'token')}{new} takes "
        f"{needs}{short}; "
        f"{gigabytes(budget)} may be taken ({sum_of_it}). Write {more}a smaller {shorter}{less}, "
        "quantization: {bits: 4}, or a smaller base_model"
    )
