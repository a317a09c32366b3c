"""What the readers of answers share: the exception for an answer without a value, and how an answer is quoted in it."""


class ReadError(ValueError):
    """An answer that holds no value of the wanted kind; the text says why. It never leaves the decoder."""


def clipped(text: str, *, most: int = 60) -> str:
    """The text in quotes, its middle left out where it is long."""
    if len(text) > most:
        half = (most - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    return repr(text)
