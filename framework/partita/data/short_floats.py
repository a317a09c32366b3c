"""Numbers of 16 and 32 bits as Python's numbers of 64 bits, with the same shortest text: 3.8 stays 3.8.

pyarrow, `datasets`, pandas and NumPy return the nearest number of 64 bits instead, which is 3.799999952316284.
"""

from collections.abc import Mapping

import numpy as np

SHORT: Mapping[str, type[np.floating]] = {
    "float16": np.float16,
    "float32": np.float32,
    "halffloat": np.float16,
    "float": np.float32,
}
"""The class of a type, by the name of NumPy or Arrow."""


def same_text(value: float | None, *, kind: type[np.floating]) -> float | None:
    """Return a number whose text is that of a shorter type; None for None."""
    return None if value is None else float(str(kind(value)))
