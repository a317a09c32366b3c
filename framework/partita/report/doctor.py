"""Report of `partita doctor`: versions, devices, memory, disk, Hub, and missing packages."""

import os
import platform
import re
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from partita_schema.common.files import user_cache_folder
from partita_schema.common.text import counted
from partita_trainers.batch_size.linux import cgroup_free_bytes, cgroup_total, meminfo, processor

HUB_SECONDS = 3.0
"""Timeout for the Hub in seconds, including name resolution."""
GIB = 2**30
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:>=(?P<least>[\d.]+))?.*?(?:extra == .(?P<extra>\w+).)?")
EXTRAS = {
    "chat": "partita chat",
    "excel": "Excel files (.xlsx)",
    "gguf": "partita export --to gguf and ollama",
    "gymnasium": "environments of Gymnasium in simulations",
    "onnx": "partita export --to onnx",
    "plot": "partita tune --plot",
    "ray": "backend: {type: ray}",
    "retrieval": "prompt.retrieval: {type: semantic}",
    "serve": "partita serve",
    "sweep": "partita sweep",
}
"""Purpose of each extra of the package."""
DEVELOPMENT_EXTRAS = ("dev", "docs")
"""Extras for development of partita, which are not reported."""


@dataclass(frozen=True)
class Requirement:
    """A required or optional package."""

    name: str
    least: str
    """Minimum version; empty for any."""
    extra: str
    """The extra that installs it; empty for a required package."""
    installed: str | None
    """The installed version; None if it is missing."""

    @property
    def fits(self) -> bool:
        """Whether it is installed in a supported version."""
        return self.installed is not None and numbers(self.installed) >= numbers(self.least)


@dataclass(frozen=True)
class Diagnosis:
    """The result of examining a machine."""

    system: str
    """Versions of partita and Python, and the operating system."""
    requirements: tuple[Requirement, ...]
    devices: tuple[str, ...]
    problems: tuple[str, ...]
    """Problems that keep partita from working, each with a fix."""
    memory: str
    disk: tuple[tuple[str, str, int], ...]
    """Name, folder and free bytes."""
    hub: str

    def record(self) -> dict[str, Any]:
        """Return the diagnosis as JSON."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield the diagnosis as lines for a terminal."""
        yield self.system
        yield "packages:"
        width = max(len(one.name) for one in self.requirements)
        for one in self.requirements:
            if not one.extra:
                yield f"  {one.name:<{width}}  {one.installed or 'missing'}"
        yield "devices:"
        yield from (f"  {device}" for device in self.devices)
        yield f"memory: {self.memory}"
        yield "disk:"
        yield from (f"  {name}: {free / GIB:,.1f} GiB free in {folder}" for name, folder, free in self.disk)
        yield f"Hub: {self.hub}"
        missing = [one for one in self.requirements if one.extra and not one.fits]
        yield "extras: all installed" if not missing else "extras that are not installed:"
        for one in missing:
            yield f"  {EXTRAS[one.extra]}: pip install 'partita[{one.extra}]'"
        yield from (f"problem: {problem}" for problem in self.problems)
        if not self.problems:
            yield "no problems found"


def diagnose() -> Diagnosis:
    """Examine this machine. Takes a few seconds, at most `HUB_SECONDS` of them for the Hub."""
    needed = tuple(requirements())
    devices, failures = look_for_devices()
    unfit = [
        f"{one.name} {one.installed or 'is missing'}"
        + (f" is older than {one.least}" if one.installed else "")
        + f"; run pip install '{one.name}>={one.least}'"
        for one in needed
        if not one.extra and not one.fits
    ]
    return Diagnosis(
        system=f"partita {installed_version('partita') or '(not installed)'}, Python {platform.python_version()}, "
        f"{platform.platform()}",
        requirements=needed,
        devices=tuple(devices),
        problems=(*unfit, *failures, *unwritable_folders()),
        memory=memory(),
        disk=tuple(disk()),
        hub=ask_hub(seconds=HUB_SECONDS),
    )


