"""The processes of a run, called ranks, as a trainer sees them: a rank, a world size and a few collectives.

A trainer uses only its process group to communicate. All ranks call the same methods in the same order. An error on one
rank ends the others too, because they wait for it in the next call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class SharedText(Protocol):
    """A text that all ranks can read and write at any time; empty at first."""

    def read(self) -> str:
        """Return the text."""

    def write(self, text: str) -> None:
        """Replace the text."""


class ProcessGroup(Protocol):
    """All processes of a run."""

    @property
    def rank(self) -> int:
        """Rank of this process, from 0. Rank 0 writes what is written once."""

    @property
    def world_size(self) -> int:
        """Number of processes."""

    @property
    def local_world_size(self) -> int:
        """Number of processes on this machine, which share its memory and cores."""

    def all_gather_object(self, mine: T, about: str) -> list[T]:
        """Return the objects of all ranks, in rank order, on every rank.

        `about` names the exchange and is equal on all ranks. Raises OtherRankError if a rank is gone.
        """

    def run_on_rank_zero(self, call: Callable[[], T], about: str) -> T:
        """Run `call` on rank 0 and return its result on every rank; the others wait.

        An error is raised on rank 0, and OtherRankError on the others.
        """

    def raise_if_any_failed(self, error: Exception | None, about: str) -> None:
        """Return if no rank has an error.

        Otherwise the first failed rank raises its own, and the others OtherRankError.
        """

    def shared_counter(self, about: str) -> Callable[[int], int]:
        """Return a function that adds an amount to a counter shared by all ranks and returns the value before.

        The counter starts at 0. Calls are not collectives.
        """

    def shared_text(self, about: str) -> SharedText:
        """Return a text shared by all ranks. Its methods are not collectives."""

    def all_reduce_sum_(self, tensors: "Sequence[torch.Tensor]") -> None:
        """Replace each tensor by its sum over all ranks, with the same bits on every rank."""


class LocalText:
    """A `SharedText` of ranks in one process."""

    def __init__(self) -> None:
        """Start with an empty text."""
        self.text = ""

    def read(self) -> str:
        """Return the text."""
        return self.text

    def write(self, text: str) -> None:
        """Replace the text."""
        self.text = text


class SingleProcess:
    """A process group of one."""

    rank = 0
    world_size = 1
    local_world_size = 1

    def all_gather_object(self, mine: T, about: str) -> list[T]:
        """Return a list of the object."""
        return [mine]

    def run_on_rank_zero(self, call: Callable[[], T], about: str) -> T:
        """Run the call and return its result."""
        return call()

    def raise_if_any_failed(self, error: Exception | None, about: str) -> None:
        """Raise the error, if any."""
        if error is not None:
            raise error

    def shared_counter(self, about: str) -> Callable[[int], int]:
        """Return a counter of this process."""
        value = 0

        def add(amount: int) -> int:
            nonlocal value
            value += amount
            return value - amount

        return add

    def shared_text(self, about: str) -> SharedText:
        """Return a text of this process."""
        return LocalText()

    def all_reduce_sum_(self, tensors: "Sequence[torch.Tensor]") -> None:
        """Do nothing: each tensor is the sum over one rank."""


SINGLE_PROCESS = SingleProcess()


@contextmanager
def synchronized_errors(process_group: ProcessGroup, about: str) -> Iterator[None]:
    """Raise on all ranks if the body of the context fails on any."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    process_group.raise_if_any_failed(error, about)


@contextmanager
def main_process_first(process_group: ProcessGroup, about: str) -> Iterator[None]:
    """Run the body on rank 0 first, and on the other ranks after it is done and its files exist."""
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
