"""Batches of tokenized training rows as optimizer steps, resumable at any step."""

import copy
import itertools
import math
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from partita.data.batching.collate import Collate, collate
from partita.data.batching.data_position import DataPosition, Resume, continued, shortened_inputs
from partita.data.batching.indexed import PLANNER_VERSION, IndexedPlanner, Order, PlannedStep
from partita.data.batching.settings import BatchSettings
from partita.data.tokenized import TokenizedDataset
from partita_schema.errors import DataError, ResumeError
from partita_trainers.base import GlobalBatch
from partita_trainers.process_group import SINGLE_PROCESS, ProcessGroup


@dataclass
class StepWaits:
    """How long the consumer of a loader has waited for steps."""

    seconds: float = 0.0
    """From the first request for a step to the arrival of the last one."""
    waited_seconds: float = 0.0
    """Part of these seconds spent waiting for steps."""

    def timed(self, steps: Iterator[GlobalBatch]) -> Generator[GlobalBatch]:
        """Yield the steps unchanged, and time the waits for them."""
        requested = previous = time.perf_counter()
        for step in steps:
            arrived = time.perf_counter()
            self.waited_seconds += arrived - requested
            self.seconds += arrived - previous
            previous = arrived
            yield step
            requested = time.perf_counter()

    def record(self) -> dict[str, float]:
        """Return the times, and `wait_share`, the share of the waits."""
        return asdict(self) | {"wait_share": self.waited_seconds / self.seconds if self.seconds else 0.0}


