"""Tests of data workers: results in order, and an error within seconds when one dies or hangs."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partita.data.workers import EncodingWorkers
from partita_schema.common.garbage_collection import Frozen, permanent_imports
from partita_schema.errors import ConfigError, DataError, DataWorkerError, Problem
from partita_schema.sections.data import LoaderOptions


def double(number: int) -> int:
    return 2 * number


def slow_first(number: int) -> int:
    time.sleep(0.3 if number == 0 else 0.0)
    return number


def place_of_work(number: int) -> int:
    return os.getpid()


def num_frozen(number: int) -> int:
    return gc.get_freeze_count()


def die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def hang(number: int) -> int:
    if number == 3:
        time.sleep(600)
    return number


def refuse(number: int) -> int:
    if number == 3:
        raise DataError("three cannot be used")
    return number


class OddError(Exception):
    """An error whose pickle restores it with one argument too few."""

    def __init__(self, number: int, where: str) -> None:
        super().__init__(f"{number} is odd in {where}")


def refuse_oddly(number: int) -> int:
    if number == 3:
        raise OddError(number, "row 7")
    if number == 4:
        sys.exit(9)
    return number


def find_problems(number: int) -> int:
    raise ConfigError(
        [Problem("data.formatter", "there is none"), Problem("seed", "too small", file="run.yaml", line=3)]
    )


def take_a_while(number: int) -> int:
    time.sleep(0.3)
    return number


def time_out(number: int) -> int:
    raise TimeoutError("the disk did not answer")


@pytest.mark.parametrize(
    ("workers", "start_method"), [(0, None), (1, None), (3, None), (2, "spawn"), (2, "forkserver"), (2, "fork")]
)
def test_results_are_in_order_for_any_number_of_workers(workers: int, start_method: str | None) -> None:
    options = LoaderOptions(workers=workers, start_method=start_method)  # type: ignore[arg-type]
    with EncodingWorkers(double, options) as pool:
        assert list(pool.map(range(20), ahead=2)) == [2 * number for number in range(20)]


def test_a_slow_chunk_keeps_its_position() -> None:
    with EncodingWorkers(slow_first, LoaderOptions(workers=2)) as pool:
        assert list(pool.map(range(6), ahead=2)) == list(range(6))


def test_all_workers_work_and_have_ended_afterwards() -> None:
    with EncodingWorkers(slow_first, LoaderOptions(workers=3)) as pool:
        list(pool.map([0, 0, 0], ahead=2))
        assert len(multiprocessing.active_children()) == 3

    assert multiprocessing.active_children() == []


@pytest.fixture
def no_frozen_objects() -> Iterator[None]:
    """Unfreeze what tests before this one have frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("no_frozen_objects")
def test_objects_of_the_program_are_frozen_while_workers_run() -> None:
    with EncodingWorkers(num_frozen, LoaderOptions(workers=1, start_method="fork")) as pool:
        here, there = gc.get_freeze_count(), pool.submit(0)()

    assert min(here, there) > 10_000
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("no_frozen_objects")
def test_objects_are_thawed_if_only_imports_were_frozen_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frozen, "by_partita", False)
    with permanent_imports():
        pass
    with EncodingWorkers(double, LoaderOptions(workers=1)) as pool:
        pool.submit(1)()

    assert gc.get_freeze_count() == 0


def test_without_workers_chunks_are_computed_on_request() -> None:
    done: list[int] = []

    with EncodingWorkers(done.append, LoaderOptions()) as pool:
        results = [pool.submit(number) for number in range(3)]
        assert done == []
        results[1]()

    assert done == [1]


def test_only_the_requested_number_of_chunks_is_read_ahead() -> None:
    read: list[int] = []

    def reading() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    with EncodingWorkers(double, LoaderOptions(workers=2)) as pool:
        next(pool.map(reading(), ahead=3))

    assert len(read) == 7


def test_a_dead_worker_is_an_error() -> None:
    with pytest.raises(DataWorkerError) as caught, EncodingWorkers(die, LoaderOptions(workers=2)) as pool:
        list(pool.map(range(50), ahead=2))

    assert caught.value.exit_status == 1
    assert str(caught.value).startswith("a data worker died (")
    assert str(caught.value).endswith("); write fewer data.loader.workers, or 0")
    assert multiprocessing.active_children() == []


def test_a_hung_worker_is_an_error_after_the_timeout() -> None:
    with pytest.raises(DataWorkerError) as caught, EncodingWorkers(hang, LoaderOptions(workers=2, timeout=1)) as pool:
        list(pool.map(range(50), ahead=2))

    assert str(caught.value) == (
        "a data worker returned nothing for 1 s; write a larger data.loader.timeout where rows take that long, "
        "else fewer data.loader.workers, or 0 to see what it does"
    )
    assert multiprocessing.active_children() == []


def test_a_chunk_waiting_for_many_others_is_not_a_hung_worker() -> None:
    with EncodingWorkers(take_a_while, LoaderOptions(workers=1, timeout=1)) as pool:
        results = [pool.submit(number) for number in range(8)]

        assert results[-1]() == 7


