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
        self.connections: set[socket.socket] = set()
        self.lock = threading.Lock()

    def __enter__(self) -> "EnvironmentServer":
        self.control, remote_end = socket.socketpair()
        request = {
            "control": remote_end.fileno(),
            "world": self.world.model_dump(mode="json"),
            "tools": self.tools,
            "folder": str(self.folder.resolve()) if self.folder is not None else None,
            "path": [str(Path(entry).absolute()) for entry in sys.path],
        }
        with remote_end:
            # A new session keeps the terminal's Ctrl-C from the server: this process decides when dialogues end.
            self.server = subprocess.Popen(
                [sys.executable, "-P", "-c", SERVER, json.dumps(request)],
                stdin=subprocess.DEVNULL,
                pass_fds=[remote_end.fileno()],
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.lock:
            for connection in self.connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that still waits for this socket
        self.control.close()
        try:
            self.server.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        for connection in list(self.connections):
            self.forget(connection)

    def check(self) -> None:
        """Create and close one environment as a test. Raises RemoteError or StepTimeoutError."""
        environment = self.environment(seconds=START_SECONDS)
        environment.close()

    def make(self) -> "RemoteEnvironment":
        """Start an environment in a new process. Raises RemoteError or StepTimeoutError."""
        return self.environment(seconds=self.seconds)

    def environment(self, *, seconds: float) -> "RemoteEnvironment":
        connection, remote_end = socket.socketpair()
        with self.lock:
            self.connections.add(connection)
        with remote_end:
            try:
                socket.send_fds(self.control, [b"."], [remote_end.fileno()])
            except OSError as error:
                self.forget(connection)
                raise RemoteError("the server that starts its process has ended") from error
        environment = RemoteEnvironment(connection, self)
        try:
            environment.call("make", self.world.options, seconds=seconds)
        except BaseException:
            self.forget(connection)
            raise
        return environment

    def forget(self, connection: socket.socket) -> None:
        """Close a socket, which ends the process at its other end."""
        with self.lock:
            self.connections.discard(connection)
            connection.close()


class RemoteEnvironment:
    """A `partita.simulation.contract.Environment` in another process, called through a socket."""

    def __init__(self, connection: socket.socket, server: EnvironmentServer) -> None:
        self.connection, self.server = connection, server

    def reset(self, *, seed: int, task: Mapping[str, Any]) -> Any:
        """Call its `reset` and return the result."""
        return self.call("reset", {"seed": seed, "task": task})

    def step(self, action: str) -> Any:
        """Call its `step` and return the result."""
        return self.call("step", {"action": action})

    def close(self) -> None:
        """Call its `close` and end its process."""
        try:
            if self.connection.fileno() >= 0:
                self.call("close", {})
        finally:
            self.server.forget(self.connection)

    def call(self, method: str, arguments: Mapping[str, Any], *, seconds: float | None = None) -> Any:
        """Call a method in the environment process and return its result.

        Raises:
            RemoteError: The method raised an error or its process ended.
            StepTimeoutError: The call exceeded its time limit; the process is killed.
        """
        allowed = self.server.seconds if seconds is None else seconds
        end = time.monotonic() + allowed
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # its last message can still be read below
                send(self.connection, (method, dict(arguments)), end=end)
            kind, value = receive(self.connection, end=end)
        except TimeoutError:
            self.server.forget(self.connection)
            raise StepTimeoutError(allowed) from None
        except (OSError, EOFError):
            self.server.forget(self.connection)
            raise RemoteError("its process has ended") from None
        if kind == "ended":
            self.server.forget(self.connection)
            raise RemoteError(describe_exit(value))
        if kind == "raised":
            raise RemoteError(value)
        return value


def describe_exit(code: int) -> str:
    """Describe the exit code of a process."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"its process was ended by {name}"
