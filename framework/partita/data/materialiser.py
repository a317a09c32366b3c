"""From plans to tensors: rows padded on the right, made here or in worker processes, the same in both.

B rows of a batch, T tokens of its longest row.
"""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from partita.data.encoded import EncodedRows
from partita.data.encoder import IGNORED
from partita.data.planner import Plan
from partita_schema.data import LoaderOptions
from partita_schema.errors import DataError
from partita_trainers.base import Batch, Step


class PlannedStep(NamedTuple):
    """A step before its tensors exist."""

    batches: Plan
    cursor: dict[str, Any]
    epoch: float


def collate(encoded: EncodedRows, rows: np.ndarray, *, pad_token_id: int) -> Batch:
    """The rows as a batch. Without rows it has B = 0 and T = 0."""
    starts_B = encoded.starts_N1[rows]
    lengths_B = encoded.starts_N1[rows + 1] - starts_B
    shape = len(rows), int(lengths_B.max(initial=0))
    input_ids_BT = np.full(shape, pad_token_id, dtype=np.int64)
    labels_BT = np.full(shape, IGNORED, dtype=np.int64)
    for place, (row, length) in enumerate(zip(rows.tolist(), lengths_B.tolist(), strict=True)):
        ids = encoded.ids(row)
        input_ids_BT[place, :length] = ids
        for start, end in encoded.spans(row).tolist():
            labels_BT[place, start:end] = ids[start:end]
    keys = tuple(encoded.keys.take(rows))
    return Batch(torch.from_numpy(input_ids_BT), torch.from_numpy(labels_BT), torch.from_numpy(lengths_B), keys)


class StepDataset(Dataset[Step]):
    """Steps by their plan: what worker processes hold."""

    def __init__(self, encoded: EncodedRows, *, pad_token_id: int) -> None:
        self._encoded = encoded
        self._pad_token_id = pad_token_id

    def __getitem__(self, planned: PlannedStep) -> Step:
        batches = [collate(self._encoded, rows, pad_token_id=self._pad_token_id) for rows in planned.batches]
        return Step(tuple(batches), cursor=planned.cursor, epoch=planned.epoch)


class PlannedSteps(Sampler[PlannedStep]):
    """Plans in their order."""

    def __init__(self, plans: Iterable[PlannedStep]) -> None:
        self._plans = plans

    def __iter__(self) -> Iterator[PlannedStep]:
        return iter(self._plans)


def materialise(
    dataset: StepDataset,
    plans: Iterable[PlannedStep],
    *,
    options: LoaderOptions,
    start_method: str | None = None,
) -> Iterator[Step]:
    """Steps in the order of their plans, for any number of workers. Raises DataError when a worker dies.

    `start_method` is how workers are started (fork, spawn, forkserver); None for the platform's way.
    """
    loader = DataLoader(
        dataset,
        sampler=PlannedSteps(plans),
        batch_size=None,
        num_workers=options.workers,
        prefetch_factor=options.prefetch if options.workers else None,
        collate_fn=as_it_is,
        worker_init_fn=prepare_worker,
        multiprocessing_context=start_method if options.workers else None,
        generator=torch.Generator(),  # its own, or every new iterator would draw from the global random state
        in_order=True,
    )
    died = None
    try:
        with child_signals_as_before():
            steps = iter(loader)
        yield from steps
    except (RuntimeError, OSError, EOFError) as error:
        # A broken connection is a worker that died before its tensors were taken over.
        if not options.workers or (isinstance(error, RuntimeError) and "DataLoader worker" not in str(error)):
            raise
        died = " ".join(str(error).split()).rstrip(". ") or type(error).__name__
    if died is not None:  # outside of the handler, so that nothing holds the iterator and its other workers end
        del steps
        raise DataError(f"a data worker died ({died}); write fewer data.loader.workers, or 0")


@contextmanager
def child_signals_as_before() -> Iterator[None]:
    """Undo the handler that torch sets for the death of children when it starts workers.

    It raises wherever the program happens to be, such as in the middle of a checkpoint. Without it a dead worker is
    noticed when its batch is waited for, within five seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)


def as_it_is(step: Any) -> Any:
    return step


def prepare_worker(worker: int) -> None:
    # A forked tokenizer that was used before waits for threads that are not there.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
