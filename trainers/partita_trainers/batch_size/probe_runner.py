"""What sizes are tried on: the work at its worst, and the memory of the devices that it runs on.

Several ranks try a size at the same moment, and what counts is the worst that any of them has seen: memory that ended
anywhere, the largest peak, the longest time, the smallest budget. Rank 0 alone decides what is tried, so that no clock
and no cache can let ranks go apart.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from partita_trainers.batch_size.memory import DeviceMemory, attempt
from partita_trainers.batch_size.probe import BatchSize, Probe, ProbeResult, Timing
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup, synchronized_errors

ASKED, FOUND = "a batch size to try", "what a batch size came to"


class ProbeRunner:
    """A trial and the memory of its device, on one rank or on several."""

    def __init__(self, probe: Probe, memory: DeviceMemory, *, process_group: ProcessGroup = SINGLE_PROCESS) -> None:
        """Of several ranks, all but the first `follow`."""
        self.work_probe, self.memory, self.process_group = probe, memory, process_group
        self.ended = process_group.world_size == 1

    def warm_up(self) -> bool:
        """Make what stays on the device once work has begun, such as the state of optimizers; whether it fits."""
        return all(self._everywhere("warm_up"))

    def budget(self) -> int:
        """Bytes that a batch may take on every device."""
        budgets: list[int] = self._everywhere("budget")
        return min(budgets)

    def probe(self, rows: int) -> ProbeResult:
        """Do the work with so many rows: peak memory and times; whether that is too much is for the caller to say."""
        return worst(self._everywhere("probe", rows))

    def time(self, rows: int) -> Timing | None:
        """Times that measuring memory has not stretched; None where it does not fit."""
        found = self._everywhere("time", rows)
        if None in found:
            return None
        return Timing(max(one.prefill_seconds for one in found), max(one.decode_seconds for one in found))

    def step(self, rows: int) -> float | None:
        """Seconds of a decode step; None where it does not fit."""
        found = self._everywhere("step", rows)
        return None if None in found else max(found)

    def end(self, found: BatchSize | None) -> None:
        """Tell the ranks that follow what was found; None where an error ended the search."""
        if not self.ended:
            self.ended = True
            self.process_group.all_gather_object(("end", found), ASKED)

    def follow(self) -> BatchSize | None:
        """Try what rank 0 asks for, up to its end; what it has found, None where an error ended it."""
        while True:
            name, argument = self.process_group.all_gather_object(("", None), ASKED)[0]
            if name == "end":
                found: BatchSize | None = argument
                return found
            self._all_of(name, argument)

    def _everywhere(self, name: str, argument: int | None = None) -> list[Any]:
        """What an operation comes to on each rank."""
        try:
            if self.process_group.world_size > 1:
                self.process_group.all_gather_object((name, argument), ASKED)
            return self._all_of(name, argument)
        except BaseException:
            self.ended = True  # the others know, or are gone, or are being interrupted as well
            raise

    def _all_of(self, name: str, argument: int | None) -> list[Any]:
        """What each rank gives, all of which do it now. What is raised on one ends all of them."""
        found = None
        with synchronized_errors(self.process_group, FOUND):
            found = OPERATIONS[name](self, argument)
        return self.process_group.all_gather_object(found, FOUND)

    # On this rank alone

    def _warm_up(self, _: None) -> bool:
        with self.memory.guard():
            _nothing, failure = attempt(self.work_probe.warm_up)
        self.memory.clear()
        return failure is None

    def _budget(self, _: None) -> int:
        return self.memory.budget()

    def _probe(self, rows: int) -> ProbeResult:
        started = time.perf_counter()
        with self.memory.measure() as peak:
            timing, failure = attempt(lambda: self.work_probe.run(rows))
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


OPERATIONS: dict[str, Callable[[ProbeRunner, Any], Any]] = {
    "warm_up": ProbeRunner._warm_up,
    "budget": ProbeRunner._budget,
    "probe": ProbeRunner._probe,
    "time": ProbeRunner._time,
    "step": ProbeRunner._step,
}
"""What rank 0 may ask for."""


def worst(probes: Sequence[ProbeResult]) -> ProbeResult:
    """One probe for what several ranks have seen of the same size."""
    refused = [probe for probe in probes if probe.taken_bytes is None]
    if refused:
        return replace(refused[0], seconds=max(probe.seconds for probe in probes))
    return replace(
        max(probes, key=lambda probe: probe.taken_bytes or 0),
        prefill_seconds=max(probe.prefill_seconds or 0.0 for probe in probes),
        decode_seconds=max(probe.decode_seconds or 0.0 for probe in probes),
        seconds=max(probe.seconds for probe in probes),
    )
