"""Environments in processes of their own, which can be killed: seen from the process that has the dialogues."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from partita.simulation.contract import ContractError, StepTimeoutError
from partita.simulation.fork_server import receive, send
from partita_schema.simulation import EnvironmentWorldConfig

SERVER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])["path"]
from partita.simulation.fork_server import main
main()
"""
"""Its program: it looks for modules where this process does."""
START_SECONDS = 120.0
"""Time that the server has to import the module of the environment, and to make a first one."""
END_SECONDS = 10.0
"""Time that the server has to kill what is left."""


class RemoteError(ContractError):
    """What went wrong in the process of an environment, in the words that it is told in."""


class EnvironmentServer:
    """Starts a process for each environment of a class. A context manager: at its end no process is left."""

    def __init__(
        self,
        world: EnvironmentWorldConfig,
        *,
        folder: Path | None,
        step_seconds: float,
        tools: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`world` says which class, made with which options; each of its methods may take so many seconds.

        `tools` are those of `tools_of`: to find them takes a library that no process of an environment should import.
        """
        self.world, self.tools, self.folder, self.seconds = world, dict(tools), folder, step_seconds
        self.lines: set[socket.socket] = set()
        self.changing = threading.Lock()

    def __enter__(self) -> "EnvironmentServer":
        self.control, theirs = socket.socketpair()
        asked = {
            "control": theirs.fileno(),
            "world": self.world.model_dump(mode="json"),
            "tools": self.tools,
            "folder": str(self.folder.resolve()) if self.folder is not None else None,
            "path": [str(Path(place).absolute()) for place in sys.path],
        }
        with theirs:
            # In a session of its own no Ctrl-C of a terminal comes there: this process says when dialogues end.
            self.server = subprocess.Popen(
                [sys.executable, "-P", "-c", SERVER, json.dumps(asked)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.changing:
            for line in self.lines:
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)  # a thread that still waits there is woken
        self.control.close()
        try:
            self.server.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        for line in list(self.lines):
            self.forget(line)

    def check(self) -> None:
        """Make one, to see that it can be. Raises HostedError, or StepTimeoutError."""
        environment = self.environment(seconds=START_SECONDS)
        environment.close()

    def make(self) -> "RemoteEnvironment":
        """An environment in a new process. Raises HostedError, or StepTimeoutError."""
        return self.environment(seconds=self.seconds)

    def environment(self, *, seconds: float) -> "RemoteEnvironment":
        line, theirs = socket.socketpair()
        with self.changing:
            self.lines.add(line)
        with theirs:
            try:
                socket.send_fds(self.control, [b"."], [theirs.fileno()])
            except OSError as error:
                self.forget(line)
                raise RemoteError("the server that starts its process has ended") from error
        environment = RemoteEnvironment(line, self)
        try:
            environment.call("make", self.world.options, seconds=seconds)
        except BaseException:
            self.forget(line)
            raise
        return environment

    def forget(self, line: socket.socket) -> None:
        """Close a line, and so end the process at its other end."""
        with self.changing:
            self.lines.discard(line)
            line.close()


class RemoteEnvironment:
    """A `partita.simulation.contract.Environment` at the other end of a line."""

    def __init__(self, line: socket.socket, hosts: EnvironmentServer) -> None:
        self.line, self.hosts = line, hosts

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> Any:
        """What its `reset` gives."""
        return self.call("reset", {"seed": seed, "task": task})

    def step(self, action: str) -> Any:
        """What its `step` gives."""
        return self.call("step", {"action": action})

    def close(self) -> None:
        """Let it close what it holds, and end its process."""
        try:
            if self.line.fileno() >= 0:
                self.call("close", {})
        finally:
            self.hosts.forget(self.line)

    def call(self, method: str, given: Mapping[str, Any], *, seconds: float | None = None) -> Any:
        """What a method gives. Raises HostedError with what it raised, or how its process has ended.

        Raises StepTimeoutError where it takes too long: then its process is killed.
        """
        allowed = self.hosts.seconds if seconds is None else seconds
        end = time.monotonic() + allowed
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # what it has said at its end is still to be read
                send(self.line, (method, dict(given)), end=end)
            kind, value = receive(self.line, end=end)
        except TimeoutError:
            self.hosts.forget(self.line)
            raise StepTimeoutError(allowed) from None
        except (OSError, EOFError):
            self.hosts.forget(self.line)
            raise RemoteError("its process has ended") from None
        if kind == "ended":
            self.hosts.forget(self.line)
            raise RemoteError(ended(value))
        if kind == "raised":
            raise RemoteError(value)
        return value


def ended(code: int) -> str:
    """How a process has ended, for people."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    return f"its process was ended by {signal.Signals(-code).name}"
