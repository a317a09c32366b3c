"""Programs, each a fork of this process, which has imported the libraries once.

A connection to the socket that the command line numbers is a program: its three standard streams, and a line of JSON
with {"code", "arguments", "folder", "environment"}. The answer is a line with its process id, and when it has ended
one with its status as os.waitpid tells it. Nothing is left of this server in the program but what is imported: it ends
as a program of its own does. The server ends with its standard input.
"""

import gc
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
    """Import what almost every program needs."""
    import bitsandbytes  # noqa: F401
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import rich.progress  # noqa: F401
    from transformers import AutoTokenizer, GenerationMixin, LlamaForCausalLM  # noqa: F401

    import partita.cli.main
    import partita.data.formatting.formatter
    import partita.model  # noqa: F401
    import partita_trainers.finetune  # noqa: F401

    gc.freeze()  # a fork that looked through all of this for garbage, as it does at its end, would copy it


def serve(server: socket.socket) -> Request | None:
    """In the process of a program, what is to be run there; in the server None, once it is to end."""
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
    """Processes that have reported the end of a program are waited for, so that their time counts as this process's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def start(connection: socket.socket) -> Request:
    """What is to be run, in its process; the one that has started it waits for its end, reports it and exits."""
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
    """Make this process look as a new one does."""
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    sys.argv = program["arguments"]
    sys.path[0] = ""
    sys.stdout.reconfigure(line_buffering=os.isatty(1))


if __name__ == "__main__":
    main()
