"""A server of environments, each in a process of its own, which is a fork of it.

It has imported the module of the environment and nothing heavy, so that a fork takes milliseconds. It is handed one end
of a line, a socket, for each environment; whoever asks holds the other end, and an environment lives as long as that
is open: when it is closed, by whatever befalls its holder, the process is killed with all that it has started. When a
process ends before, its line says how.

What goes over a line is a pickle behind its length. To an environment: the name of a method and what it is called with.
Back: `said` with what came, checked against the contract; `raised` with words for it; or `ended` with an exit code,
where that of a signal is negative.
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

from partita.simulation.adapters import adapted, load_environment
from partita.simulation.contract import Environment, answered, described, opened
from partita_schema.simulation import EnvironmentWorldConfig

LENGTH = struct.Struct("!Q")
PR_SET_PDEATHSIG = 1
"""Of Linux: a signal for when the parent ends."""


def send(line: socket.socket, message: Any, *, end: float | None = None) -> None:
    """Raises TimeoutError once it is `end` by the monotonic clock, and OSError where nobody listens."""
    sent = pickle.dumps(message)
    line.settimeout(left(end))
    line.sendall(LENGTH.pack(len(sent)) + sent)


def receive(line: socket.socket, *, end: float | None = None) -> Any:
    """The next message. Raises TimeoutError once it is `end`, and EOFError where nothing comes any more."""
    size = LENGTH.unpack(receive_bytes(line, LENGTH.size, end=end))[0]
    return pickle.loads(receive_bytes(line, size, end=end))


def receive_bytes(line: socket.socket, size: int, *, end: float | None) -> bytes:
    found = bytearray()
    while len(found) < size:
        line.settimeout(left(end))
        piece = line.recv(min(size - len(found), 2**20))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)


def left(end: float | None) -> float | None:
    """Seconds until then, for a socket; None without an end."""
    if end is None:
        return None
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


# The server


def main() -> None:
    """Serve what stands on the command line, as JSON, until the control socket is closed."""
    asked = json.loads(sys.argv[1])
    world = EnvironmentWorldConfig.model_validate(asked["world"])
    kind, _ = load_environment(world, folder=Path(asked["folder"]) if asked["folder"] is not None else None)
    make = adapted(kind, interface=world.interface, tools=asked["tools"])
    with socket.socket(fileno=asked["control"]) as control:
        line = ForkServer(control).serve()
    if line is not None:
        host(make, line)


class ForkServer:
    """Forks a process for each line that it is handed, and kills and reaps them."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.hosted: dict[int, tuple[int, socket.socket]] = {}
        """Processes with their lines, by descriptors of those."""
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
        """In a new process its line; None in the server, once it is to end and nothing of it is left."""
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == self.control.fileno():
                    asked, lines, _, _ = socket.recv_fds(self.control, 1, 1)
                    if not asked:
                        self.end()
                        return None
                    line = socket.socket(fileno=lines[0])
                    if self.begin(line):
                        return line
                elif descriptor == self.wake.fileno():
                    with suppress(BlockingIOError):
                        self.wake.recv(4096)
                    self.reap()
                elif descriptor in self.hosted:  # its other end is closed
                    self.poll.unregister(descriptor)
                    kill(self.hosted[descriptor][0])

    def begin(self, line: socket.socket) -> bool:
        """Fork; whether this is the new process."""
        parent, process = os.getpid(), os.fork()
        if process:
            self.hosted[line.fileno()] = (process, line)
            self.poll.register(line, 0)  # that is: only that the other end is closed
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
        for inherited in (self.control, self.wake, self.waking, *(other for _, other in self.hosted.values())):
            inherited.close()
        return True

    def reap(self) -> None:
        """Tell the ends of processes to those who hold their lines."""
        ended = []
        for descriptor, (process, line) in self.hosted.items():
            found, status = os.waitpid(process, os.WNOHANG)
            if not found:
                continue
            kill(process)  # what it has started
            with suppress(OSError):  # nobody may be there to hear it
                line.setblocking(False)
                told = pickle.dumps(("ended", os.waitstatus_to_exitcode(status)))
                line.send(LENGTH.pack(len(told)) + told)
            with suppress(KeyError):
                self.poll.unregister(descriptor)
            ended.append(descriptor)
        for descriptor in ended:
            self.hosted.pop(descriptor)[1].close()

    def end(self) -> None:
        """Kill what is left, and wait until it is gone."""
        for process, line in self.hosted.values():
            kill(process)
            os.waitpid(process, 0)
            line.close()


def kill(process: int) -> None:
    """Kill a process with all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


# A process of an environment


def host(make: Callable[..., Environment], line: socket.socket) -> None:
    """Make an environment of options, and answer what comes over the line until it is closed; the process ends here."""
    environment: Any = None
    with suppress(EOFError, OSError):
        while True:
            method, given = receive(line)
            try:
                if method == "make":
                    environment, said = make(**given), None
                else:
                    said = CALLS[method](environment, given)
                answer = ("said", said)
            except (Exception, SystemExit) as error:
                answer = ("raised", described(error))
            send(line, answer)
    flush_and_exit()


def flush_and_exit() -> None:
    """End without what the server, whose fork this is, would do at its end."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(0)


def reset(environment: Any, given: Mapping[str, Any]) -> Any:
    """What `reset` gives, once it is found to be what it should."""
    said = opened(environment.reset(seed=given["seed"], task=given["task"]))
    return list(said.messages), sendable(said.info)


def step(environment: Any, given: Mapping[str, Any]) -> Any:
    """What `step` gives, once it is found to be what it should."""
    said = answered(environment.step(given["action"]))
    return list(said.messages), said.reward, said.terminated, said.truncated, sendable(said.info)


def close(environment: Any, given: Mapping[str, Any]) -> None:
    """Let it close what it holds."""
    environment.close()


CALLS = {"reset": reset, "step": step, "close": close}


def sendable(info: Mapping[str, Any]) -> dict[str, Any]:
    """Info without what cannot be sent, which nobody looks at."""
    found = {}
    for name, value in info.items():
        with suppress(Exception):  # whatever an object makes of it
            pickle.dumps(value)
            found[name] = value
    return found
