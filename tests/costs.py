"""CPU seconds of each test, including child processes: long tests have a marker, and long files start first.

A test without the marker `long` should take at most `TARGET` CPU seconds on an idle machine, and its setup, which may
create shared fixtures, at most `SETUP_TARGET`; those that take more are listed at the end of a run. The first test of a
process that imports one of `LIBRARIES` may take `IMPORT_SECONDS` more. No test fails for its time: the same work takes
up to twice the CPU seconds on a machine whose cores share caches with others, and machines differ as much.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TARGET = 3.0
SETUP_TARGET = 15.0
IMPORT_SECONDS = 10.0
LIBRARIES = ("torch", "transformers.modeling_utils", "peft", "datasets", "accelerate", "sklearn", "bitsandbytes")
ABOVE_TARGET = "above_target"
KIND = "kind"
TICKS = os.sysconf("SC_CLK_TCK")
RECORD = Path(__file__).with_name("costs.json")
"""File with the CPU seconds of test files at the last run with --record-costs, by path in this folder and by kind."""


def cpu_seconds() -> float:
    """Return the CPU seconds used by this process and all its descendants.

    The seconds of a process disappear if it ends without being a descendant, such as a worker of Ray whose parent ended
    before.
    """
    return sum(ticks(pid) for pid in descendants(os.getpid())) / TICKS


def ticks(pid: int) -> int:
    """Return the clock ticks of a process and of its ended children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    try:
        threads = Path(f"/proc/{pid}/task").iterdir()
        children = [int(child) for thread in threads for child in (thread / "children").read_bytes().split()]
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        yield from descendants(child)


class Costs:
    """A plugin that measures tests; with xdist each worker has one, and the controller collects."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.found: dict[str, dict[str, float]] = defaultdict(dict)
        self.kinds: dict[str, str] = {}
        self.above_target: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        yield from self.measured(item, "setup", SETUP_TARGET)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield from self.measured(item, "call", TARGET)

    def measured(self, item: pytest.Item, part: str, target: float) -> Iterator[Any]:
        before, imported = cpu_seconds(), imported_libraries()
        try:
            return (yield)
        finally:
            seconds = max(0.0, cpu_seconds() - before)
            item.user_properties += [(f"{part}_cpu_seconds", round(seconds, 2)), (KIND, kind(item))]
            more = IMPORT_SECONDS if imported_libraries() != imported else 0.0
            if seconds > target + more and item.get_closest_marker("long") is None:
                item.user_properties.append((ABOVE_TARGET, round(seconds, 2)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            properties: dict[str, Any] = dict(report.user_properties)
            if ABOVE_TARGET in properties:
                self.above_target[report.nodeid] = properties.pop(ABOVE_TARGET)
            self.kinds[report.nodeid] = str(properties.pop(KIND, ""))
            self.found[report.nodeid].update(properties)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Start the longest files first, so that no worker runs a long file alone at the end."""
        before, kinds = read_record(), defaultdict[str, set[str]](set)
        for item in items:
            kinds[place(item.nodeid)].add(kind(item))
        expected = {name: sum(before.get(name, {}).get(each, 0.0) for each in found) for name, found in kinds.items()}
        items.sort(key=lambda item: -expected[place(item.nodeid)])

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.found or hasattr(self.config, "workerinput"):  # the controller has the results of all workers
            return
        by_folder: dict[str, list[float]] = defaultdict(list)
        for name, parts in self.found.items():
            by_folder["/".join(place(name).split("/")[:-1]) or "."].append(sum(parts.values()))
        terminalreporter.write_sep("-", "CPU seconds of tests by folder")
        for folder, seconds in sorted(by_folder.items(), key=lambda pair: -sum(pair[1])):
            terminalreporter.write_line(f"{sum(seconds):8.1f}  {len(seconds):5,} tests  {folder}")
        for name, seconds in sorted(self.above_target.items(), key=lambda pair: -pair[1]):
            terminalreporter.write_line(f"above its target: {seconds:.1f} CPU seconds, {name}")
        if self.config.getoption("record_costs") is not None:
            self.write(Path(self.config.getoption("record_costs")))

    def write(self, path: Path) -> None:
        """Write the CPU seconds of each test to `path`, and those of each file to the record for the next run."""
        path.write_text(json.dumps(self.found, indent=1, sort_keys=True))
        by_file = defaultdict[tuple[str, str], float](float)
        for name, parts in self.found.items():
            by_file[place(name), self.kinds[name]] += sum(parts.values())
        result = read_record()
        for (name, each), cpu in by_file.items():
            result.setdefault(name, {})[each] = round(cpu, 1)
        RECORD.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")


def imported_libraries() -> set[str]:
    """Return those of the slow libraries that this process has imported."""
    return {name for name in LIBRARIES if name in sys.modules}


def kind(item: pytest.Item) -> str:
    """Return which of the runs of CI includes a test."""
    return "long" if item.get_closest_marker("long") is not None else "short"


def read_record() -> dict[str, dict[str, float]]:
    """Return the last recorded CPU seconds of test files, by kind."""
    result: dict[str, dict[str, float]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return result


def place(nodeid: str) -> str:
    """Return the path of a test's file, relative to the folder of tests."""
    return nodeid.partition("::")[0].partition("tests/")[2]


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("costs")
    group.addoption(
        "--record-costs", metavar="FILE", help="write CPU seconds of each test to FILE, of files to costs.json"
    )
