"""The client of the fork server: runs each environment in a separate process, which can be killed."""

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
from partita_schema.sections.simulation import EnvironmentWorldConfig

SERVER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])["path"]
from partita.simulation.fork_server import main
main()
"""
"""Program of the server process. It uses the module search path of this process."""
START_SECONDS = 120.0
"""Time limit for importing the environment's module and creating a first environment."""
END_SECONDS = 10.0
"""Time limit for the server to kill the remaining processes."""


class RemoteError(ContractError):
    """An error in an environment process; its message is reported to the user."""


class EnvironmentServer:
    """Starts one process per environment. A context manager: all processes have ended when it exits."""

    def __init__(
        self,
        world: EnvironmentWorldConfig,
        *,
        folder: Path | None,
        step_seconds: float,
        tools: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Store the settings; the server starts on entering the context.

        Args:
            world: Class and options of the environments.
            folder: Folder of the configuration file, where modules are searched; None without one.
            step_seconds: Time limit of each method call, in seconds.
            tools: Result of `tools_of`. It is passed in because computing it needs a library that environment
                processes should not import.
        """
        self.world, self.tools, self.folder, self.seconds = world, dict(tools), folder, step_seconds
        self.lines: set[socket.socket] = set()
        self.changing = threading.Lock()

    def __enter__(self) -> "EnvironmentServer":
        self.control, theirs = socket.socketpair()
        request = {
            "control": theirs.fileno(),
            "world": self.world.model_dump(mode="json"),
            "tools": self.tools,
            "folder": str(self.folder.resolve()) if self.folder is not None else None,
            "path": [str(Path(entry).absolute()) for entry in sys.path],
        }
        with theirs:
            # A new session keeps the terminal's Ctrl-C from the server: this process decides when dialogues end.
            self.server = subprocess.Popen(
                [sys.executable, "-P", "-c", SERVER, json.dumps(request)],
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
                    line.shutdown(socket.SHUT_RDWR)  # wakes a thread that still waits for this socket
        self.control.close()
        try:
            self.server.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        for line in list(self.lines):
            self.forget(line)

    def check(self) -> None:
        """Create and close one environment as a test. Raises RemoteError or StepTimeoutError."""
        environment = self.environment(seconds=START_SECONDS)
        environment.close()

    def make(self) -> "RemoteEnvironment":
        """Start an environment in a new process. Raises RemoteError or StepTimeoutError."""
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
        """Close a socket, which ends the process at its other end."""
        with self.changing:
            self.lines.discard(line)
            line.close()


class RemoteEnvironment:
    """A `partita.simulation.contract.Environment` in another process, called through a socket."""

    def __init__(self, line: socket.socket, hosts: EnvironmentServer) -> None:
        self.line, self.hosts = line, hosts

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> Any:
        """Call its `reset` and return the result."""
        return self.call("reset", {"seed": seed, "task": task})

    def step(self, action: str) -> Any:
        """Call its `step` and return the result."""
        return self.call("step", {"action": action})

    def close(self) -> None:
        """Call its `close` and end its process."""
        try:
            if self.line.fileno() >= 0:
                self.call("close", {})
        finally:
            self.hosts.forget(self.line)

    def call(self, method: str, arguments: Mapping[str, Any], *, seconds: float | None = None) -> Any:
        """Call a method in the environment process and return its result.

        Raises:
            RemoteError: The method raised an error or its process ended.
            StepTimeoutError: The call exceeded its time limit; the process is killed.
        """
        allowed = self.hosts.seconds if seconds is None else seconds
        end = time.monotonic() + allowed
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # its last message can still be read below
                send(self.line, (method, dict(arguments)), end=end)
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
    """Describe the exit code of a process."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    return f"its process was ended by {signal.Signals(-code).name}"
