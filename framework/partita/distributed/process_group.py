"""A process group over torch.distributed: NCCL or XCCL for gradients on GPUs, gloo for everything else.

Every exchange has a name, and the names are compared. Ranks that diverge would not hang, but receive each other's
objects.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from partita.distributed.world import DistributedEnv
from partita_schema.common.text import describe_error
from partita_schema.errors import LostRankError, OtherRankError
from partita_trainers.batch_size.device_errors import is_out_of_memory
from partita_trainers.libraries.torch_internals import default_store
from partita_trainers.process_group import SharedText

T = TypeVar("T")

NETWORKS = {"cuda": "nccl", "xpu": "xccl"}
"""Backend that sums tensors of a device type; gloo if there is none."""
BUCKET_BYTES = 32 * 2**20
"""Tensors smaller than this are summed together in buckets of this size."""


class DistributedGroup:
    """A `partita_trainers.process_group.ProcessGroup` of several processes; a process joins only one."""

    def __init__(self, world: DistributedEnv, *, device: torch.device, timeout_seconds: float) -> None:
        """Wait for all ranks. Raises OtherRankError if some do not connect in time."""
        self.rank, self.world_size, self.local_world_size = world.rank, world.world_size, world.local_world_size
        timeout = timedelta(seconds=timeout_seconds)
        with exchange_errors("the start"):
            if not dist.is_initialized():  # Ray starts it itself
                network = NETWORKS.get(device.type)
                backend = f"cpu:gloo,{device.type}:{network}" if network else "gloo"
                dist.init_process_group(backend, rank=world.rank, world_size=world.world_size, timeout=timeout)
            self.control = dist.new_group(backend="gloo", timeout=timeout)
            self.store = default_store()
        self.counters = self.texts = 0

    def all_gather_object(self, mine: T, about: str) -> list[T]:
        """Return the objects of all ranks, in rank order. Raises OtherRankError if a rank is gone."""
        gathered: list[Any] = [None] * self.world_size
        with exchange_errors(about):
            dist.all_gather_object(gathered, (about, mine), group=self.control)
        others = {name for name, _ in gathered}
        if others != {about}:
            raise AssertionError(f"ranks are not at the same collective: {', '.join(sorted(others))}")
        return [item for _, item in gathered]

    def run_on_rank_zero(self, call: Callable[[], T], about: str) -> T:
        """Run `call` on rank 0 and return its result on every rank."""
        result: T | None = None
        error: Exception | None = None
        reason: str | None = None
        if self.rank == 0:
            try:
                result = call()
            except Exception as raised:
                error, reason = raised, describe_error(raised)
        result, reason = self.all_gather_object((result, reason), about)[0]
        if error is not None:
            raise error
        if reason is not None:
            raise OtherRankError(f"rank 0 failed at {about}: {reason}")
        return result  # type: ignore[return-value]  # rank 0's is a T

    def raise_if_any_failed(self, error: Exception | None, about: str) -> None:
        """Return if no rank has an error; otherwise the first failed rank raises its own.

        The other ranks raise OtherRankError.
        """
        reasons = self.all_gather_object(None if error is None else describe_error(error), about)
        first = next(((rank, reason) for rank, reason in enumerate(reasons) if reason is not None), None)
        if first is None:
            return
        rank, reason = first
        if error is not None and rank == self.rank:
            raise error
        raise OtherRankError(f"rank {rank} failed at {about}: {reason}")

    def shared_counter(self, about: str) -> Callable[[int], int]:
        """Return a counter in the job's store. Ranks create their counters in the same order."""
        self.counters += 1
        name = f"partita {self.counters} {about}"

        def add(amount: int) -> int:
            with exchange_errors(about):
                return int(self.store.add(name, amount)) - amount

        return add

    def shared_text(self, about: str) -> SharedText:
        """Return a text in the job's store. Ranks create their texts in the same order."""
        self.texts += 1
        return StoredText(self.store, key=f"partita text {self.texts} {about}")

    def all_reduce_sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        with exchange_errors("the sum of the gradients"):
            for bucket in buckets(tensors):
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    dist.all_reduce(bucket[0])
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                dist.all_reduce(flat)
                sums = torch.split(flat, [tensor.numel() for tensor in bucket])
                for tensor, summed in zip(bucket, sums, strict=True):
                    tensor.copy_(summed.view_as(tensor))


@dataclass(frozen=True)
class StoredText:
    """A `SharedText` in a store of torch.distributed. Without the store, nothing is written and the text is empty."""

    store: Any
    """A store of torch.distributed."""
    key: str

    def read(self) -> str:
        """Return the text."""
        with suppress(RuntimeError):
            if self.store.check([self.key]):
                return str(self.store.get(self.key), "utf8")
        return ""

    def write(self, text: str) -> None:
        """Replace the text."""
        with suppress(RuntimeError):
            self.store.set(self.key, text)


@contextmanager
def exchange_errors(about: str) -> Iterator[None]:
    """Raise LostRankError for errors of an exchange: they mean that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise LostRankError.during(about, error) from error


def buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in order, grouped by dtype and device up to BUCKET_BYTES; larger ones on their own."""
    open_: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size >= BUCKET_BYTES and tensor.is_contiguous():
            yield [tensor]
            continue
        bucket = open_.setdefault((tensor.dtype, tensor.device), [])
        if bucket and size + sum(one.numel() * one.element_size() for one in bucket) > BUCKET_BYTES:
            yield list(bucket)
            bucket.clear()
        bucket.append(tensor)
    yield from (bucket for bucket in open_.values() if bucket)
