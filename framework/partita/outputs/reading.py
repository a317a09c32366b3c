"""The error of an unreadable answer, and how answers are quoted in it."""


class ReadError(ValueError):
    """An answer without a value of the expected type; the text says why. It never leaves the decoder."""


def clipped(text: str, *, most: int = 60) -> str:
    """Return the text in quotes, with the middle left out if it is long."""
    if len(text) > most:
        half = (most - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    return repr(text)
