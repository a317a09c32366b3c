"""A process group whose ranks are threads of one process, to compute what several ranks would without starting any."""

from collections.abc import Callable, Sequence
from threading import Barrier, Lock
from typing import TYPE_CHECKING, Any, TypeVar

from partita_trainers.process_group import LocalText, SharedText

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class ThreadGroup:
    """One rank of a `partita_trainers.process_group.ProcessGroup` of threads."""

    def __init__(self, rank: int, shared: list[Any], met: Barrier, lock: Lock, counts: dict[int, int]) -> None:
        """Use `of` to create all ranks of a group."""
        self.rank = rank
        self.world_size = self.local_world_size = len(shared)
        self._shared, self._met, self._lock, self._counts = shared, met, lock, counts
        self._asked = 0

    @classmethod
    def of(cls, ranks: int, *, timeout_seconds: float = 60.0) -> list["ThreadGroup"]:
        """Create a group of `ranks` threads; return one object per rank."""
        shared: list[Any] = [None] * ranks
        met = Barrier(ranks, timeout=timeout_seconds)
        lock, counts = Lock(), dict[int, int]()
        return [cls(rank, shared, met, lock, counts) for rank in range(ranks)]

    def all_gather_object(self, mine: T, about: str) -> list[T]:
        """Return the objects of all ranks, in rank order. Raises threading.BrokenBarrierError if a rank is missing."""
        self._shared[self.rank] = (about, mine)
        self._met.wait()
        gathered = list(self._shared)
        self._met.wait()
        if any(name != about for name, _ in gathered):
            raise AssertionError(f"ranks are not at the same collective: {sorted({name for name, _ in gathered})}")
        return [item for _, item in gathered]

    def run_on_rank_zero(self, call: Callable[[], T], about: str) -> T:
        """Run `call` on rank 0 and return its result on every rank."""
        return self.all_gather_object(call() if self.rank == 0 else None, about)[0]  # type: ignore[return-value]  # rank 0's is a T

    def raise_if_any_failed(self, error: Exception | None, about: str) -> None:
        """Raise the first error on every rank."""
        for failure in self.all_gather_object(error, about):
            if failure is not None:
                raise failure

    def shared_counter(self, about: str) -> Callable[[int], int]:
        """Return a counter shared by the threads. Ranks create their counters in the same order."""
        self._asked += 1
        number = self._asked

        def add(amount: int) -> int:
            with self._lock:
                before = self._counts.get(number, 0)
                self._counts[number] = before + amount
                return before

        return add

    def shared_text(self, about: str) -> SharedText:
        """Return a text shared by the threads. All ranks call this at the same time."""
        return self.run_on_rank_zero(LocalText, about)

    def all_reduce_sum_(self, tensors: "Sequence[torch.Tensor]") -> None:
        """Replace each tensor by its sum over all ranks."""
        gathered = self.all_gather_object([tensor.clone() for tensor in tensors], "tensors")
        for tensor, *parts in zip(tensors, *gathered, strict=True):
            tensor.copy_(sum(parts))
