"""The program's log on the screen: one line an event, with numbers in it."""

import logging
import os
import sys
import warnings

from partita.distributed.place import LAUNCHED

OF_ONE_DEVICE = ("partita_trainers.step", "partita.inference.slots", "partita.inference.halving")
"""What these warn of happens on one process; all other warnings are the same on every one."""


def show_log(*, quiet: bool, rank: int = 0) -> None:
    """Show partita's log on standard error, and keep the libraries' chatter off it.

    Of several processes, rank 0 tells what is the same on all.
    """
    handler = logging.StreamHandler(sys.stderr)
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
        logging.getLogger("partita.file").setLevel(logging.ERROR)  # who started this process has told it
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for noise in ("transformers", "bitsandbytes", "torch", "accelerate", "datasets", "huggingface_hub", "matplotlib"):
        logging.getLogger(noise).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
