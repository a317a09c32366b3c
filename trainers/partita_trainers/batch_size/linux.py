"""Linux's memory statistics of a process, and glibc settings that return freed memory at once or keep it.

By default, glibc keeps and fragments some freed memory, so that the peak of the same work varies by more than a factor
of two over what it holds. With a low mmap threshold each tensor is its own mapping, returned when freed: the peak is
exact, but work that allocates a lot, such as a growing KV cache, is slower. If memory is plentiful, the opposite is
better: the top of the heap is kept, and its pages are not requested from the kernel again in every layer.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNLIMITED = 1 << 60
"""Limits of at least this size mean no limit: cgroup v1 writes a 63-bit number."""
M_MMAP_THRESHOLD, M_TOP_PAD, M_TRIM_THRESHOLD = -3, -2, -1
EXACT_THRESHOLD = 128 * 1024
USUAL_THRESHOLD, USUAL_TRIM = 32 * 2**20, 64 * 2**20
"""The values that glibc's dynamic thresholds reach after large blocks were freed."""
USUAL_PAD, REUSE_PAD, REUSE_TRIM = 128 * 1024, 64 * 2**20, 2**31 - 1
SPARE_BLOCKS, SPARE_BLOCK_BYTES = 16, 272 * 1024
"""Free blocks to leave in the heap before the limit on data is set.

oneDNN, which computes in bf16, does not check whether it got the 258,376 bytes that describe a matrix product. With
tensors of 1 MB and a limit set during the work, 3 of 150 backward passes crashed the process, and with these blocks
none did. Larger blocks would also be used for tensors, which makes their peaks less exact.
"""
HEAD_BYTES = 24
"""Bytes kept in use at the start of each block, so that free blocks do not merge into larger ones."""


def status(field: str, *, proc: Path = Path("/proc/self")) -> int | None:
    """Return a field of /proc/self/status in bytes, such as VmRSS; None if there is none."""
    try:
        for line in (proc / "status").read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def reset_peak(*, proc: Path = Path("/proc/self")) -> bool:
    """Reset VmHWM to the current VmRSS. Return whether that worked."""
    try:
        (proc / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def available_memory(*, proc: Path = Path("/proc")) -> int | None:
    """Return MemAvailable, the memory that new work may take without swapping."""
    return meminfo("MemAvailable", proc=proc)


def meminfo(field: str, *, proc: Path = Path("/proc")) -> int | None:
    """Return a field of /proc/meminfo in bytes."""
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)
    except (OSError, ValueError):
        return None


