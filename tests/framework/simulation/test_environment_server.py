"""Tests of environments in separate processes: a failure affects only its dialogue, and no process is left."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from partita.simulation.adapters import tools_of
from partita.simulation.contract import StepTimeoutError
from partita.simulation.environment_server import EnvironmentServer, RemoteError, describe_exit
from partita_schema.sections.simulation import EnvironmentWorldConfig

from . import programs_of_tests

FOLDER = Path(__file__).parent


def hosts(name: str = "Deadly", seconds: float = 20.0, **options: Any) -> EnvironmentServer:
    world = EnvironmentWorldConfig(type="environment", environment=f"worlds_of_tests:{name}", options=options)
    return EnvironmentServer(world, folder=FOLDER, step_seconds=seconds)


def lives(process: int) -> bool:
    """Return whether a process is running; zombies are not."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(processes: list[int]) -> bool:
    """Return whether all processes end within a second."""
    end = time.monotonic() + 1
    while any(map(lives, processes)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(lives, processes))


def noted(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir()]


def test_an_environment_runs_in_a_separate_process(tmp_path: Path) -> None:
    with hosts(pids=str(tmp_path)) as made:
        one, other = made.make(), made.make()
        said, info = one.reset(seed=1, task={"number": 1})
        assert other.reset(seed=1, task={"number": 1}) == (said, info)
        assert said[0]["content"].startswith(f"say {info['gold']} ")
        _, reward, terminated, truncated, step_info = one.step(info["gold"])
        assert (reward, terminated, truncated, step_info["metrics"]) == (
            1.0,
            False,
            False,
            {"length": len(info["gold"])},
        )
        processes = noted(tmp_path)
        assert len(processes) == 2
        assert all(map(lives, processes))
        one.close()
        other.close()
        assert gone(processes)


def test_environments_that_hang_or_are_left_at_the_end_are_killed(tmp_path: Path) -> None:
    with hosts(pids=str(tmp_path), misbehaves=True, seconds=0.5) as made:
        made.check()  # waits until the server has started
        before = noted(tmp_path)
        slow = made.make()
        slow.reset(seed=1, task={"number": 23})
        [process] = set(noted(tmp_path)) - set(before)
        with pytest.raises(StepTimeoutError, match=r"no answer within 0.5 s \(limits.step_seconds\)"):
            slow.step("red")
        assert gone([process])
        with pytest.raises(RemoteError, match="its process has ended"):
            slow.step("red")
        left = made.make()
        left.reset(seed=1, task={"number": 1})
    assert len(noted(tmp_path)) == 3
    assert gone(noted(tmp_path))
    assert made.server.poll() == 0


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (3, "OSError: the desk is closed (worlds_of_tests.py, line 41)"),
        (43, "step gave 'what?'; give (messages, reward, terminated, truncated, info)"),
        (63, "its process ended with exit code 3"),
        (83, "its process was ended by SIGSEGV"),
        (103, "SystemExit: 4 (worlds_of_tests.py, line 144)"),
    ],
)
def test_failures_of_an_environment_are_reported(tmp_path: Path, number: int, reason: str) -> None:
    with hosts(pids=str(tmp_path), misbehaves=True) as made:
        environment = made.make()
        environment.reset(seed=1, task={"number": number})
        with pytest.raises(RemoteError) as error:
            environment.step("red")
        assert str(error.value) == reason
        environment.close()
        assert gone(noted(tmp_path)), "including the processes that it has started"


def test_signals_without_a_name_are_numbers() -> None:
    assert describe_exit(-40) == "its process was ended by signal 40"


KILLED = """
import os, signal, sys, threading
from pathlib import Path
from partita.simulation.environment_server import EnvironmentServer
from partita_schema.sections.simulation import EnvironmentWorldConfig

options = {"misbehaves": True, "pids": sys.argv[2]}
world = EnvironmentWorldConfig(type="environment", environment="worlds_of_tests:Deadly", options=options)
hosts = EnvironmentServer(world, folder=Path(sys.argv[1]), step_seconds=60).__enter__()
idle, hanging = hosts.make(), hosts.make()
hanging.reset(seed=1, task={"number": 23})
(Path(sys.argv[2]) / str(hosts.server.pid)).touch()
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
hanging.step("red")
"""


def test_no_environment_outlives_a_killed_process(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(FOLDER), str(tmp_path)], check=False)

    assert killed.returncode == -signal.SIGKILL
    assert len(noted(tmp_path)) == 3
    assert gone(noted(tmp_path))


def test_an_environment_that_cannot_be_created_is_reported_with_the_reason() -> None:
    with hosts(size=3) as made, pytest.raises(RemoteError, match=r"TypeError: .* unexpected keyword argument 'size'"):
        made.check()
    with hosts("Nobody") as made, pytest.raises(RemoteError, match="its process has ended"):
        made.check()


@pytest.mark.parametrize(("name", "interface", "said"), [("Guess", "gymnasium", "guess"), ("Shop", "tools", "please")])
def test_gymnasium_and_trl_environments_run_in_a_process_too(name: str, interface: Any, said: str) -> None:
    world = EnvironmentWorldConfig(
        type="environment", environment=f"programs_of_tests:{name}", interface=interface, isolation="process"
    )
    tools = tools_of(programs_of_tests.Shop, interface=interface)
    with EnvironmentServer(world, tools=tools, folder=FOLDER, step_seconds=20.0) as result:
        environment = result.make()
        messages, _ = environment.reset(seed=1, task={"number": 1})
        environment.close()

    assert said in messages[-1]["content"]


def test_a_process_that_calls_tools_does_not_import_what_describes_them() -> None:
    world = EnvironmentWorldConfig(
        type="environment", environment="programs_of_tests:Stall", interface="tools", isolation="process"
    )
    tools = tools_of(programs_of_tests.Stall, interface="tools")
    with EnvironmentServer(world, tools=tools, folder=FOLDER, step_seconds=20.0) as result:
        environment = result.make()
        environment.reset(seed=1, task={})
        called = [
            environment.step(f'{{"name": "imported", "arguments": {{"module": "{name}"}}}}')[0][0]["content"]
            for name in ("json", "transformers", "torch")
        ]
        environment.close()

    assert called == ["true", "false", "false"]
