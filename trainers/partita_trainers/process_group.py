"""The processes of a run, each called a rank, as a trainer sees them: a place, and four things to do together.

A trainer is handed a process group and never asks how many processes there are but by it. All ranks call the same
methods in the same order. What one of them raises in between ends the others with it, because they wait for it in the
next call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class ProcessGroup(Protocol):
    """All processes of a run, this one among them."""

    @property
    def rank(self) -> int:
        """Place of this process, from 0; rank 0 writes what is written once."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    @property
    def local_world_size(self) -> int:
        """Number of those on this machine, which share its memory and its cores."""

    def all_gather_object(self, mine: T, about: str) -> list[T]:
        """What each rank gave, in the order of ranks, on every rank.

        `about` names the exchange, the same on all ranks. Raises OtherRankError where a rank is gone.
        """

    def run_on_rank_zero(self, call: Callable[[], T], about: str) -> T:
        """What `call` gives on rank 0, on every rank; the others wait.

        An error is raised on rank 0, and OtherRankError on the others.
        """

    def raise_if_any_failed(self, error: Exception | None, about: str) -> None:
        """Go on where no rank has an error. Else the first one that has raises it, the others OtherRankError."""

    def shared_counter(self, about: str) -> Callable[[int], int]:
        """A number that all ranks count up together: called with an amount, it tells what stood there before.

        It begins at 0, and asks nothing of the other ranks.
        """

    def all_reduce_sum_(self, tensors: "Sequence[torch.Tensor]") -> None:
        """Put the sum over all ranks in place of each tensor, the same bits on every rank."""


class SingleProcess:
    """A team of one."""

    rank = 0
    world_size = 1
    local_world_size = 1

    def all_gather_object(self, mine: T, about: str) -> list[T]:
        """What was given."""
        return [mine]

    def run_on_rank_zero(self, call: Callable[[], T], about: str) -> T:
        """What the call gives."""
        return call()

    def raise_if_any_failed(self, error: Exception | None, about: str) -> None:
        """Raise the error, if there is one."""
        if error is not None:
            raise error

    def shared_counter(self, about: str) -> Callable[[int], int]:
        """A number of this process's own."""
        value = 0

        def add(amount: int) -> int:
            nonlocal value
            value += amount
            return value - amount

        return add

    def all_reduce_sum_(self, tensors: "Sequence[torch.Tensor]") -> None:
        """The tensors are their own sums."""


SINGLE_PROCESS = SingleProcess()


@contextmanager
def synchronized_errors(process_group: ProcessGroup, about: str) -> Iterator[None]:
    """Around what every rank does by itself: no rank goes on where one has failed."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    process_group.raise_if_any_failed(error, about)


@contextmanager
def main_process_first(process_group: ProcessGroup, about: str) -> Iterator[None]:
    """Around what rank 0 does first, and the others once it is done and its files are there."""
    first = f"{about}, on rank 0"
    if process_group.rank != 0:
        process_group.raise_if_any_failed(None, first)
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if process_group.rank == 0:
        process_group.raise_if_any_failed(error, first)
    process_group.raise_if_any_failed(error, about)
