"""The seed of random moments: drawn for each run of the tests, and printed at its beginning to be given again."""

import os
import random

VARIABLE = "PARTITA_TEST_SEED"


def set_session_seed() -> int:
    """Return the seed of this run, which the workers that it starts inherit."""
    return int(os.environ.setdefault(VARIABLE, str(random.SystemRandom().randrange(2**32))))


def session_seed() -> int:
    """Return the seed of this run, as its first line says it."""
    return int(os.environ[VARIABLE])
