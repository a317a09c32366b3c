"""A fake GPU: the allocator of torch.cuda, and a device whose memory other processes and libraries share.

Sizes and rules are those of torch's c10/cuda/CUDACachingAllocator.cpp: a pool for small and one for large blocks, best
fit, splitting, merging of free neighbours, and the release of unused segments before an out-of-memory error.
"""

import bisect
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

MIB = 2**20
MIN_BLOCK, SMALL_BLOCK = 512, MIB
SMALL_SEGMENT, LARGE_SEGMENT, MIN_LARGE, ROUND_LARGE = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


def round_up(size: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


@dataclass(eq=False)
class Block:
    """A range of memory."""

    size: int
    start: int = 0
    used: bool = False


class SegmentPool:
    """Segments as cudaMalloc returns them. A segment with a used block cannot be released."""

    def __init__(self, cuda: "FakeCuda", *, small: bool) -> None:
        self.cuda, self.small = cuda, small
        self.segments: list[list[Block]] = []

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(block.size for segment in self.segments for block in segment)

    def malloc(self, size: int) -> Block:
        """Return the smallest free block that is large enough, or one in a new segment; a large rest is split off."""
        fitting = [block for segment in self.segments for block in segment if not block.used and block.size >= size]
        block = min(fitting, key=lambda one: one.size, default=None)
        if block is None:
            block = Block(self.segment_size(size))
            needed = block.size
            self.cuda.require(lambda: needed)
            self.segments.append([block])
        rest = block.size - size
        if rest >= MIN_BLOCK if self.small else rest > SMALL_BLOCK:
            segment = self.segment_of(block)
            segment.insert(segment.index(block) + 1, Block(rest))
            block.size = size
        block.used = True
        return block

    def segment_size(self, size: int) -> int:
        """Return the size of a new segment for a block."""
        if self.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < MIN_LARGE else round_up(size, ROUND_LARGE)

    def segment_of(self, block: Block) -> list[Block]:
        """Return the segment that contains a block."""
        return next(segment for segment in self.segments if block in segment)

    def free(self, block: Block) -> None:
        """Free a block, and merge it with its free neighbours."""
        block.used = False
        segment = self.segment_of(block)
        merged: list[Block] = []
        for one in segment:
            if merged and not merged[-1].used and not one.used:
                merged[-1].size += one.size
            else:
                merged.append(one)
        segment[:] = merged

    def release(self) -> None:
        """Return segments without a used block to the device."""
        self.segments = [segment for segment in self.segments if any(block.used for block in segment)]


class PagePool:
    """An expandable segment: a range of addresses whose pages are mapped when they are needed."""

    def __init__(self, cuda: "FakeCuda", *, small: bool) -> None:
        self.cuda = cuda
        self.page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self.blocks: list[Block] = []
        self.mapped: set[int] = set()

    @property
    def reserved(self) -> int:
        """Bytes of all mapped pages."""
        return len(self.mapped) * self.page

    def pages(self, block: Block) -> set[int]:
        """Return the pages of a block."""
        return set(range(block.start // self.page, (block.start + block.size - 1) // self.page + 1))

    def malloc(self, size: int) -> Block:
        """Return a block at the lowest address with room for it."""
        start = 0
        for other in self.blocks:
            if other.start - start >= size:
                break
            start = other.start + other.size
        block = Block(size, start, used=True)
        self.cuda.require(lambda: len(self.pages(block) - self.mapped) * self.page)
        self.mapped |= self.pages(block)
        bisect.insort(self.blocks, block, key=lambda one: one.start)
        return block

    def free(self, block: Block) -> None:
        """Free a block; its pages stay mapped."""
        self.blocks.remove(block)

    def release(self) -> None:
        """Unmap pages without a used block."""
        self.mapped = {page for block in self.blocks for page in self.pages(block)}


class FakeCuda:
    """One device and the allocator of this process, with the functions of torch.cuda."""

    FUNCTIONS = (
        "is_available",
        "mem_get_info",
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
        "reset_peak_memory_stats",
        "empty_cache",
        "synchronize",
        "get_device_name",
        "get_per_process_memory_fraction",
        "set_per_process_memory_fraction",
    )

    def __init__(self, total: int, *, expandable: bool) -> None:
        self.total, self.expandable = total, expandable
        pool: type[PagePool | SegmentPool] = PagePool if expandable else SegmentPool
        self.small, self.large = pool(self, small=True), pool(self, small=False)
        self.others: dict[str, int] = {}
        """Bytes that the allocator does not count: other processes, and libraries in this one."""
        self.fraction = 1.0
        self.allocated = self.peak_allocated = self.peak_reserved = 0
        self.highest_reserved = 0
        """The peak since the start."""

    @property
    def reserved(self) -> int:
        """Bytes that the allocator holds."""
        return self.small.reserved + self.large.reserved

    @property
    def free_on_device(self) -> int:
        """Bytes that nobody holds."""
        return max(0, self.total - sum(self.others.values()) - self.reserved)

    def require(self, missing: Callable[[], int]) -> None:
        """Release unused memory if the missing bytes are not there; raise OutOfMemoryError if they still are not."""
        if not self.has_room(missing()):
            self.empty_cache()
        if not self.has_room(missing()):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {missing() / MIB:.2f} MiB.")

    def has_room(self, size: int) -> bool:
        """Return whether the device has the bytes, and the limit of the process allows them."""
        within_limit = self.reserved + size <= self.fraction * self.total
        return size == 0 or (within_limit and size <= self.free_on_device)

    def malloc(self, size: int) -> tuple[PagePool | SegmentPool, Block]:
        """Return a used block and its pool."""
        size = round_up(max(1, size), MIN_BLOCK)
        pool = self.small if size <= SMALL_BLOCK else self.large
        block = pool.malloc(size)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.highest_reserved = max(self.highest_reserved, self.reserved)
        return pool, block

    def free(self, pool: PagePool | SegmentPool, block: Block) -> None:
        """Free a block."""
        self.allocated -= block.size
        pool.free(block)

    # The functions of torch.cuda

    def is_available(self) -> bool:
        return True

    def mem_get_info(self, device: object) -> tuple[int, int]:
        return self.free_on_device, self.total

    def memory_allocated(self, device: object) -> int:
        return self.allocated

    def memory_reserved(self, device: object) -> int:
        return self.reserved

    def max_memory_allocated(self, device: object) -> int:
        return self.peak_allocated

    def max_memory_reserved(self, device: object) -> int:
        return self.peak_reserved

    def reset_peak_memory_stats(self, device: object) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def empty_cache(self) -> None:
        self.small.release()
        self.large.release()

    def synchronize(self, device: object) -> None: ...

    def get_device_name(self, device: object) -> str:
        return "a fake GPU"

    def get_per_process_memory_fraction(self, device: object) -> float:
        return self.fraction

    def set_per_process_memory_fraction(self, fraction: float, device: object) -> None:
        self.fraction = fraction


class Tensor:
    """Memory of the fake GPU, freed with its last reference."""

    def __init__(self, cuda: FakeCuda, size: int) -> None:
        weakref.finalize(self, cuda.free, *cuda.malloc(size)).atexit = False
