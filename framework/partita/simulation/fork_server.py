"""Fork server for environments: each environment runs in a separate fork of this process.

The server imports the environment's module and nothing heavy, so a fork takes milliseconds. For each environment it
receives one end of a socket pair, its connection; the client holds the other end. An environment lives as long as
the client's end is open. When that end closes, including when the client crashes, the server kills the process and its
children. When a process ends earlier, its connection carries the exit code.

A message is a pickle, preceded by its length. A request is the name of a method and its arguments. A response is one of
- `result` with the result, which has been checked against the contract,
- `raised` with an error message,
- `ended` with the exit code of the process, negative for a signal.
"""

import ctypes
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from partita.simulation.adapters import adapt, load_environment
from partita.simulation.contract import (
    Environment,
    check_reset_result,
    check_step_result,
    close_program,
    describe_program_error,
)
from partita_schema.sections.simulation import EnvironmentWorldConfig

LENGTH = struct.Struct("!Q")
PR_SET_PDEATHSIG = 1
"""Option of Linux' `prctl`: the signal that a process receives when its parent ends."""


def send(connection: socket.socket, message: Any, *, end: float | None = None) -> None:
    """Send a message.

    Raises:
        TimeoutError: The monotonic clock has reached `end`.
        OSError: The other end is closed.
    """
    sent = pickle.dumps(message)
    connection.settimeout(seconds_left(end))
    connection.sendall(LENGTH.pack(len(sent)) + sent)


def receive(connection: socket.socket, *, end: float | None = None) -> Any:
    """Return the next message.

    Raises:
        TimeoutError: The monotonic clock has reached `end`.
        EOFError: The other end is closed.
    """
    size = LENGTH.unpack(receive_bytes(connection, LENGTH.size, end=end))[0]
    return pickle.loads(receive_bytes(connection, size, end=end))


def receive_bytes(connection: socket.socket, size: int, *, end: float | None) -> bytes:
    received = bytearray()
    while len(received) < size:
        connection.settimeout(seconds_left(end))
        piece = connection.recv(min(size - len(received), 2**20))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


def seconds_left(end: float | None) -> float | None:
    """Return the seconds until `end`, or None without an end. Raises TimeoutError once it is reached."""
    if end is None:
        return None
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


# The server


def main() -> None:
    """Serve the world given as JSON on the command line until the control socket is closed."""
    request = json.loads(sys.argv[1])
    world = EnvironmentWorldConfig.model_validate(request["world"])
    kind, _ = load_environment(world, folder=Path(request["folder"]) if request["folder"] is not None else None)
    make = adapt(kind, interface=world.interface, tools=request["tools"])
    with socket.socket(fileno=request["control"]) as control:
        connection = ForkServer(control).serve()
    if connection is not None:
        host(make, connection)


class ForkServer:
    """Forks a process for each connection it receives, kills processes whose connection is closed, and reaps them."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.processes: dict[int, tuple[int, socket.socket]] = {}
        """Process ids and connections, by file descriptor of the connection."""
        self.poll = select.poll()
        self.wake, waking = socket.socketpair()
        for end in (self.wake, waking):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        self.waking = waking
        for readable in (control, self.wake):
            self.poll.register(readable, select.POLLIN)

    def serve(self) -> socket.socket | None:
        """Serve until the control socket is closed. Returns the connection in a forked process, None in the server."""
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == self.control.fileno():
                    request, descriptors, _, _ = socket.recv_fds(self.control, 1, 1)
                    if not request:
                        self.end()
                        return None
                    connection = socket.socket(fileno=descriptors[0])
                    if self.begin(connection):
                        return connection
                elif descriptor == self.wake.fileno():
                    with suppress(BlockingIOError):
                        self.wake.recv(4096)
                    self.reap()
                elif descriptor in self.processes:  # its other end is closed
                    self.poll.unregister(descriptor)
                    kill(self.processes[descriptor][0])

    def begin(self, connection: socket.socket) -> bool:
        """Fork. Returns whether this is the new process."""
        parent, process = os.getpid(), os.fork()
        if process:
            self.processes[connection.fileno()] = (process, connection)
            self.poll.register(connection, 0)  # no events: reports only that the other end is closed
            with suppress(OSError):
                os.setpgid(process, process)
            return False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
        for inherited in (self.control, self.wake, self.waking, *(other for _, other in self.processes.values())):
            inherited.close()
        return True

    def reap(self) -> None:
        """Reap ended processes and send their exit codes to the clients."""
        ended = []
        for descriptor, (process, connection) in self.processes.items():
            reaped, status = os.waitpid(process, os.WNOHANG)
            if not reaped:
                continue
            kill(process)  # its children
            with suppress(OSError):  # the client may have closed its end
                connection.setblocking(False)
                message = pickle.dumps(("ended", os.waitstatus_to_exitcode(status)))
                connection.send(LENGTH.pack(len(message)) + message)
            with suppress(KeyError):
                self.poll.unregister(descriptor)
            ended.append(descriptor)
        for descriptor in ended:
            self.processes.pop(descriptor)[1].close()

    def end(self) -> None:
        """Kill the remaining processes and wait until they have ended."""
        for process, connection in self.processes.values():
            kill(process)
            os.waitpid(process, 0)
            connection.close()


def kill(process: int) -> None:
    """Kill a process and its children (its process group)."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


# The environment process


def host(make: Callable[..., Environment], connection: socket.socket) -> None:
    """Serve the requests on the connection until it is closed, then exit the process."""
    environment: Any = None
    with suppress(EOFError, OSError):
        while True:
            method, arguments = receive(connection)
            try:
                if method == "make":
                    environment, result = make(**arguments), None
                else:
                    result = CALLS[method](environment, arguments)
                answer = ("result", result)
            except BaseException as error:
                answer = ("raised", describe_program_error(error))
            send(connection, answer)
    flush_and_exit()


def flush_and_exit() -> None:
    """Exit without running the exit handlers inherited from the server."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(0)


def reset(environment: Any, arguments: Mapping[str, Any]) -> Any:
    """Call `reset` and return the result after checking it against the contract."""
    result = check_reset_result(environment.reset(seed=arguments["seed"], task=arguments["task"]))
    return list(result.messages), sendable(result.info)


def step(environment: Any, arguments: Mapping[str, Any]) -> Any:
    """Call `step` and return the result after checking it against the contract."""
    result = check_step_result(environment.step(arguments["action"]))
    return list(result.messages), result.reward, result.terminated, result.truncated, sendable(result.info)


def close(environment: Any, arguments: Mapping[str, Any]) -> None:
    """Close the environment."""
    close_program(environment)


CALLS = {"reset": reset, "step": step, "close": close}


def sendable(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the picklable entries of `info`; the others are not used."""
    entries = {}
    for name, value in info.items():
        with suppress(Exception):  # pickling runs code of the object, which may raise anything
            pickle.dumps(value)
            entries[name] = value
    return entries