def requirements() -> Iterator[Requirement]:
    """Yield the requirements of the installed package, except development tools."""
    try:
        lines = requires("partita") or []
    except PackageNotFoundError:
        lines = []
    for line in lines:
        match = REQUIREMENT.fullmatch(line)
        if match is None or match["extra"] in DEVELOPMENT_EXTRAS:
            continue
        yield Requirement(match["name"], match["least"] or "", match["extra"] or "", installed_version(match["name"]))


def installed_version(name: str) -> str | None:
    """Return the version of a package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def look_for_devices() -> tuple[list[str], list[str]]:
    """Return the devices that torch can use, and problems with torch or devices."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return [], [f"torch cannot be imported: {error}; install it again"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = counted(torch.get_num_threads(), "thread")
    devices = [f"cpu: {processor() or platform.machine()}, {counted(cores or 1, 'core')}, {threads} of torch"]
    if not torch.cuda.is_available():
        return devices, []
    for number in range(torch.cuda.device_count()):
        try:
            free, total = torch.cuda.mem_get_info(number)
            name = torch.cuda.get_device_name(number)
        except RuntimeError as error:
            return devices, [f"cuda:{number} cannot be used: {error}"]
        bf16 = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16"
        devices.append(f"cuda:{number}: {name}, {free / GIB:,.1f} of {total / GIB:,.1f} GiB free, {bf16}")
    return devices, []


def memory() -> str:
    """Describe free and total memory, within the limits of this process."""
    free, total = meminfo("MemAvailable"), meminfo("MemTotal")
    if free is None or total is None:
        return "not known"
    own, limit = cgroup_free_bytes(), cgroup_total()
    text = f"{free / GIB:,.1f} of {total / GIB:,.1f} GiB free"
    return text if own is None or limit is None else f"{text}; this process may take {min(own, free) / GIB:,.1f} GiB"


def disk() -> Iterator[tuple[str, str, int]]:
    """Yield the folders that partita and its libraries write to, with free bytes."""
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    folders = {
        "current folder": Path.cwd(),
        "models of the Hub": Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser(),
        "cache of partita": user_cache_folder(),
        "temporary files": temporary_folder(),
    }
    for name, folder in folders.items():
        yield name, str(folder), shutil.disk_usage(existing(folder)).free


def unwritable_folders() -> Iterator[str]:
    """Yield problems with the folders that every run writes to: the cache, which is created, and temporary files."""
    cache, temporary = user_cache_folder(), temporary_folder()
    if reason := why_unwritable(existing(cache)):
        yield (
            f"the cache of partita cannot be written to {cache}: {reason}; name another folder in the environment "
            "variable PARTITA_CACHE"
        )
    if reason := why_unwritable(temporary):
        yield (
            f"temporary files cannot be written to {temporary}: {reason}; name another folder in the environment "
            "variable TMPDIR"
        )


def temporary_folder() -> Path:
    """Return the folder of temporary files. If it cannot be written to, Python uses another one without a warning."""
    if named := os.environ.get("TMPDIR"):
        return Path(named)
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # no folder can be written to
        return Path("/tmp")


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest parent that exists, which may be a file."""
    for parent in (folder, *folder.parents):
        with suppress(OSError):  # raised in a folder that may not be read
            if parent.exists():
                return parent
    return Path("/")


def why_unwritable(folder: Path) -> str:
    """Return why no file can be written in a folder; empty if one can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"partita")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def ask_hub(*, seconds: float) -> str:
    """Describe whether the Hub answers, within `seconds`."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "not asked: HF_HUB_OFFLINE is set"
    parts = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    host = parts.hostname or "the address in HF_ENDPOINT"
    endpoint = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()  # without a password
    outcome: list[str] = []
    started = time.monotonic()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=seconds).close()
        except urllib.error.HTTPError:
            pass  # an HTTP error is an answer
        except (OSError, ValueError) as error:
            outcome.append(f"{host} cannot be reached: {getattr(error, 'reason', error)}")
            return
        outcome.append(f"{host} answers in {time.monotonic() - started:.1f} s")

    # In a thread, because name resolution has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else f"{host} does not answer within {seconds:g} s"
