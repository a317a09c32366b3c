"""The seed of random kill times: drawn for each run of the tests, and printed at its start for repeating it."""

import os
import random

VARIABLE = "PARTITA_TEST_SEED"


def set_session_seed() -> int:
    """Set and return the seed of this run, which its workers inherit."""
    return int(os.environ.setdefault(VARIABLE, str(random.SystemRandom().randrange(2**32))))


def session_seed() -> int:
    """Return the seed of this run, which is in the header of its output."""
    return int(os.environ[VARIABLE])
