"""The `partita` command: its subcommands, and the mapping of errors to exit statuses.

0: success, 1: the job failed, 2: invalid input (file, data, folder, option), 130: interrupted.
"""

import atexit
import gc
import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from partita.cli.chat import chat
from partita.cli.compare import compare
from partita.cli.convert import convert
from partita.cli.doctor import doctor
from partita.cli.evaluate import evaluate
from partita.cli.explain import explain
from partita.cli.export import export, merge
from partita.cli.init import init
from partita.cli.predict import predict
from partita.cli.preview import preview
from partita.cli.push import push
from partita.cli.report import report
from partita.cli.runs import runs
from partita.cli.schema import schema
from partita.cli.serve import serve
from partita.cli.simulate import simulate
from partita.cli.sweep import sweep
from partita.cli.train import train
from partita.cli.tune import tune
from partita.cli.validate import validate
from partita.distributed.world import FAILURE_GRACE_SECONDS
from partita_schema.errors import ConfigError, LostRankError, OtherRankError, PartitaError

ERROR = "error: "
INTERRUPTED = 130
RESUMABLE = ("train", "predict", "simulate", "sweep")
"""Commands that continue where they were interrupted."""


class Commands(TyperGroup):
    """The commands, whose options are refused in plain words."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Call a command; a wrong value is reported without the prefix of pydantic.

        Raises:
            RuntimeError: A file ended early, such as a damaged module of a library.
        """
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise
        except EOFError as error:  # typer takes it for the end of standard input, and says only "Aborted!"
            raise RuntimeError(f"a file ended early: {error}") from error


app = typer.Typer(
    name="partita",
    cls=Commands,
    help="Train, run and evaluate language models from one YAML file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # the tables of rich leave half of 80 columns to the help text, and flags get a `<bool>`
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
    """Print the version and exit, if `wanted`."""
    if wanted:
        from importlib.metadata import version

        print(f"partita {version('partita')}")
        raise typer.Exit


COMMANDS = (
    init,
    validate,
    explain,
    preview,
    tune,
    train,
    sweep,
    predict,
    evaluate,
    simulate,
    chat,
    serve,
    report,
    compare,
    export,
    merge,
    push,
    convert,
    schema,
    doctor,
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(runs, name="runs")


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Train, run and evaluate language models from one YAML file."""


def run() -> None:
    """Run the command line. An expected error is printed as one line without a traceback."""
    atexit.register(end_on_signals)  # registered first, so called last
    atexit.register(skip_last_collection)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        app()
    except OtherRankError as error:
        from partita_trainers.interrupt import TERMINATED

        with suppress(KeyboardInterrupt):
            time.sleep(FAILURE_GRACE_SECONDS)
            # A launcher that ends this process says why.
            if isinstance(error, LostRankError) and not TERMINATED.is_set():
                fail(str(error), code=error.exit_status, label=ERROR)
        sys.exit(error.exit_status)
    except ConfigError as error:  # each line begins with the location in the file
        sys.exit(fail(str(error), code=error.exit_status))
    except PartitaError as error:
        sys.exit(fail(str(error), code=error.exit_status, label=ERROR))
    except OSError as error:  # a folder without permission, a full disk
        sys.exit(fail(str(error), code=1, label=ERROR))
    except KeyboardInterrupt:  # outside a command
        sys.exit(fail(interrupted_text(), code=INTERRUPTED) if is_first_to_speak() else INTERRUPTED)
    except SystemExit as ended:
        if ended.code == INTERRUPTED and is_first_to_speak():
            fail(interrupted_text(), code=INTERRUPTED)
        raise
    finally:
        end_on_second_signal()


def interrupted_text() -> str:
    """Return what to do after an interruption of this command."""
    resumes = len(sys.argv) > 1 and sys.argv[1] in RESUMABLE
    return "interrupted; rerun the same command to resume from what is saved" if resumes else "interrupted"


def skip_last_collection() -> None:
    """Skip the garbage collection at exit in a process that has loaded neither a model nor data.

    It searches all live objects for cycles, which takes a tenth of the time of `partita validate` and frees nothing
    that the end of the process does not free.
    """
    if "torch" not in sys.modules:
        gc.freeze()


def end_on_second_signal() -> None:
    """Let a first signal have no effect from now on: this process exits already, and libraries clean up."""

    def handle(number: int, frame: FrameType | None) -> None:
        end_on_signals()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)


def end_on_signals() -> None:
    """Let signals end this process at once while the interpreter exits, instead of raising errors in destructors."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM like Ctrl-C."""
    raise KeyboardInterrupt


def is_first_to_speak() -> bool:
    """Return whether this process reports what concerns all processes of a job."""
    from partita.distributed.world import LAUNCHED, get_world

    return get_world().rank == 0 and LAUNCHED not in os.environ


def fail(message: str, *, code: int, label: str = "") -> int:
    """Print an error to standard error, with the rank if it is not 0, and return the exit status.

    Args:
        message: The error.
        code: The exit status.
        label: What stands before the message; left out of JSON lines, whose level says it.
    """
    from partita.cli.printing import print_wrapped
    from partita.distributed.world import get_world
    from partita.runs.json_log import is_json, write_event

    rank = get_world().rank
    which = f"rank {rank}: " if rank else ""
    if is_json():
        write_event("error", event="error", message=which + message, status=code)
    else:
        print_wrapped(which + label + message, sys.stderr)
    return code
