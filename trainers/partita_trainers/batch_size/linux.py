"""What Linux says about a process's memory, and how the C library can be made to give it back at once, or not at all.

Left to itself, glibc keeps some freed memory and cuts it up: the peak of the same work then differs by more than twice
from what it holds. With a low threshold each tensor is a mapping of its own, given back when it is freed; the peak is
exact, and work that allocates a lot, such as a growing cache, becomes slower. Where memory is plenty the opposite is
worth it: the top of the heap is kept, and its pages need not be asked for again in every layer.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNLIMITED = 1 << 60
"""Limits of this size and more are none: cgroup v1 writes a number of 63 bits."""
M_MMAP_THRESHOLD, M_TOP_PAD, M_TRIM_THRESHOLD = -3, -2, -1
EXACT_THRESHOLD = 128 * 1024
USUAL_THRESHOLD, USUAL_TRIM = 32 * 2**20, 64 * 2**20
"""Where glibc arrives by itself once large blocks have been freed."""
USUAL_PAD, KEPT_PAD, KEPT_TRIM = 128 * 1024, 64 * 2**20, 2**31 - 1
SPARE_BLOCKS, SPARE_BLOCK_BYTES = 16, 272 * 1024
"""Blocks that are left free in the heap before the limit on data falls. oneDNN, which computes in bf16, does not look
whether it got the 258,376 bytes that describe a product of matrices: with tensors of 1 MB and a limit amid the work,
3 backward passes of 150 ended the process, and with these blocks none. Larger ones would serve tensors too, whose peaks
are then less exact."""
HEAD_BYTES = 24
"""What is left in use at the head of each: between them no two free blocks grow into one that a large tensor gets."""


def status(field: str, *, proc: Path = Path("/proc/self")) -> int | None:
    """A field of /proc/self/status in bytes, such as VmRSS; None where there is none."""
    try:
        for line in (proc / "status").read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def reset_peak(*, proc: Path = Path("/proc/self")) -> bool:
    """Whether VmHWM now begins at what is held."""
    try:
        (proc / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def available_memory(*, proc: Path = Path("/proc")) -> int | None:
    """MemAvailable: what new work may take without swapping."""
    return meminfo("MemAvailable", proc=proc)


def meminfo(field: str, *, proc: Path = Path("/proc")) -> int | None:
    """A field of /proc/meminfo in bytes."""
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)
    except (OSError, ValueError):
        return None


def processor(field: str = "model name", *, proc: Path = Path("/proc")) -> str | None:
    """What is said of the processor, such as its name or `vendor_id`; None where it is not told."""
    try:
        lines = (proc / "cpuinfo").read_text(encoding="utf8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), None)


def cgroup_room(*, proc: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the tightest control group above this process leaves; None without a limit."""
    rooms = [limit - used for limit, used in cgroup_limits(proc=proc, root=root)]
    return max(0, min(rooms)) if rooms else None


def cgroup_total(*, proc: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The lowest limit of the control groups above this process; None without one."""
    return min((limit for limit, _ in cgroup_limits(proc=proc, root=root)), default=None)


def cgroup_limits(*, proc: Path, root: Path) -> list[tuple[int, int]]:
    """(limit, used) of each control group with a limit, from the process's own up to the root.

    Of what is used, pages of files that the kernel would drop are not counted. In a container the path may not exist
    below `root`, which then is the group itself.
    """
    try:
        lines = (proc / "cgroup").read_text(encoding="utf8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            places = [root, root / "unified"]
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            places = [root / "memory", root / controllers]
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        for top in places:
            found += [group for folder in ancestors(top, path) if (group := read_group(folder, names)) is not None]
    return found


def ancestors(top: Path, path: str) -> list[Path]:
    """The group's folder and all above it up to `top`."""
    own = top / path.lstrip("/")
    return [own, *(folder for folder in own.parents if folder == top or top in folder.parents)]


def read_group(folder: Path, names: tuple[str, str, str]) -> tuple[int, int] | None:
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


def limit_room(*, proc: Path = Path("/proc/self")) -> int | None:
    """Bytes that the limits on this process's address space and data leave; None without one."""
    # Not on every system, where the rest of this module is only asked in vain.
    import resource

    rooms = []
    for kind, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        held = status(field, proc=proc)
        if soft != resource.RLIM_INFINITY and held is not None:
            rooms.append(max(0, soft - held))
    return min(rooms, default=None)


class Allocator:
    """glibc's settings, which are the process's and cannot be read: how many have asked for what."""

    exact = 0
    kept = 0


@contextmanager
def exact_allocations() -> Iterator[None]:
    """Inside, freed memory goes back to the system at once. Without glibc nothing changes. It may be nested."""
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
    """Inside, freed memory is kept for what comes next, unless somebody has asked for exact allocations.

    It goes back to the system at the end. Without glibc nothing changes. It may be nested.
    """
    library = c_library()
    if library is None:
        yield
        return
    Allocator.kept += 1
    set_thresholds(library)
    try:
        yield
    finally:
        Allocator.kept -= 1
        set_thresholds(library)
        if not Allocator.kept:
            library.malloc_trim(0)


def set_thresholds(library: ctypes.CDLL) -> None:
    """As exact as somebody has asked for, else as lavish."""
    exact, kept = bool(Allocator.exact), bool(Allocator.kept and not Allocator.exact)
    library.mallopt(M_MMAP_THRESHOLD, EXACT_THRESHOLD if exact else USUAL_THRESHOLD)
    library.mallopt(M_TRIM_THRESHOLD, EXACT_THRESHOLD if exact else KEPT_TRIM if kept else USUAL_TRIM)
    library.mallopt(M_TOP_PAD, KEPT_PAD if kept else USUAL_PAD)


def give_back() -> None:
    """Freed memory that the C library keeps goes back to the system."""
    library = c_library()
    if library is not None:
        library.malloc_trim(0)


def c_library() -> ctypes.CDLL | None:
    """The process's C library, where it is glibc."""
    library = ctypes.CDLL(None)
    if not (hasattr(library, "mallopt") and hasattr(library, "malloc_trim")):
        return None
    library.malloc.restype = library.realloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    return library


@contextmanager
def data_limit(room: int) -> Iterator[None]:
    """Inside, the process may have `room` bytes more of data: an allocation beyond is refused, and nothing is killed.

    Some blocks are left free in the heap first: code that never looks whether it got memory asks for little. Without
    VmData, and where a tighter limit stands, nothing changes.
    """
    import resource

    held = status("VmData")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if held is None or (soft != resource.RLIM_INFINITY and soft <= held + room):
        yield
        return
    with spare_blocks():
        limit = (status("VmData") or held) + room
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def spare_blocks() -> Iterator[None]:
    """Inside, the heap has free blocks, which no larger allocation can use; nothing of them is in memory."""
    library = c_library()
    if library is None:
        yield
        return
    # Larger than the threshold they would be mappings, which are gone once they are freed.
    library.mallopt(M_MMAP_THRESHOLD, USUAL_THRESHOLD)
    blocks = [library.malloc(SPARE_BLOCK_BYTES) for _ in range(SPARE_BLOCKS + 1)]
    # Cut where they are, and not freed: the last one grows into the top of the heap, and is the one too many.
    heads = [library.realloc(block, HEAD_BYTES) for block in blocks if block]
    set_thresholds(library)
    try:
        yield
    finally:
        for head in heads:
            library.free(head)