def test_a_worker_that_is_slow_while_nothing_waits_is_not_hung() -> None:
    with EncodingWorkers(take_a_while, LoaderOptions(workers=1, timeout=0.5)) as pool:
        assert pool.submit(0)() == 0
        time.sleep(0.6)

        assert pool.submit(1)() == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_configuration_errors_of_a_worker_are_raised_unchanged(workers: int) -> None:
    with pytest.raises(ConfigError) as caught, EncodingWorkers(find_problems, LoaderOptions(workers=workers)) as pool:
        pool.submit(1)()

    assert str(caught.value) == "data.formatter: there is none\nrun.yaml:3: seed: too small"
    assert [problem.path for problem in caught.value.problems] == ["data.formatter", "seed"]


def test_an_error_of_a_worker_includes_its_traceback() -> None:
    with pytest.raises(DataError) as caught, EncodingWorkers(refuse, LoaderOptions(workers=1)) as pool:
        pool.submit(3)()

    assert "in refuse\n" in str(caught.value.__cause__)


def test_an_error_that_cannot_be_pickled_keeps_type_text_and_traceback() -> None:
    with EncodingWorkers(refuse_oddly, LoaderOptions(workers=1)) as pool:
        with pytest.raises(RuntimeError) as caught:
            pool.submit(3)()
        with pytest.raises(RuntimeError, match=r"^a data worker raised SystemExit: 9\n"):
            pool.submit(4)()

        assert pool.submit(5)() == 5
    first, second, *rest = str(caught.value).splitlines()
    assert first.startswith("a data worker raised ")
    assert first.endswith("OddError: 3 is odd in row 7")
    assert second == "Traceback (most recent call last):"
    assert "in refuse_oddly" in "".join(rest)


def test_rows_that_cannot_be_sent_to_a_worker_are_reported() -> None:
    pool: EncodingWorkers[Any, Any]
    with pytest.raises(DataError) as caught, EncodingWorkers(print, LoaderOptions(workers=1)) as pool:
        pool.submit(threading.Lock())

    assert str(caught.value) == (
        "rows cannot be sent to a data worker (cannot pickle '_thread.lock' object); give rows of plain values, or "
        "write data.loader.workers: 0"
    )


def test_objects_frozen_before_stay_frozen() -> None:
    gc.freeze()  # not undone: the suite freezes the objects of libraries, and collecting garbage takes long without
    before = gc.get_freeze_count()
    with EncodingWorkers(double, LoaderOptions(workers=1)) as pool:
        pool.submit(1)()

    assert gc.get_freeze_count() >= before


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_work_is_raised(workers: int) -> None:
    with (
        pytest.raises(DataError, match=r"^three cannot be used$"),
        EncodingWorkers(refuse, LoaderOptions(workers=workers)) as pool,
    ):
        list(pool.map(range(9), ahead=2))


def test_a_timeout_error_of_the_work_is_not_a_hung_worker() -> None:
    with (
        pytest.raises(TimeoutError, match="the disk"),
        EncodingWorkers(time_out, LoaderOptions(workers=1, timeout=20)) as pool,
    ):
        pool.submit(1)()


@pytest.mark.long
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_end_with_a_killed_program(tmp_path: Path, start_method: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, time\n"
        "from partita.data.workers import EncodingWorkers\n"
        "from partita_schema.sections.data import LoaderOptions\n"
        "def work(number):\n"
        "    return os.getpid()\n"
        "if __name__ == '__main__':\n"
        f"    pool = EncodingWorkers(work, LoaderOptions(workers=1, start_method={start_method!r}))\n"
        "    print(pool.submit(1)(), flush=True)\n"
        "    time.sleep(60)\n",
        encoding="utf-8",
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        worker = int(program.stdout.readline())
        program.kill()
        program.wait()

    assert gone(worker)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
@pytest.mark.long
def test_workers_still_running_at_the_end_of_a_program_end_quietly(tmp_path: Path, start_method: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os\n"
        "import torch\n"  # unfinished generators are closed only after modules are unloaded
        "from partita.data.workers import EncodingWorkers\n"
        "from partita_schema.sections.data import LoaderOptions\n"
        "def work(number):\n"
        "    return os.getpid()\n"
        "def results():\n"
        f"    with EncodingWorkers(work, LoaderOptions(workers=1, start_method={start_method!r})) as pool:\n"
        "        while True:\n"
        "            ahead = pool.submit(1)\n"
        "            yield pool.submit(1)()\n"
        "if __name__ == '__main__':\n"
        "    alive = results()\n"
        "    print(next(alive), flush=True)\n",
        encoding="utf-8",
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)

    assert (ended.returncode, ended.stderr) == (0, "")
    assert gone(int(ended.stdout))


def test_the_end_of_a_fork_does_not_end_the_workers() -> None:
    with EncodingWorkers(place_of_work, LoaderOptions(workers=1)) as pool:
        worker = pool.submit(0)()
        child = os.fork()
        if not child:
            pool.close(kill=True)
            os._exit(0)
        os.waitpid(child, 0)

        assert pool.submit(1)() == worker


def gone(process: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_workers_ignore_ctrl_c() -> None:
    with EncodingWorkers(place_of_work, LoaderOptions(workers=1)) as pool:
        worker = pool.submit(0)()
        os.kill(worker, signal.SIGINT)
        time.sleep(0.2)

        assert pool.submit(1)() == worker


def test_tokenizing_and_reading_answers_imports_no_model_library() -> None:
    code = (
        "import sys, partita.data.workers, partita.data.token_cache, partita.data.formatting.build, "
        "partita.outputs.registry, partita.generation.predictions; "
        "print(sorted({'torch', 'transformers', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