class IndexedLoader:
    """Yield optimizer steps over tokenized rows, epoch after epoch; implements `partita_trainers.base.Batches`.

    Each step carries the data position after it, so batches that were prefetched but not used are rebuilt on resume.
    The position is the same on every rank, and for any world size.
    """

    def __init__(
        self,
        encoded: TokenizedDataset,
        *,
        settings: BatchSettings,
        pad_token_id: int,
        order: Order | None = None,
        more_inputs: Mapping[str, str] | None = None,
        collate_batch: Collate | None = None,
        resume: Resume = "strict",
        process_group: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        """Plan batches over `encoded`.

        Args:
            encoded: Tokenized rows.
            settings: How the rows are cut into batches and steps.
            pad_token_id: Id that fills short rows.
            order: Order of the rows in an epoch, instead of a permutation.
            more_inputs: Further inputs that decide the batches, such as what `order` is built from, by name.
            collate_batch: Custom collate function.
            resume: What to do if data or plan have changed: see `continued`.
            process_group: The ranks that share the batches of a step.

        Raises:
            DataError: If M is not divisible by the world size, or a row is too long for the policy.
        """
        check_ranks(process_group.world_size, settings.batches_per_step)
        self._planner = IndexedPlanner(
            encoded.lengths,
            policy=settings.policy(),
            batches_per_step=settings.batches_per_step,
            seed=settings.seed,
            order=order,
            name=lambda row: str(encoded.keys[row]),
        )
        self._encoded = encoded
        self._collate = collate_batch or partial(collate, pad_token_id=pad_token_id)
        self._resume: Resume = resume
        self._process_group = process_group
        self._started = False
        versions = {"planner version": str(PLANNER_VERSION), "encoded rows": encoded.fingerprint}
        inputs = encoded.fingerprint_inputs | dict(more_inputs or {}) | settings.fingerprint_inputs() | versions
        self._data_position = DataPosition(shortened_inputs(inputs))
        self._waits = StepWaits()

    @property
    def waits(self) -> dict[str, float]:
        """How long this rank has waited for steps: `seconds`, `waited_seconds` and `wait_share`."""
        return self._waits.record()

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps in the first epoch."""
        return self._planner.count_steps(0)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in the first epoch."""
        return self._planner.count_batches(0)

    @property
    def num_rows(self) -> int:
        """Number of rows in one epoch."""
        return self._planner.num_rows

    def total_steps(self, epochs: float) -> int:
        """Return the number of steps in `epochs` epochs, at least 1. Each epoch is planned to count its steps."""
        whole = math.floor(epochs + 1e-9)
        part = epochs - whole
        steps = sum(self._planner.count_steps(epoch) for epoch in range(whole))
        if part > 1e-9:
            steps += math.ceil(part * self._planner.count_steps(whole) - 1e-9)
        return max(1, steps)

    def from_start(self) -> "IndexedLoader":
        """Return a loader of the same batches from the first step on, timed separately."""
        loader = copy.copy(self)
        vars(loader).update(
            _data_position=DataPosition(self._data_position.fingerprint_inputs), _waits=StepWaits(), _started=False
        )
        return loader

    def load_data_position(self, data_position: Mapping[str, Any]) -> None:
        """Continue after the step that carried `data_position`. Raise ResumeError as `continued` does."""
        inputs = self._data_position.fingerprint_inputs
        loaded = continued(data_position, inputs, resume=self._resume, started=self._started)
        window, taken = position_in_window(loaded.loader_state)
        self._planner.check(loaded.epoch, window, taken, loaded.step)
        self._data_position = loaded

    @property
    def data_position(self) -> Mapping[str, Any]:
        """The position before the first step, as JSON."""
        return self._data_position.to_json()

    def steps(self) -> Iterator[GlobalBatch]:
        """Yield steps from the current position, without end."""
        return self._start(itertools.count(self._data_position.epoch))

    def epoch_steps(self, epoch: int) -> Generator[GlobalBatch]:
        """Yield the steps of an epoch; if the loaded position lies in it, those after the position."""
        return self._start([epoch])

    def merge_data_positions(self, data_positions: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the first position: it is the same on all ranks."""
        return data_positions[0]

    def _start(self, epochs: Iterable[int]) -> Generator[GlobalBatch]:
        self._started = True
        return self._waits.timed(self._step(planned) for epoch in epochs for planned in self._plans(epoch))

    def _plans(self, epoch: int) -> Iterator[PlannedStep]:
        start = (
            self._data_position
            if epoch == self._data_position.epoch
            else DataPosition(self._data_position.fingerprint_inputs, epoch)
        )
        window, taken = position_in_window(start.loader_state)
        return self._planner.steps(epoch, window, taken, start.step)

    def _step(self, planned: PlannedStep) -> GlobalBatch:
        """Build this rank's batches of a step, with the position after the whole step."""
        mine = planned.batches[self._process_group.rank :: self._process_group.world_size]
        after = DataPosition(
            self._data_position.fingerprint_inputs, planned.epoch, planned.step, [planned.window, planned.taken]
        )
        return GlobalBatch(
            tuple(self._collate(self._encoded, batch) for batch in mine),
            data_position=after.to_json(),
            epoch=planned.passed,
        )


def position_in_window(loader_state: Any) -> tuple[int, int]:
    """Return the window and the number of batches taken from it. Raise ResumeError if a saved state is malformed."""
    if loader_state is None:
        return 0, 0
    if (
        isinstance(loader_state, list)
        and len(loader_state) == 2
        and all(type(number) is int and number >= 0 for number in loader_state)
    ):
        return loader_state[0], loader_state[1]
    raise ResumeError("the data position is damaged; continue from an older checkpoint")


def check_ranks(ranks: int, batches_per_step: int) -> None:
    """Raise DataError if the batches of a step cannot be divided evenly among `ranks` processes."""
    if batches_per_step % ranks:
        allowed = [str(number) for number in range(1, batches_per_step + 1) if batches_per_step % number == 0]
        numbers = " or ".join(filter(None, [", ".join(allowed[:-1]), allowed[-1]]))
        raise DataError(
            f"the {batches_per_step:,} batches of a step cannot be shared by {ranks} processes; start {numbers}, or "
            "write a smaller trainer.batch_size for a new run"
        )
