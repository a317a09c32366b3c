"""Programs that need torch and transformers, run as forks of one process that has imported them.

Importing them takes seconds in every new process. In all other respects a fork is a separate process: folder,
environment, streams, signals and exit code are those of `python -c`.
"""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SERVER = Path(__file__).with_name("fork_server.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
COMMAND = "from partita.cli.main import run; run()"
"""The `partita` command; its name is the first of the arguments."""


class Fork:
    """A started program, with the methods of subprocess.Popen."""

    def __init__(self, connection: socket.socket, said: Sequence[Path]) -> None:
        self.connection, self.said = connection, said
        self.answers = connection.makefile()
        self.pid = int(self.answers.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float = 120) -> int:
        """Wait for the end; return the exit code, which is negative for a signal."""
        if self.returncode is None:
            self.connection.settimeout(timeout)
            self.returncode = os.waitstatus_to_exitcode(int(self.answers.readline()))
            self.answers.close()
            self.connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        if self.returncode is None and select.select([self.connection], [], [], 0)[0]:
            return self.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # ended meanwhile
                os.kill(self.pid, number)

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Wait for the end; return standard output and standard error."""
        self.wait(timeout)
        output, errors = (path.read_text(encoding="utf8") for path in self.said)
        return output, errors


class Forks:
    """Starts programs; `end` stops the server."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, 0
        self.environment = os.environ | ENVIRONMENT
        self.address, self.log = str(folder / "socket"), folder / "errors"
        with socket.socket(socket.AF_UNIX) as server, self.log.open("w") as errors:
            server.bind(self.address)
            server.listen()
            self.process = subprocess.Popen(
                [sys.executable, str(SERVER), str(server.fileno())],
                stdin=subprocess.PIPE,
                stderr=errors,
                env=self.environment,
                pass_fds=[server.fileno()],
            )

    def end(self) -> None:
        self.process.communicate()

    def start(
        self,
        code: str,
        *words: object,
        folder: Path,
        environment: dict[str, str] | None = None,
        terminal: int | None = None,
    ) -> Fork:
        """Start a program with the words as arguments, all streams on a terminal or standard input empty."""
        self.started += 1
        said = [self.folder / f"{self.started}.{name}" for name in ("output", "errors")]
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        with Path(os.devnull).open() as nothing, said[0].open("w") as output, said[1].open("w") as errors:
            streams = [nothing, output, errors] if terminal is None else [terminal] * 3
            socket.send_fds(
                connection, [b"."], [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
            )
        program = {
            "code": code,
            "arguments": [str(word) for word in words],
            "folder": str(folder),
            "environment": self.environment if environment is None else environment,
        }
        connection.sendall(json.dumps(program).encode() + b"\n")
        return Fork(connection, said)

    def run(
        self,
        code: str,
        *words: object,
        folder: Path,
        environment: dict[str, str] | None = None,
        timeout: float = 120,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program to its end; return the result."""
        program = self.start(code, *words, folder=folder, environment=environment)
        said, errors = program.communicate(timeout)
        return subprocess.CompletedProcess(words, program.wait(), said, errors)
