"""The program's log on the terminal: one line per event, with numbers in it."""

import logging
import os
import sys
import textwrap
import warnings

from partita.distributed.world import LAUNCHED
from partita.runs.json_log import JsonHandler, is_json
from partita.runs.waiting import WAITS, show_waits

OF_ONE_DEVICE = (
    "partita_trainers.steps.micro_batches",
    "partita.generation.scheduler",
    "partita.generation.oom_backoff",
)
"""Loggers whose warnings concern one process; all other warnings are the same on every rank."""
WARNING_LIBRARIES = (
    *("accelerate", "bitsandbytes", "datasets", "huggingface_hub", "matplotlib", "peft", "pyarrow", "ray"),
    *("sacrebleu", "schedulefree", "sentence_transformers", "sklearn", "tokenizers", "torch"),
    *("transformers", "importlib", "partita", "partita_trainers", "partita_schema"),
)
"""Modules whose warnings are hidden: the libraries, and partita itself, because `stacklevel` points at the caller."""


def show_log(*, quiet: bool, rank: int = 0) -> None:
    """Show partita's log on standard error, and silence the logs and warnings of libraries.

    With several processes, only rank 0 logs what is the same on all ranks.
    """
    show_waits(quiet=quiet or rank > 0 or is_json())
    handler = JsonHandler() if is_json() else TerminalHandler()
    handler.setFormatter(logging.Formatter(f"rank {rank}: %(message)s" if rank else "%(message)s"))
    level = logging.ERROR if rank else logging.WARNING if quiet else logging.INFO
    for name in ("partita", "partita_trainers", "partita_schema"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
    for name in OF_ONE_DEVICE if rank else ():
        logging.getLogger(name).setLevel(logging.WARNING)
    if LAUNCHED in os.environ:
        logging.getLogger("partita.file").setLevel(logging.ERROR)  # The launcher has already logged it.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for noise in ("transformers", "bitsandbytes", "torch", "accelerate", "datasets", "huggingface_hub", "matplotlib"):
        logging.getLogger(noise).setLevel(logging.ERROR)
    for name in WARNING_LIBRARIES:
        warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")


class TerminalHandler(logging.Handler):
    """Write to the current `sys.stderr`, above a progress bar; on a terminal, wrap lines at spaces."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as whole lines."""
        try:
            text = self.format(record)
            if sys.stderr.isatty():
                text = wrap(text, width=terminal_width())
            WAITS.erase()
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
            WAITS.draw()
        except Exception:
            self.handleError(record)


def wrap(text: str, *, width: int) -> str:
    """Wrap lines at spaces only; a word longer than a line, such as a path, is not broken."""
    lines = (
        textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )
    return "\n".join("\n".join(line) for line in lines)


def terminal_width() -> int:
    """Return the width from COLUMNS, else that of the terminal on standard error, else 80."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
