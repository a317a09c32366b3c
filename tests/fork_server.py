"""A server that runs programs as forks of its process, which has imported the libraries once.

Each connection to the socket, whose file descriptor is on the command line, starts a program: it sends three standard
streams and a line of JSON with {"code", "arguments", "folder", "environment"}. The answer is a line with the process id
and, after the end, a line with the status of os.waitpid. The program keeps only the imported modules of this server
and ends like a separate program. The server ends with its standard input.
"""

import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

Request = dict[str, Any]


def main() -> None:
    load()
    with socket.socket(fileno=int(sys.argv[1])) as server:
        program = serve(server)
    if program is not None:
        become(program)
        exec(compile(program["code"], "<string>", "exec"), {"__name__": "__main__"})


def load() -> None:
    """Import the libraries that almost every program needs."""
    from partita_schema.common.garbage_collection import permanent_imports

    with permanent_imports():  # the garbage collection at the end of a fork would copy all these objects
        from partita_trainers.libraries.bitsandbytes_import import import_bitsandbytes

        import_bitsandbytes()  # before peft
        import datasets  # noqa: F401
        import peft  # noqa: F401
        import rich.progress  # noqa: F401
        import sacrebleu.metrics  # noqa: F401
        from transformers import AutoTokenizer, GenerationMixin, LlamaForCausalLM  # noqa: F401

        import partita.cli.main
        import partita.data.formatting.formatter
        import partita.model  # noqa: F401
        import partita_trainers.finetune  # noqa: F401


def serve(server: socket.socket) -> Request | None:
    """Return the request in the process of a program, and None in the server at its end."""
    signal.signal(signal.SIGCHLD, reap)
    while server in select.select([server, sys.stdin], [], [])[0]:
        connection, _ = server.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            server.close()
            return start(connection)
        connection.close()
    return None


def reap(number: int, frame: FrameType | None) -> None:
    """Wait for processes that have reported the end of a program, so that their CPU time is counted for this one."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def start(connection: socket.socket) -> Request:
    """Return the request in the process of the program; its parent waits for the end, reports it and exits."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection, connection.makefile("rw") as channel:
        request: Request = json.loads(channel.readline())
        pid = os.fork()
        if pid:
            print(pid, file=channel, flush=True)
            print(os.waitpid(pid, 0)[1], file=channel, flush=True)
            os._exit(0)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    return request


def become(program: Request) -> None:
    """Make this process look like a new one."""
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    sys.argv = program["arguments"]
    sys.path[0] = ""
    sys.stdout.reconfigure(line_buffering=os.isatty(1))


if __name__ == "__main__":
    main()
