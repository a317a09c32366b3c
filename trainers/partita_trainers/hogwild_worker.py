"""What a worker of hogwild does: claim a batch, and write its sparse update into weights that all workers share.

Recht, Re, Wright and Niu 2011, "Hogwild!". Nobody waits for anybody while weights are read and written: two workers
that change the same numbers at the same time may lose one change, which is rare where each touches few. What counts,
the steps that were claimed and the sums of losses, is counted under a lock.
"""

import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

from partita_trainers.bags import Bags, chosen
from partita_trainers.interrupt import end_with_parent

CONTEXT = torch.multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of torch, held or not
FIRST_SUM = 1e-6
"""Where Adagrad's sums begin. From 0, an update that is lost in a race would leave a division by nothing."""


@dataclass
class SharedCounters:
    """What all workers count together; each access but those of the parent between epochs holds the lock."""

    step: Any = field(default_factory=lambda: CONTEXT.Value("q", 0))
    """The next batch that nobody has claimed."""
    sums: Any = field(default_factory=lambda: CONTEXT.RawArray("d", 2))
    """Sum of the losses, and number of rows, under the lock of `step`."""
    stop: Any = field(default_factory=lambda: CONTEXT.RawValue("b", 0))
    """Whether no more batches are to be claimed. Without a lock: a worker that was killed may hold one."""

    @property
    def claimed(self) -> int:
        """Batches that were claimed so far, read without the lock for the same reason."""
        return int(self.step.get_obj().value)

    def claim(self, until: int) -> int | None:
        """The number of a batch before `until` for this worker alone; None where there is none."""
        with self.step.get_lock():
            number = int(self.step.value)
            if self.stop.value or number >= until:
                return None
            self.step.value = number + 1
            return number

    def add(self, loss: float, rows: int) -> None:
        """Count what was done."""
        with self.step.get_lock():
            self.sums[0] += loss
            self.sums[1] += rows


@dataclass(frozen=True)
class SharedState:
    """What workers are given: tensors in shared memory, numbers and counters."""

    module: torch.nn.Module
    """The weights."""
    sums: tuple[torch.Tensor, ...]
    """Of Adagrad, the sum of squared gradients of each parameter; empty for sgd."""
    rows: Bags
    """All training rows."""
    seed: int
    batch_size: int
    learning_rate: float
    counts: SharedCounters

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a pass over the rows."""
        return -(-len(self.rows) // self.batch_size)

    def order(self, epoch: int) -> torch.Tensor:
        """Rows of a pass in the order in which they are claimed."""
        return torch.from_numpy(np.random.default_rng([self.seed, epoch]).permutation(len(self.rows)))


def work(shared: SharedState, link: Connection) -> None:
    """The life of a worker: an epoch for each number that comes, which says where it ends; None is the end.

    The CPU seconds that an epoch took go back, or the traceback of what was raised.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and says what to do
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    # Without a word from us torch warns of the gradients that its own embedding makes.
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # torch has no types there
    try:
        link.send(0.0)  # ready
        while (until := link.recv()) is not None:
            started = time.process_time()
            train_epoch(shared, until=until)
            link.send(time.process_time() - started)
    except EOFError:
        return
    except Exception:
        link.send(traceback.format_exc())


def train_epoch(shared: SharedState, *, until: int) -> None:
    """Claim batches of one epoch until there is none before `until`. Raises FloatingPointError for a loss of nan."""
    per_epoch, size, counts = shared.steps_per_epoch, shared.batch_size, shared.counts
    order_N = shared.order((until - 1) // per_epoch)
    while (step := counts.claim(until)) is not None:
        first = step % per_epoch * size
        batch = chosen(shared.rows, order_N[first : first + size])
        loss = learn(shared, batch)
        if loss != loss:
            raise FloatingPointError(f"the loss of step {step + 1} is not a number")
        counts.add(loss, len(batch))


def learn(shared: SharedState, batch: Bags) -> float:
    """One change of the weights by the mean loss of some rows; the sum of their losses."""
    logits_NC = shared.module(batch.ids_K, batch.starts_N1[:-1])
    total = torch.nn.functional.cross_entropy(logits_NC, batch.labels_N, reduction="sum")
    torch.autograd.backward(total / len(batch))
    with torch.no_grad():
        for place, parameter in enumerate(shared.module.parameters()):
            change(parameter, shared.sums[place] if shared.sums else None, rate=shared.learning_rate)
            parameter.grad = None
    return float(total.detach())


def first_sums(module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Where Adagrad's sums of squared gradients begin, one tensor for each parameter."""
    return tuple(torch.full_like(parameter, FIRST_SUM, requires_grad=False) for parameter in module.parameters())


def change(parameter: torch.nn.Parameter, sums: torch.Tensor | None, *, rate: float) -> None:
    """A step against the gradient, by Adagrad where there are `sums`; of a sparse one only its rows are touched.

    Not torch.optim: its first use imports a compiler, 2.5 seconds of each worker, and its step takes longer.
    """
    gradient = parameter.grad
    assert gradient is not None, "all parameters are in the loss"
    if not gradient.is_sparse:
        if sums is None:
            parameter.sub_(gradient, alpha=rate)
        else:
            parameter.addcdiv_(gradient, sums.addcmul_(gradient, gradient).sqrt(), value=-rate)
        return
    gradient = gradient.coalesce()
    rows, values = gradient.indices()[0], gradient.values()
    if sums is not None:
        sums.index_add_(0, rows, values * values)
        values = values / sums[rows].sqrt()
    parameter.index_add_(0, rows, values, alpha=-rate)