def processor(field: str = "model name", *, proc: Path = Path("/proc")) -> str | None:
    """Return a field of /proc/cpuinfo, such as the model name or `vendor_id`; None if there is none."""
    try:
        lines = (proc / "cpuinfo").read_text(encoding="utf8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), None)


def cgroup_free_bytes(*, proc: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes left by the tightest cgroup of this process; None without a limit."""
    free_bytes = [limit - used for limit, used in cgroup_limits(proc=proc, root=root)]
    return max(0, min(free_bytes)) if free_bytes else None


def cgroup_total(*, proc: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the lowest limit of the cgroups of this process; None without a limit."""
    return min((limit for limit, _ in cgroup_limits(proc=proc, root=root)), default=None)


def cgroup_limits(*, proc: Path, root: Path) -> list[tuple[int, int]]:
    """Return (limit, used) of each cgroup with a limit, from the process's own up to the root.

    Page cache that the kernel would drop is not counted as used. In a container the path may not exist below `root`,
    which is then the cgroup itself.
    """
    try:
        lines = (proc / "cgroup").read_text(encoding="utf8").splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops = [root, root / "unified"]
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            tops = [root / "memory", root / controllers]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for top in tops:
            limits += [group for folder in ancestors(top, path) if (group := read_group(folder, names)) is not None]
    return limits


def ancestors(top: Path, path: str) -> list[Path]:
    """Return the cgroup's folder and all its parents up to `top`."""
    own = top / path.lstrip("/")
    return [own, *(folder for folder in own.parents if folder == top or top in folder.parents)]


def read_group(folder: Path, names: tuple[str, str, str]) -> tuple[int, int] | None:
    """Return (limit, used) of one cgroup, without page cache that can be dropped; None without a limit."""
    limit_name, used_name, cache_name = names
    try:
        limit = (folder / limit_name).read_text(encoding="ascii").strip()
        if limit == "max" or int(limit) >= UNLIMITED:
            return None
        used = int((folder / used_name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    dropped = next((int(line.split()[1]) for line in lines if line.startswith(f"{cache_name} ")), 0)
    return int(limit), max(0, used - dropped)


def limit_free_bytes(*, proc: Path = Path("/proc/self")) -> int | None:
    """Return the bytes left by the limits on this process's address space and data; None without a limit."""
    # This module does not exist on every system; the rest of this file can be imported everywhere.
    import resource

    free_bytes = []
    for kind, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        used = status(field, proc=proc)
        if soft != resource.RLIM_INFINITY and used is not None:
            free_bytes.append(max(0, soft - used))
    return min(free_bytes, default=None)


class Allocator:
    """Reference counts of glibc's settings, which are process-wide and cannot be read back."""

    exact = 0
    num_reusing = 0


@contextmanager
def exact_allocations() -> Iterator[None]:
    """Return freed memory to the system at once inside the context. Does nothing without glibc. Can be nested."""
    library = c_library()
    if library is None:
        yield
        return
    Allocator.exact += 1
    set_thresholds(library)
    library.malloc_trim(0)
    try:
        yield
    finally:
        Allocator.exact -= 1
        set_thresholds(library)


@contextmanager
def kept_allocations() -> Iterator[None]:
    """Keep freed memory for reuse inside the context, unless exact allocations are requested.

    The memory is returned to the system on exit. Does nothing without glibc. Can be nested.
    """
    library = c_library()
    if library is None:
        yield
        return
    Allocator.num_reusing += 1
    set_thresholds(library)
    try:
        yield
    finally:
        Allocator.num_reusing -= 1
        set_thresholds(library)
        if not Allocator.num_reusing:
            library.malloc_trim(0)


def set_thresholds(library: ctypes.CDLL) -> None:
    """Set glibc's thresholds: exact if requested, else keeping memory if requested, else as usual."""
    exact, reusing = bool(Allocator.exact), bool(Allocator.num_reusing and not Allocator.exact)
    library.mallopt(M_MMAP_THRESHOLD, EXACT_THRESHOLD if exact else USUAL_THRESHOLD)
    library.mallopt(M_TRIM_THRESHOLD, EXACT_THRESHOLD if exact else REUSE_TRIM if reusing else USUAL_TRIM)
    library.mallopt(M_TOP_PAD, REUSE_PAD if reusing else USUAL_PAD)


def give_back() -> None:
    """Return freed memory that the C library keeps to the system."""
    library = c_library()
    if library is not None:
        library.malloc_trim(0)


def c_library() -> ctypes.CDLL | None:
    """Return the process's C library if it is glibc, else None."""
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallopt") and hasattr(library, "malloc_trim")):
        return None
    library.malloc.restype = library.realloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    return library


@contextmanager
def data_limit(free_bytes: int) -> Iterator[None]:
    """Limit the process to `free_bytes` more bytes of data inside the context; larger allocations fail.

    Some blocks are left free in the heap first, for code that does not check small allocations. Does nothing without
    VmData or under a tighter limit.
    """
    import resource

    used = status("VmData")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if used is None or (soft != resource.RLIM_INFINITY and soft <= used + free_bytes):
        yield
        return
    with spare_blocks():
        limit = (status("VmData") or used) + free_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def spare_blocks() -> Iterator[None]:
    """Provide free heap blocks inside the context, too small for large allocations; none of them is resident."""
    library = c_library()
    if library is None:
        yield
        return
    # Above the threshold they would be mappings, which are returned to the system when freed.
    library.mallopt(M_MMAP_THRESHOLD, USUAL_THRESHOLD)
    blocks = [library.malloc(SPARE_BLOCK_BYTES) for _ in range(SPARE_BLOCKS + 1)]
    # Shrunk in place, not freed. The last one merges with the top of the heap, hence the extra block.
    heads = [library.realloc(block, HEAD_BYTES) for block in blocks if block]
    set_thresholds(library)
    try:
        yield
    finally:
        for head in heads:
            library.free(head)
