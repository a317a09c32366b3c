"""A hogwild worker: claims batches and writes sparse updates into weights that all workers share.

Recht, Re, Wright and Niu 2011, "Hogwild!". Weights are read and written without locks: if two workers change the same
numbers at the same time, one change may be lost, which is rare because each update touches few. Counters, that is the
claimed steps and the loss sums, are updated under a lock.
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

from partita_trainers.hogwild.bags import Bags, chosen
from partita_trainers.interrupt import end_with_parent

CONTEXT = torch.multiprocessing.get_context("forkserver")
"""Workers are forks of a process that has imported this module and done nothing else.

A fork of the parent process would copy the locks of torch's threads, even held ones.
"""
CONTEXT.set_forkserver_preload([__name__])
FIRST_SUM = 1e-6
"""Initial value of Adagrad's sums. With 0, an update lost in a race would leave a division by zero."""


@dataclass
class SharedCounters:
    """Counters of all workers. Every access holds the lock, except the parent's between epochs."""

    step: Any = field(default_factory=lambda: CONTEXT.Value("q", 0))
    """Index of the next unclaimed batch."""
    sums: Any = field(default_factory=lambda: CONTEXT.RawArray("d", 2))
    """Sum of the losses and number of rows, under the lock of `step`."""
    stop: Any = field(default_factory=lambda: CONTEXT.RawValue("b", 0))
    """Whether to claim no more batches. Has no lock, because a killed worker may hold one."""

    @property
    def claimed(self) -> int:
        """Number of claimed batches, read without the lock because a killed worker may hold it."""
        return int(self.step.get_obj().value)

    def claim(self, until: int) -> int | None:
        """Claim the next batch before `until` and return its index; None if there is none."""
        with self.step.get_lock():
            number = int(self.step.value)
            if self.stop.value or number >= until:
                return None
            self.step.value = number + 1
            return number

    def add(self, loss: float, rows: int) -> None:
        """Add the loss and row count of a batch."""
        with self.step.get_lock():
            self.sums[0] += loss
            self.sums[1] += rows


@dataclass(frozen=True)
class SharedState:
    """Everything the workers share: tensors in shared memory, settings and counters."""

    module: torch.nn.Module
    """The weights."""
    sums: tuple[torch.Tensor, ...]
    """Adagrad's sum of squared gradients of each parameter; empty for sgd."""
    rows: Bags
    """All training rows."""
    seed: int
    batch_size: int
    learning_rate: float
    counts: SharedCounters

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.rows) // self.batch_size)

    def order(self, epoch: int) -> torch.Tensor:
        """Return the row order of an epoch."""
        return torch.from_numpy(np.random.default_rng([self.seed, epoch]).permutation(len(self.rows)))


def work(shared: SharedState, link: Connection) -> None:
    """Run a worker: for each number received, train up to that batch; stop at None.

    Sends back the CPU seconds of each epoch, or the traceback of an error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and stops the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    # Otherwise torch warns about the sparse gradients of its own embedding.
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
    """Claim and train batches of one epoch until none is left before `until`.

    Raises FloatingPointError if a loss is NaN.
    """
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
    """Update the weights by the mean loss of a batch and return the sum of its losses."""
    logits_NC = shared.module(batch.ids_K, batch.starts_Nplus1[:-1])
    total = torch.nn.functional.cross_entropy(logits_NC, batch.labels_N, reduction="sum")
    torch.autograd.backward(total / len(batch))
    with torch.no_grad():
        for index, parameter in enumerate(shared.module.parameters()):
            change(parameter, shared.sums[index] if shared.sums else None, rate=shared.learning_rate)
            parameter.grad = None
    return float(total.detach())


def first_sums(module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the initial sums of squared gradients for Adagrad, one tensor per parameter."""
    return tuple(torch.full_like(parameter, FIRST_SUM, requires_grad=False) for parameter in module.parameters())


def change(parameter: torch.nn.Parameter, sums: torch.Tensor | None, *, rate: float) -> None:
    """Update a parameter by its gradient, with Adagrad if `sums` are given.

    A sparse gradient only touches its own rows. Does not use torch.optim: its first use imports a compiler, 2.5 seconds
    in each worker, and its step is slower.
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
