"""The program's log on the screen: one line an event, with numbers in it."""

import logging
import os
import sys
import warnings


def show_log(*, quiet: bool) -> None:
    """Show partita's log on standard error, and keep the libraries' chatter off it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("partita", "partita_trainers", "partita_schema"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.WARNING if quiet else logging.INFO)
        logger.propagate = False
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for noise in ("transformers", "bitsandbytes", "torch", "accelerate", "datasets", "huggingface_hub", "matplotlib"):
        logging.getLogger(noise).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
