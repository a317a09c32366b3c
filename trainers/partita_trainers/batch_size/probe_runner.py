"""Runs probes and measures their memory, on one rank or on all.

All ranks probe a size at the same time, and the worst result counts: out of memory on any rank, the largest peak, the
longest time, the smallest budget. Rank 0 alone decides what to probe, so that clocks and caches cannot make ranks
diverge.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from partita_schema.common.text import counted
from partita_trainers.batch_size.device_errors import attempt, is_too_large
from partita_trainers.batch_size.memory import DeviceMemory
from partita_trainers.batch_size.probe import BatchSize, Probe, ProbeResult, Timing
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup, synchronized_errors

logger = logging.getLogger(__name__)

BATCH_SIZE_REQUEST, PROBE_RESULT = "a batch size to try", "the result of a batch size"


class ProbeRunner:
    """A probe and the memory of its device, on one rank or on several."""

    def __init__(self, probe: Probe, memory: DeviceMemory, *, process_group: ProcessGroup = SINGLE_PROCESS) -> None:
        """In a group of several ranks, all ranks except rank 0 call `follow`."""
        self.work_probe, self.memory, self.process_group = probe, memory, process_group
        self.ended = process_group.world_size == 1

    def warm_up(self) -> bool:
        """Allocate what stays on the device once work has begun, such as optimizer state. Return whether it fits."""
        return all(self._everywhere("warm_up"))

    def budget(self) -> int:
        """Return the bytes that a batch may take on every device."""
        budgets: list[int] = self._everywhere("budget")
        return min(budgets)

    def probe(self, rows: int) -> ProbeResult:
        """Do the work with `rows` rows and return its peak memory and times.

        The caller compares them with the budget.
        """
        return worst(self._everywhere("probe", rows))

    def time(self, rows: int) -> Timing | None:
        """Return times that are not slowed down by measuring memory; None if the work does not fit."""
        timings = self._everywhere("time", rows)
        if None in timings:
            return None
        return Timing(max(one.prefill_seconds for one in timings), max(one.decode_seconds for one in timings))

    def step(self, rows: int) -> float | None:
        """Return the seconds of a decode step; None if it does not fit."""
        seconds = self._everywhere("step", rows)
        return None if None in seconds else max(seconds)

    def end(self, size: BatchSize | None) -> None:
        """Send the result to the other ranks; None if an error ended the search."""
        if not self.ended:
            self.ended = True
            self.process_group.all_gather_object(("end", size), BATCH_SIZE_REQUEST)

    def follow(self) -> BatchSize | None:
        """Run what rank 0 requests until it ends. Return its result; None if an error ended the search."""
        while True:
            name, argument = self.process_group.all_gather_object(("", None), BATCH_SIZE_REQUEST)[0]
            if name == "end":
                result: BatchSize | None = argument
                return result
            self._all_of(name, argument)

    def _everywhere(self, name: str, argument: int | None = None) -> list[Any]:
        """Run an operation on all ranks and return their results."""
        try:
            if self.process_group.world_size > 1:
                self.process_group.all_gather_object((name, argument), BATCH_SIZE_REQUEST)
            return self._all_of(name, argument)
        except BaseException:
            self.ended = True  # the other ranks failed too, are gone, or are being interrupted
            raise

    def _all_of(self, name: str, argument: int | None) -> list[Any]:
        """Run an operation on this rank and gather the results of all. An error on one rank ends all of them."""
        result = None
        with synchronized_errors(self.process_group, PROBE_RESULT):
            result = self.OPERATIONS[name](self, argument)
        return self.process_group.all_gather_object(result, PROBE_RESULT)

    # Operations of this rank

    def _warm_up(self, _: None) -> bool:
        with self.memory.guard():
            _nothing, failure = attempt(self.work_probe.warm_up)
        warn_if_too_large(failure, rows=1)
        self.memory.clear()
        return failure is None

    def _budget(self, _: None) -> int:
        return self.memory.budget()

    def _probe(self, rows: int) -> ProbeResult:
        started = time.perf_counter()
        with self.memory.measure() as peak:
            timing, failure = attempt(lambda: self.work_probe.run(rows))
        warn_if_too_large(failure, rows=rows)
        if timing is None or failure is not None:
            seconds = time.perf_counter() - started
            return ProbeResult(rows, "out of memory", used_bytes=None, taken_bytes=None, seconds=seconds)
        estimated = self.work_probe.estimated_bytes(rows) if peak.taken_bytes is None else None
        return ProbeResult(
            rows,
            "fits",
            used_bytes=peak.used_bytes if estimated is None else estimated,
            taken_bytes=peak.taken_bytes if estimated is None else estimated,
            prefill_seconds=timing.prefill_seconds,
            decode_seconds=timing.decode_seconds,
            seconds=time.perf_counter() - started,
        )

    def _time(self, rows: int) -> Timing | None:
        with self.memory.guard():
            timing, _ = attempt(lambda: self.work_probe.run(rows))
        return timing

    def _step(self, rows: int) -> float | None:
        with self.memory.guard():
            seconds, failure = attempt(lambda: self.work_probe.decode_step(rows))
        return seconds if failure is None else None

    OPERATIONS: ClassVar[dict[str, Callable[["ProbeRunner", Any], Any]]] = {
        "warm_up": _warm_up,
        "budget": _budget,
        "probe": _probe,
        "time": _time,
        "step": _step,
    }
    """Operations that rank 0 may request."""


def warn_if_too_large(failure: Exception | None, *, rows: int) -> None:
    """Warn of an error that is treated as caused by a batch that is too large, because it may have another cause."""
    if failure is not None and is_too_large(failure):
        logger.warning("a batch of %s does not run and counts as too large: %s", counted(rows, "row"), failure)


def worst(probes: Sequence[ProbeResult]) -> ProbeResult:
    """Merge the results of several ranks for the same size into the worst one."""
    refused = [probe for probe in probes if probe.taken_bytes is None]
    if refused:
        return replace(refused[0], seconds=max(probe.seconds for probe in probes))
    return replace(
        max(probes, key=lambda probe: probe.taken_bytes or 0),
        prefill_seconds=max(probe.prefill_seconds or 0.0 for probe in probes),
        decode_seconds=max(probe.decode_seconds or 0.0 for probe in probes),
        seconds=max(probe.seconds for probe in probes),
    )
